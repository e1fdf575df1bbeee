"""Voxels that share a cell, as networks make them that project voxels or give a cell to each Gaussian."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import shiplap_sparse3d.spconv as spconv
from shiplap import ShiplapError, torch_private
from shiplap_sparse3d.drop_in import drop_in, main
from shiplap_sparse3d.spconv.shared import SharedPlan, first_rows

GRIDS = {1: [9], 2: [6, 4], 3: [4, 3, 5]}


@pytest.fixture(autouse=True)
def fresh():
    torch_private.reset_compiler()
    spconv.expect_duplicates(False)
    yield
    spconv.expect_duplicates(False)
    torch_private.reset_compiler()


def voxels(n: int, axes: int, seed: int = 0) -> Tensor:
    """``int32 [n, 1 + axes]`` of two scenes, in no order, more of them than there are cells in use."""
    chosen = torch.Generator().manual_seed(seed)
    columns = [torch.randint(0, size, (n,), generator=chosen) for size in (2, *GRIDS[axes])]
    return torch.stack(columns, 1).int()


def by_hand(layer: nn.Module, features: Tensor, indices: Tensor) -> Tensor:
    """Row by row: itself at the centre, the first row of any other cell."""
    rows = [tuple(row) for row in indices.tolist()]
    offsets = [[d * (tap - k // 2) for tap in range(k)] for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    weight, out = layer.weight.flatten(1, layer.ndim), []
    each = features.shape[1] // layer.groups
    for i, (scene, *cell) in enumerate(rows):
        total = layer.bias
        for tap, offset in enumerate(itertools.product(*offsets)):
            seen = (scene, *(c + o for c, o in zip(cell, offset, strict=True)))
            row = i if not any(offset) else rows.index(seen) if seen in rows else None
            if row is not None:
                groups = zip(features[row].split(each), weight[:, tap].chunk(layer.groups), strict=True)
                total = total + torch.cat([w @ f for f, w in groups])
        out.append(total)
    return torch.stack(out)


LAYERS = {
    "one axis": lambda: spconv.SubMConv1d(4, 6, 3),
    "two axes": lambda: spconv.SubMConv2d(4, 6, 3),
    "three axes": lambda: spconv.SubMConv3d(4, 6, 3),
    "even, dilated": lambda: spconv.SubMConv3d(4, 6, (3, 1, 2), dilation=(1, 1, 2)),
    "groups": lambda: spconv.SubMConv2d(4, 6, 3, groups=2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_row_reads_itself_and_the_first_row_of_other_cells(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    indices = voxels(50, layer.ndim)
    results = []
    for run in (lambda f: layer(spconv.SparseConvTensor(f, indices, GRIDS[layer.ndim], 2)).features, None):
        features = torch.randn(
            50, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1), requires_grad=True
        )
        result = run(features) if run else by_hand(layer, features, indices)
        cotangent = torch.linspace(-1, 1, result.numel(), dtype=torch.double).view_as(result)
        results.append([result, *torch.autograd.grad(result, [features, *layer.parameters()], cotangent)])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_first_rows():
    coords = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 2, 3], [1, 1, 2, 3], [0, 0, 0, 0]], dtype=torch.int32)
    assert first_rows(coords, [4, 4, 4]).tolist() == [0, 1, 0, 3, 1]
    for n in range(3):
        assert first_rows(coords[:1].expand(n, 4), [4, 4, 4]).tolist() == [0] * n


class Projected(nn.Module):
    """A branch that sees the voxels of a strided layer from above, beside one in space."""

    def __init__(self) -> None:
        super().__init__()
        self.down = spconv.SparseConv3d(4, 8, 3, 2, 1, indice_key="down")
        self.above = spconv.SparseSequential(
            *(spconv.SubMConv2d(8, 8, 3, padding=1, bias=False, indice_key="a"), nn.LayerNorm(8), nn.ReLU()),
            spconv.SubMConv2d(8, 8, 3, padding=1, bias=False, indice_key="a"),
        )

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        x = self.down(spconv.SparseConvTensor(features, indices, [12, 10, 14], 2))
        seen = spconv.SparseConvTensor(x.features, x.indices[:, [0, 2, 3]].contiguous(), x.spatial_shape[1:], 2)
        return x.replace_feature(torch.cat([x.features, self.above(seen).features], 1)).features


def scene(n: int) -> tuple[Tensor, Tensor]:
    cells = torch.randperm(2 * 12 * 10 * 14, generator=torch.Generator().manual_seed(n))[:n]
    indices = torch.stack([cells // 1680, cells // 140 % 12, cells // 14 % 10, cells % 14], 1)
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(n)), indices.int()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["one graph", "plain"])
def test_a_compiled_network_trains_as_eager(kind):
    torch.manual_seed(0)
    net = Projected()
    spconv.expect_duplicates()
    compiled = torch.compile(
        net, backend="aot_eager", fullgraph=kind == "one graph", dynamic=kind == "one graph" or None
    )
    for n in (300, 220, 260):
        results = []
        for run in (compiled, net):
            net.zero_grad()
            out = run(*scene(n))
            out.square().mean().backward()
            results.append([out, *(p.grad.clone() for p in net.parameters())])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    counts = torch_private.compile_counts()
    assert (counts.graph_breaks, counts.recompiles <= 1) == (0, True)


def test_what_a_layer_has_met_changes_no_later_graph():
    layer, indices, features = spconv.SubMConv3d(4, 6, 3), voxels(60, 3), torch.randn(60, 4)

    def run(features: Tensor) -> Tensor:
        return layer(spconv.SparseConvTensor(features, indices, GRIDS[3], 2)).features

    expected = run(features)
    assert not spconv.expect_duplicates(False)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    with pytest.raises(ShiplapError, match=r"SL211(.|\n)*duplicate"):
        compiled(features)
    spconv.expect_duplicates()
    torch_private.reset_compiler()
    torch.testing.assert_close(compiled(features), expected)


def test_distinct_voxels_keep_their_plan():
    indices = torch.unique(voxels(60, 3), dim=0)
    x = spconv.SparseConvTensor(torch.randn(len(indices), 4), indices, GRIDS[3], 2)
    y = spconv.SubMConv3d(4, 6, 3, indice_key="k")(x)
    assert not isinstance(y.indice_dict["k"].plan, SharedPlan)
    assert not spconv.expect_duplicates(False)


def test_pairs_are_those_of_each_row():
    indices = torch.tensor([[0, 1], [0, 2], [0, 1]], dtype=torch.int32)
    y = spconv.SubMConv1d(1, 1, 3, indice_key="k")(spconv.SparseConvTensor(torch.ones(3, 1), indices, [4], 1))
    assert y.indice_dict["k"].pair_fwd.tolist() == [[-1, 0, -1], [0, 1, 2], [1, -1, 1]]
    assert y.indice_dict["k"].indice_pair_num.tolist() == [1, 3, 2]
    assert y.indice_dict["k"].indice_pairs[:, 2].tolist() == [[1, 1, -1], [0, 2, -1]]


@pytest.mark.parametrize(
    ("layer", "row", "text"),
    [
        (spconv.SubMConv2d(4, 6, 3), (0, 6, 0), "outside"),
        (spconv.SparseConv2d(4, 6, 3, 2), (0, 1, 1), "duplicate"),
        (spconv.SparseMaxPool2d(2, 2), (0, 1, 1), "duplicate"),
        (spconv.pool.SparseMaxPool(2, 3, subm=True), (0, 1, 1), "share a cell"),
    ],
    ids=["outside", "strided", "pool", "submanifold pool"],
)
def test_what_has_no_meaning_is_refused(layer, row, text):
    indices = torch.tensor([row, (0, 2, 2), row], dtype=torch.int32)
    x = spconv.SparseConvTensor(torch.randn(3, 4), indices, GRIDS[2], 1)
    with pytest.raises(ShiplapError, match=f"SL211(.|\n)*{text}"):
        layer(x)


def test_drop_in_expects_them_until_it_is_undone(tmp_path, capsys):
    with drop_in("spconv", duplicates=True):
        assert spconv.expect_duplicates(True)
    assert not spconv.expect_duplicates(False)
    script = tmp_path / "script.py"
    script.write_text("import sys, spconv.pytorch as s\nprint(s.expect_duplicates(True), sys.argv[1:])\n")
    main(["--duplicates", str(script), "--mine"])
    main([str(script)])
    assert capsys.readouterr().out == "True ['--mine']\nFalse []\n"


def test_a_layer_is_traced_by_jit_on_voxels_that_share_a_cell():
    layer, indices, features = spconv.SubMConv3d(4, 6, 3).requires_grad_(False), voxels(60, 3), torch.randn(60, 4)
    x = spconv.SparseConvTensor(features, indices, GRIDS[3], 2)
    assert layer.eval()(x).features.shape == (60, 6)
    fresh = spconv.SparseConvTensor(features, indices.clone(), GRIDS[3], 2)
    traced = torch.jit.trace(lambda f: layer(fresh.replace_feature(f)).features, (features,), check_trace=False)
    torch.testing.assert_close(traced(features), layer(x).features)
