"""Outputs and workspace that the caller owns: python examples/out_variant.py"""

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl


# --8<-- [start:declare]
@sl.op("outs::normalised")
def normalised(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    """Each row of ``x`` divided by its length."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


@normalised.kernel("cpu", workspace="n * itemsize", dtypes="float32")
def _(x, *, out, workspace):
    length = workspace.view(x.dtype)[: x.shape[0]]
    torch.linalg.vector_norm(x, dim=-1, out=length)
    torch.div(x, length[:, None], out=out)


# --8<-- [end:declare]


def main() -> None:
    # --8<-- [start:call]
    x, out = torch.randn(64, 96), torch.empty(64, 96)
    workspace = torch.empty(normalised.workspace_bytes(x), dtype=torch.uint8)
    with torch.no_grad():
        for _ in range(3):
            normalised.out(x, out=out, workspace=workspace)  # allocates nothing
    # --8<-- [end:call]
    torch.testing.assert_close(out, normalised.reference(x))
    try:
        normalised.out(x, out=x)
    except sl.ShiplapError as e:
        print(e)
    print("the caller owns what the kernel wrote")


if __name__ == "__main__":
    main()
