"""Graphs and exported programs check the values of coordinates as eager calls do, unless a word switches that off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shiplap as sl
import shiplap.torch_private as compat
import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.spconv as spconv
from shiplap_testing.effort import sampled

GRID = (6, 6, 6)
Program = Callable[[Tensor, Tensor], Tensor]


class Native(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, feats: Tensor, coords: Tensor) -> Tensor:
        out: Tensor = self.layer(sparse3d.SparseTensor(feats, coords, GRID, 2)).feats
        return out


class Facade(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, feats: Tensor, coords: Tensor) -> Tensor:
        out: Tensor = self.layer(spconv.SparseConvTensor(feats, coords, list(GRID), 2)).features
        return out


class Dense(nn.Module):
    def forward(self, feats: Tensor, coords: Tensor) -> Tensor:
        return sparse3d.SparseTensor(feats, coords, GRID, 2).dense()


NETS: dict[str, Callable[[], nn.Module]] = {
    "submanifold": lambda: Native(sparse3d.SubMConv3d(4, 4, 3)),
    "strided": lambda: Native(sparse3d.SparseConv3d(4, 4, 2, 2)),
    "transposed": lambda: Native(sparse3d.SparseConvTranspose3d(4, 4, 2, 2)),
    "max pool": lambda: Native(sparse3d.SparseMaxPool3d(2)),
    "facade": lambda: Facade(spconv.SubMConv3d(4, 4, 3)),
    "facade, strided": lambda: Facade(spconv.SparseConv3d(4, 4, 2, 2)),
    "dense": Dense,
}


def scene(last: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    coords = torch.unique(torch.randint(0, 6, (30, 4)), dim=0).int()
    coords[:, 0] = torch.arange(len(coords)) % 2
    coords = torch.unique(coords, dim=0)
    coords[-1, 0] = last
    return torch.randn(len(coords), 4), coords


def compiled(net: nn.Module) -> Program:
    compat.reset_compiler()
    return torch.compile(net, backend="aot_eager", fullgraph=True)


def exported(net: nn.Module) -> Program:
    rows = torch.export.Dim("rows", min=2, max=1000)
    program = torch.export.export(net, scene(), dynamic_shapes=({0: rows}, {0: rows}))
    return program.run_decompositions().module()


# Each layer in one of the two, and both for one layer.
@pytest.mark.parametrize(
    ("net", "make"),
    [
        pytest.param(net, make, marks=[pytest.mark.long] * (turn % 4 != way and net != "submanifold"))
        for turn, net in enumerate(NETS)
        for way, make in enumerate((compiled, exported))
    ],
)
def test_a_batch_index_that_there_is_not_is_refused(net: str, make: Callable[[nn.Module], Program]) -> None:
    with compat.data_dependent_sizes(), torch.no_grad():
        made = NETS[net]()
        run = make(made)
        torch.testing.assert_close(run(*scene()), made(*scene()))
        for wrong in (2, 7, -2):
            with pytest.raises((RuntimeError, sl.ShiplapError), match="SL211"):
                made(*scene(wrong))
            with pytest.raises((RuntimeError, sl.ShiplapError), match="SL211"):
                run(*scene(wrong))


def test_a_voxel_outside_of_the_grid_is_not_written_to_another_cell() -> None:
    run, (feats, coords) = compiled(Dense()), scene()
    coords[3, 3] = 6  # the first cell of the next row
    with pytest.raises(RuntimeError, match="SL211"):
        run(feats, coords)


def test_a_word_leaves_the_checks_out_of_later_graphs() -> None:
    net = NETS["submanifold"]()
    nodes: list[Any] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes.append([str(n.target) for n in graph.graph.nodes])
        return graph.forward

    for on in (True, False):
        before = sparse3d.set_graph_checks(on)
        try:
            compat.reset_compiler()
            torch.compile(net, backend=look)(*scene())
        finally:
            sparse3d.set_graph_checks(before)
    checked, unchecked = [[n for n in names if "assert" in n] for names in nodes]
    assert checked
    assert not unchecked


@pytest.mark.parametrize("kind", sampled(["native", "facade"], long=["native"]))
def test_scenes_that_are_put_together_have_the_rows_of_their_features(kind: str) -> None:
    """Modules behind the layer ask for the number of rows, which is a sum that the data decides."""
    made = {"native": sparse3d, "facade": spconv}[kind]
    layer, norm = made.SubMConv3d(4, 8, 3), nn.BatchNorm1d(8)

    def run(feats: Tensor, cells: Tensor, ends: Tensor) -> Tensor:
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        scenes = torch.cat([torch.full((k,), b, dtype=torch.int32) for b, k in enumerate(counts)])
        coords = torch.cat([scenes[:, None], cells], 1)
        if kind == "native":
            return norm(layer(sparse3d.SparseTensor(feats, coords, GRID, 2)).feats)
        return norm(layer(spconv.SparseConvTensor(feats, coords, list(GRID), 2)).features)

    _, coords = scene()
    cells = torch.unique(coords[:, 1:], dim=0)
    n = len(cells)
    feats = torch.randn(n, 4)
    compat.reset_compiler()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(run, backend="eager", fullgraph=True)
        for first in (10, 7):
            torch.testing.assert_close(
                compiled(feats, cells, torch.tensor([first, n])), run(feats, cells, torch.tensor([first, n]))
            )
        with pytest.raises(RuntimeError):
            compiled(feats[:-1], cells, torch.tensor([10, n]))
