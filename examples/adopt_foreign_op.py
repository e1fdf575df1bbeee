"""Audit an op that somebody else wrote, without touching it.

Run: python examples/adopt_foreign_op.py
"""

# --8<-- [start:foreign]
import torch
from torch import Tensor

_buffers: dict[torch.Size, Tensor] = {}


@torch.library.custom_op("foreign::row_softmax", mutates_args=())
def row_softmax(x: Tensor) -> Tensor:
    """Looks right, and is right, one call at a time: it keeps its output buffer for the
    next call."""
    if x.shape not in _buffers:
        _buffers[x.shape] = torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.softmax(x, 1, out=_buffers[x.shape])


@row_softmax.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# --8<-- [end:foreign]


# --8<-- [start:adopt]
import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl


# registers nothing: it says what the op is supposed to do
@sl.adopt("foreign::row_softmax")
def declared(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:
    return torch.softmax(x, 1)


# --8<-- [end:adopt]


def main() -> None:
    # softmax: [0.5, 0.5] and [0, 1]
    a, b = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 100.0]])
    torch.library.opcheck(row_softmax, (a,))
    print("torch.library.opcheck passes")
    total = (row_softmax(a) + row_softmax(b))[0].round(decimals=3)
    print(f"softmax(a) + softmax(b) = {total.tolist()}, correct is [0.5, 1.5]")
    # without checks=: all of them
    report = sl.audit(declared, checks=("fake", "numerics", "fresh"))
    assert report.verdict == "failed"
    print(report)


if __name__ == "__main__":
    main()
