"""The calls with numbers for symbols, for which a package compiles kernels ahead."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from shiplap.torch_private.symbolic_sizes import concrete_calls


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.mark.parametrize(
    ("dim", "sizes"),
    [
        (Dim("rows", min=2, max=5000), [20, 32, 21, 5008, 5001]),
        (Dim("rows", min=2, max=20), [20, 32, 21]),
        (Dim.DYNAMIC, [20, 32, 21, 1 << 20, (1 << 20) + 1]),
    ],
)
def test_calls_have_sizes_near_the_example_and_near_the_end_of_their_range(dim: object, sizes: list[int]) -> None:
    program = torch.export.export(Same(), (torch.ones(20, 3),), dynamic_shapes=({0: dim},))
    placed = program.graph.find_nodes(op="placeholder")[0].meta["val"]
    assert [tensor.shape[0] for (tensor,) in concrete_calls([placed])][: len(sizes)] == sizes


class Added(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, y + 1


def test_calls_have_every_width_of_a_tile_that_a_size_of_the_range_needs() -> None:
    dims = {name: Dim(name, min=2, max=most) for name, most in (("rows", 1000), ("columns", 70))}
    program = torch.export.export(
        Added(), (torch.ones(90, 3), torch.ones(40)), dynamic_shapes=({0: dims["rows"]}, {0: dims["columns"]})
    )
    placed = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    calls = [(x.shape[0], y.shape[0]) for x, y in concrete_calls(placed)]

    def width(size: int) -> int:
        return 1 << (size - 1).bit_length()

    for aligned in (True, False):  # Triton compiles multiples of 16 specially
        kinds = [(rows, columns) for rows, columns in calls if (rows % 16 == 0) == aligned]
        assert {width(rows) for rows, _ in kinds} >= {width(n) for n in range(17, 1001) if (n % 16 == 0) == aligned}
        both = [columns for _, columns in calls if (columns % 16 == 0) == aligned]
        assert {width(n) for n in both} >= {width(n) for n in range(17, 71) if (n % 16 == 0) == aligned}
    assert {(width(rows), width(columns)) for rows, columns in calls} >= {(32, 32), (64, 64), (512, 64), (128, 64)}
