"""A kernel goes into a model that nobody edits: declare what it replaces, and put it
into force.

Run it: python examples/rewrite.py
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import shiplap as sl


# --8<-- [start:declare]
def swiglu(
    x: Float[Tensor, "*b k"], gate: Float[Tensor, "n k"], up: Float[Tensor, "n k"]
) -> Tensor:
    """What models compute: two products that read the same input."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def one_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """What to compute instead: one product of twice the width."""
    left, right = F.linear(x, torch.cat([gate, up])).chunk(2, -1)
    return F.silu(left) * right


fused = sl.rewrite(
    swiglu, one_product, where=["x.shape[-1] % 16 == 0", "x.dtype != float64"]
)
# --8<-- [end:declare]


class Block(nn.Module):
    """Somebody else's model."""

    def __init__(self, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def example_inputs() -> tuple[Tensor, ...]:
    return (torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)),)


torch.manual_seed(0)
model = Block()


def main() -> None:
    (x,) = example_inputs()
    # --8<-- [start:use]
    with sl.rewrites(fused) as placed:
        compiled = torch.compile(model)
        y = compiled(x)
    for match in placed.matches:
        print(match.rewrite, "replaced", ", ".join(match.operators))
    # --8<-- [end:use]
    torch.testing.assert_close(y, model(x))
    # --8<-- [start:options]
    options = sl.rewrites(fused).options()
    y = torch.compile(model, options=options)(x)
    # --8<-- [end:options]
    torch.testing.assert_close(y, model(x))


if __name__ == "__main__":
    main()
