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
    assert [tensor.shape[0] for (tensor,) in concrete_calls([placed])] == sizes
