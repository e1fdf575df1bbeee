"""Models on the spconv facade under ``torch.compile(fullgraph=True)``: training, tensors in and out, few recompiles."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.spconv as spconv
from shiplap import torch_private
from shiplap.errors import ArgumentError
from shiplap_testing.effort import sampled
from tests.sparse3d.scenes import scene

GRID = (9, 8, 7)


def block(ci: int, co: int, key: str) -> spconv.SparseSequential:
    return spconv.SparseSequential(spconv.SubMConv3d(ci, co, 3, indice_key=key), spconv.SparseBatchNorm(co), nn.ReLU())


class Branches(spconv.SparseModule):
    """All that a model may do with several tensors."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = block(channels, channels, "s2"), spconv.SubMConv3d(channels, channels, 1)
        self.norm = nn.BatchNorm1d(channels)
        self.add, self.join = spconv.AddTable(), spconv.JoinTable()

    def forward(self, x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
        branches = spconv.ConcatTable().add(self.one).add(self.two)(x)
        summed = self.add(branches)
        summed = summed.replace_feature(self.norm(summed.features))
        return self.join([summed, x])


def network() -> spconv.SparseSequential:
    return spconv.SparseSequential(
        block(4, 8, "s1"),
        spconv.SparseConv3d(8, 6, 3, 2, 1, indice_key="d1", record_voxel_count=True),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        Branches(6),
        spconv.SparseMaxPool3d(2, 1, 1, indice_key="d2"),
        spconv.SparseInverseConv3d(12, 6, 2, "d2"),
        spconv.SparseConvTranspose3d(6, 5, 2, 2, indice_key="u1"),
        spconv.SparseInverseConv3d(5, 6, 2, "u1"),
        spconv.SparseAvgPool3d(3, 1, 1, indice_key="d3"),
        spconv.SparseInverseConv3d(6, 6, 3, "d3"),
        spconv.SparseInverseConv3d(6, 4, 3, "d1"),
    )


def gradients(run, net: nn.Module, *arguments: object) -> list[torch.Tensor]:
    net.zero_grad()
    value = run(*arguments)
    value.backward()
    buffers = [b.clone() for b in net.buffers()]
    return [value.detach(), *(p.grad.clone() for p in net.parameters()), *buffers]


@pytest.mark.long
def test_a_network_of_every_layer_trains_in_one_graph():
    torch_private.reset_compiler()
    torch.manual_seed(0)
    net = network()

    def loss(features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        y = net(spconv.SparseConvTensor(features, indices, GRID, 2))
        return y.features.square().sum() + spconv.SparseGlobalMaxPool()(y).sum() + spconv.ToDense()(y).mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for n in (100, 130, 77):
        x, before = scene(n, GRID, 4, dtype=torch.float32), copy.deepcopy(net.state_dict())
        expected = gradients(loss, net, x.feats, x.coords)
        net.load_state_dict(before)
        for traced, eager in zip(gradients(compiled, net, x.feats, x.coords), expected, strict=True):
            torch.testing.assert_close(traced, eager, rtol=1e-3, atol=1e-4)
    counts = torch_private.compile_counts()
    assert counts.graph_breaks == 0
    assert counts.recompiles <= 1


def test_a_sparse_tensor_goes_in_and_comes_out():
    net = spconv.SparseSequential(block(4, 8, "s1"), spconv.SparseConv3d(8, 6, 3, 2, 1, indice_key="d1")).eval()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for n in (60, 80):
        x = scene(n, GRID, 4, dtype=torch.float32)
        here, there = (spconv.SparseConvTensor(x.feats, x.coords, GRID, 2) for _ in range(2))
        y, expected = compiled(here), net(there)
        torch.testing.assert_close(y.features, expected.features)
        assert torch.equal(y.indices, expected.indices)
        assert y.spatial_shape == expected.spatial_shape
        assert here.indice_dict == {}
        up = spconv.SparseInverseConv3d(6, 4, 3, "d1")  # the records are whole: an eager layer goes on with them
        torch.testing.assert_close(up(y).features, up(expected).features)
        assert up(y).indices.shape == (n, 4)


@pytest.mark.long
def test_sums_of_different_voxels_are_one_graph():
    a, b = (spconv.SubMConv3d(4, 4, 3, indice_key=k) for k in "ab")

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        x, y = (spconv.SparseConvTensor(f, i, GRID, 2) for f, i in (tensors[:2], tensors[2:]))
        return spconv.SparseReLU()(spconv.AddTableMisaligned()([a(x), b(y)])).dense()

    x, y = scene(60, GRID, 4, dtype=torch.float32), scene(40, GRID, 4, dtype=torch.float32)
    arguments = x.feats, x.coords, y.feats, y.coords
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(*arguments), run(*arguments))


def _features_assigned(x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
    x.features = nn.functional.silu(x.features)
    return x


def _members_assigned(x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
    x._features = torch.cat([x.features, x.features * 2])  # as TRELLIS does
    x.indices, x.batch_size = torch.cat([x.indices, x.indices + torch.tensor([2, 0, 0, 0]).int()]), 4
    x.indice_dict = {}
    return x


@pytest.mark.parametrize("assign", sampled([_features_assigned, _members_assigned], 1), ids=lambda f: f.__name__)
def test_a_graph_sees_what_was_assigned(assign):
    """Torch 2.11 does not run the setter of a property in a graph: layers went on with what there was before."""
    a, b = (spconv.SubMConv3d(4, 4, 3, indice_key="a") for _ in "ab")

    def run(features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return b(assign(a(spconv.SparseConvTensor(features, indices, GRID, 2)))).dense()

    x = scene(60, GRID, 4, dtype=torch.float32)
    expected = run(x.feats, x.coords)
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(x.feats, x.coords), expected)


@pytest.mark.long
def test_autocast_in_a_graph():
    net = spconv.SparseSequential(spconv.SubMConv3d(4, 8, 3), nn.ReLU(), spconv.SparseMaxPool3d(2, 2))

    def run(features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(spconv.SparseConvTensor(features, indices, GRID, 2)).features

    x = scene(60, GRID, 4, dtype=torch.float32)
    actual, expected = (
        torch.compile(run, fullgraph=True, backend="aot_eager")(x.feats, x.coords),
        run(x.feats, x.coords),
    )
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


_KEEPS_TEXT = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 drops what an error says")


@pytest.mark.long
@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=_KEEPS_TEXT)])
def test_a_grid_that_vanishes_is_the_same_error_while_tracing(fullgraph):
    layer = spconv.SparseConv3d(4, 4, 3, stride=2)

    def run(features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return layer(spconv.SparseConvTensor(features, indices, [2, 2, 2], 1)).features

    says = r"SL208: a precondition does not hold.*output shape \[0, 0, 0\] of input shape \[2, 2, 2\], kernel_size"
    with pytest.raises(Exception, match=f"(?s){says}"):
        torch.compile(run, fullgraph=fullgraph, backend="eager")(torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.int32))


def test_voxels_that_vanish_are_an_error_of_the_graph_too():
    layer = spconv.SparseConv3d(4, 4, 2, 4).eval()

    def run(features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return layer(spconv.SparseConvTensor(features, indices, (8, 8, 8), 1)).features

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    kept, lost = (torch.tensor([[0, c, 0, z] for z in range(4)], dtype=torch.int32) for c in (0, 7))
    torch.testing.assert_close(compiled(torch.ones(4, 4), kept), run(torch.ones(4, 4), kept))
    for call, says in ((run, "SL211"), (compiled, "Runtime assertion failed")):  # torch has its own words
        with pytest.raises(Exception, match=says):
            call(torch.ones(4, 4), lost)


class Array(nn.Module):
    """As OpenPCDet's backbones: the grid is an array, turned round and padded."""

    def __init__(self, grid: np.ndarray) -> None:
        super().__init__()
        self.sparse_shape = grid[::-1] + [1, 0, 0]  # noqa: RUF005 - a sum, not a longer list
        self.enter, self.down = block(4, 4, "s1"), spconv.SparseConv3d(4, 4, 3, 2, 1)

    def forward(self, features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        x = spconv.SparseConvTensor(features, indices, self.sparse_shape, 2)
        return self.down(self.enter(x)).dense()


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [pytest.param({}, id="plain", marks=pytest.mark.long), pytest.param({"fullgraph": True}, id="fullgraph")]
)
def test_an_array_as_spatial_shape_is_numbers_of_the_graph(options):
    torch_private.reset_compiler()
    net = Array(np.array([7, 8, 8])).eval()
    compiled = torch.compile(net, backend="eager", **options)
    for n in (60, 80, 70):
        x = scene(n, GRID, 4, dtype=torch.float32)
        torch.testing.assert_close(compiled(x.feats, x.coords), net(x.feats, x.coords))
    counts = torch_private.compile_counts()
    assert (counts.graphs, counts.graph_breaks) == (2, 0)  # the second for any number of voxels
    net.sparse_shape = np.array([10, 9, 8])
    with pytest.raises(RuntimeError, match="SL209: spatial_shape is an array, and holds other numbers"):
        compiled(x.feats, x.coords)


@pytest.mark.parametrize(
    "shape",
    sampled([pytest.param([np.int64(9), 8, 7]), torch.tensor([9, 8, 7]), pytest.param(torch.Size([9, 8, 7]))], 1),
    ids=type,
)
def test_numbers_of_other_kinds_in_a_spatial_shape(shape):
    layer = spconv.SparseConv3d(4, 4, 3, 2)
    x = scene(60, GRID, 4, dtype=torch.float32)

    def run(features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return layer(spconv.SparseConvTensor(features, indices, shape, 2)).dense()

    expected = run(x.feats, x.coords)
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(x.feats, x.coords), expected)


def test_an_error_of_a_graph_is_the_error_it_is():
    """Itself where the graph may break; where it may not, torch has an error of its own, which has all of its text."""
    layer = spconv.SubMConv3d(5, 4, 3)

    def run(features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return layer(spconv.SparseConvTensor(features, indices, GRID, 2)).features

    x = scene(60, GRID, 4, dtype=torch.float32)
    with pytest.raises(ArgumentError, match="SL202") as caught:
        torch.compile(run, backend="aot_eager")(x.feats, x.coords)
    assert (caught.value.id, caught.value.got) == ("SL202", "4 channels")
    torch_private.reset_compiler()
    with pytest.raises(Exception, match=r"ArgumentError\(.*SL202: sizes disagree.*got      4 channels.*fix"):
        torch.compile(run, fullgraph=True, backend="aot_eager")(x.feats, x.coords)


@pytest.mark.long
def test_idioms_of_models_in_the_wild():
    """Asking a tensor what it has, scaling indices in place, merging levels by assignment, pooling onto the ground."""
    conv, down = spconv.SubMConv3d(4, 4, 3, indice_key="a"), spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="d")
    norm, flat = nn.BatchNorm1d(4), spconv.SparseConv2d(4, 4, 3, 1, 1)

    def replaced(x: spconv.SparseConvTensor, features: torch.Tensor) -> spconv.SparseConvTensor:
        assert "replace_feature" in x.__dir__()  # models for spconv 1.x and 2.x do this
        return x.replace_feature(features)

    def run(features: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        x = spconv.SparseConvTensor(features=features, indices=indices.int(), spatial_shape=[9, 8, 7], batch_size=2)
        x = conv(x)
        x = replaced(x, norm(x.features))
        y = down(x)
        y.indices[:, 1:] *= 2
        x = x.replace_feature(torch.cat([x.features, y.features]))
        x.indices = torch.cat([x.indices, y.indices])
        ground, inverse = torch.unique(x.indices[:, [0, 2, 3]], dim=0, return_inverse=True)
        total = x.features.new_zeros(ground.shape[0], 4).index_add(0, inverse, x.features)
        return flat(spconv.SparseConvTensor(total, ground, [8, 7], 2)).dense()

    x = scene(60, GRID, 4, dtype=torch.float32)
    expected = run(x.feats, x.coords)
    assert expected.shape == (2, 4, 8, 7)
    outputs = torch.compile(run, fullgraph=True, backend="eager")(x.feats, x.coords)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    assert {"replace_feature", "batch_size", "features"} <= set(
        dir(spconv.SparseConvTensor(x.feats, x.coords, GRID, 2))
    )


SUMS = {
    "x + tensor": lambda x, t: x + t,
    "tensor + x": lambda x, t: t + x,
    "x + x": lambda x, t: x + x,
    "torch.add": torch.add,
}


@pytest.mark.parametrize("form", sampled(SUMS, 2))
@pytest.mark.parametrize("facade", [True, False])
def test_a_sum_with_a_tensor_is_part_of_the_graph(form, facade):
    own = scene(30, GRID, 4, batch_size=2)

    def total(feats, coords):
        if facade:
            return SUMS[form](spconv.SparseConvTensor(feats, coords, list(GRID), 2), feats).features
        return SUMS[form](sparse3d.SparseTensor(feats, coords, GRID, 2), feats).feats

    compiled = torch.compile(total, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(own.feats, own.coords), 2 * own.feats)
    torch.testing.assert_close(total(own.feats, own.coords), 2 * own.feats)


WRONG = {
    "relu": lambda x, t: torch.relu(x),
    "x * tensor": lambda x, t: x * t,
    "alpha": lambda x, t: torch.add(x, t, alpha=2),
}


@pytest.mark.parametrize("form", WRONG)
def test_a_tensor_of_voxels_is_no_tensor_of_numbers_elsewhere(form):
    own = scene(30, GRID, 4, batch_size=2)
    x = spconv.SparseConvTensor(own.feats, own.coords, list(GRID), 2)
    with pytest.raises(TypeError if form == "x * tensor" else ArgumentError):  # an operator is Python's to refuse
        WRONG[form](x, own.feats)
    assert torch.equal(WRONG[form](own, own.feats).feats, WRONG[form](own.feats, own.feats))
