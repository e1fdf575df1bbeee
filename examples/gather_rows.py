"""An op whose integers are row numbers: python examples/gather_rows.py"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl


# --8<-- [start:declare]
@sl.op("gather_rows::gather")
def gather(
    feats: Float[Tensor, "n c"], index: Int64[Tensor, "m"]
) -> Float[Tensor, "m c"]:
    """Row ``index[j]`` of ``feats``, or zeros where it is -1."""
    padded = torch.cat([feats, feats.new_zeros(1, feats.shape[1])])
    return padded[index]  # -1 is the last row, which is zero


@gather.samples
def _(rng, sizes, dtype, device):  # rng is a seeded CPU generator; sizes has every dim
    feats = torch.randn(sizes["n"], sizes["c"], generator=rng, dtype=dtype)
    index = torch.randint(-1, sizes["n"], (sizes["m"],), generator=rng)
    return feats.to(device), index.to(device)


# --8<-- [end:declare]


@gather.backward
def _(grad, saved, needs):
    rows = torch.where(saved.index < 0, saved.feats.shape[0], saved.index)
    padded = grad.new_zeros(saved.feats.shape[0] + 1, saved.feats.shape[1]).index_add(
        0, rows, grad
    )
    return {"feats": padded[:-1]}


def main() -> None:
    # without checks=: all of them
    report = sl.audit(gather, checks=("fake", "numerics", "edges", "gradient"))
    assert report.proven, str(report)
    print("gather does what it declares")


if __name__ == "__main__":
    main()
