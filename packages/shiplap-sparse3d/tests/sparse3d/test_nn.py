"""Modules against dense convolution on the active set, gradients by gradcheck, whole networks under torch.compile."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap import torch_private
from tests.sparse3d.scenes import at, scene

SHAPE = (9, 8, 7)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("k", "dilation"), [(1, 1), (3, 1), (5, 1), (3, 2), ((3, 1, 5), 1), ((1, 3, 3), (1, 2, 3))])
def test_submanifold_equals_dense_convolution(k, dilation, dtype):
    x = scene(200, SHAPE, 5, dtype=dtype)
    layer = sparse3d.SubMConv3d(5, 6, k, dilation=dilation, dtype=dtype)
    padding = [(a - 1) // 2 * d for a, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    dense = F.conv3d(
        x.dense().double(),
        layer.weight.double().permute(0, 4, 1, 2, 3),
        layer.bias.double(),
        padding=padding,
        dilation=layer.dilation,
    )
    assert relative(layer(x).feats, at(dense, x.coords)) < TOLERANCE[dtype]


def test_even_submanifold_kernel_looks_forward_less_than_back():
    x = scene(60, SHAPE, 3)
    layer = sparse3d.SubMConv3d(3, 4, 2)
    dense = F.conv3d(F.pad(x.dense(), (1, 0) * 3), layer.double().weight.permute(0, 4, 1, 2, 3), layer.bias)
    assert relative(layer(x).feats, at(dense, x.coords)) < 1e-10
    f = x.feats.clone().requires_grad_()
    assert torch.autograd.gradcheck(x.geometry.subm(2).conv, (f, layer.weight.flatten(1, 3)), fast_mode=True)


WINDOWS = [
    (k, stride, padding, dilation)
    for k, stride, padding, dilation in itertools.product((1, 2, 3, 4, 5), (1, 2, 3), (0, 1, 2), (1, 2))
    if padding < k * dilation and dilation * (k - 1) + 1 <= 8 + 2 * padding
]


@pytest.mark.parametrize(("k", "stride", "padding", "dilation"), WINDOWS)
def test_strided_and_inverse_equal_dense(k, stride, padding, dilation):
    grid = (9, 8, 11)
    x = scene(150, grid, 4)
    down = sparse3d.SparseConv3d(4, 5, k, stride, padding, dilation, dtype=torch.float64)
    up = sparse3d.SparseInverseConv3d(5, 3, k, dtype=torch.float64)
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    dense = F.conv3d(x.dense(), down.weight.permute(0, 4, 1, 2, 3), down.bias, **window)
    y = down(x)
    assert y.spatial_shape == dense.shape[2:]
    assert relative(y.feats, at(dense, y.coords)) < 1e-10
    reached = (
        F.conv3d((x.dense() != 0).any(1, keepdim=True).double(), torch.ones(1, 1, k, k, k).double(), **window) > 0.5
    )
    assert int(reached.sum()) == y.feats.shape[0]  # all outputs that an input reaches, and no others
    z = up(y)
    assert z.coords is x.coords
    assert relative(z.feats, at(transposed(y.dense(), up, window, grid), z.coords)) < 1e-10


def transposed(dense, layer, window, grid):
    """conv_transpose3d cut or padded to ``grid`` (its own output_padding must stay below the stride)."""
    free = {**window, "padding": 0}
    full = F.conv_transpose3d(dense, layer.weight.permute(4, 0, 1, 2, 3), None, **free)
    p = window["padding"]
    room = [(0, max(0, w + p - f)) for w, f in zip(grid, full.shape[2:], strict=True)]
    full = F.pad(full, [v for pair in reversed(room) for v in pair])
    return full[:, :, p : p + grid[0], p : p + grid[1], p : p + grid[2]] + layer.bias[:, None, None, None]


def test_strided_float32_is_within_1e4():
    x = scene(500, (20, 20, 20), 8, dtype=torch.float32)
    down = sparse3d.SparseConv3d(8, 16, 3, 2, 1)
    y = down(x)
    dense = F.conv3d(
        x.dense().double(), down.weight.double().permute(0, 4, 1, 2, 3), down.bias.double(), stride=2, padding=1
    )
    assert relative(y.feats, at(dense, y.coords)) < 1e-4


def test_gradients_by_gradcheck():
    x = scene(20, (4, 4, 4), 3)
    weight = torch.randn(2, 27, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    feats = x.feats.clone().requires_grad_()
    for plan in (x.geometry.subm(3), x.geometry.subm(3).sorted(3)):
        assert torch.autograd.gradcheck(plan.conv, (feats, weight, bias), fast_mode=True)
        assert torch.autograd.gradgradcheck(plan.conv, (feats, weight), fast_mode=True)
    step = x.geometry.strided(2, 2)
    small = torch.randn(2, 8, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda f, w: sparse3d.conv(f, w, step.plan.table), (feats, small), fast_mode=True
    )  # builds its transpose
    coarse = torch.randn(step.geometry.coords.shape[0], 3, dtype=torch.float64, requires_grad=True)
    for plan in (step.plan, step.plan.sorted(2)):
        assert torch.autograd.gradcheck(plan.conv, (feats, small), fast_mode=True)
        assert torch.autograd.gradcheck(plan.t.conv, (coarse, small), fast_mode=True)


def network() -> sparse3d.Sequential:
    return sparse3d.Sequential(
        sparse3d.SubMConv3d(5, 8, 3),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        sparse3d.SparseConv3d(8, 12, 2, 2),
        nn.ReLU(),
        sparse3d.SparseInverseConv3d(12, 4, 2),
    )


def fresh(x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
    """The same scene without its tables."""
    return sparse3d.SparseTensor(x.feats, x.coords, x.spatial_shape, x.batch_size)


@pytest.mark.long  # tests/sparse3d/test_compile.py, test_consumers.py
@pytest.mark.parametrize("tables", ["built in the graph", "built before"])
def test_a_network_trains_in_one_graph(tables):
    """fullgraph, forward and backward, sizes vary; tables inside the graph make sizes that only the data knows."""
    torch_private.reset_compiler()
    torch.manual_seed(0)
    net = network()

    def loss(x: sparse3d.SparseTensor) -> torch.Tensor:
        return net(x).feats.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for n in (100, 130, 77, 150):
        x = scene(n, SHAPE, 5, dtype=torch.float32)
        if tables == "built before":
            x.geometry.subm(3), x.geometry.strided(2, 2)
        results = []
        for run, tensor in ((loss, fresh(x)), (compiled, x)):
            net.zero_grad()
            value = run(tensor)
            value.backward()
            results.append([value.detach(), *(p.grad.clone() for p in net.parameters())])
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-5)
    counts = torch_private.compile_counts()
    assert counts.graph_breaks == 0
    assert counts.recompiles <= 2


def test_tables_are_shared_by_layers_of_one_level():
    x = scene(50, SHAPE, 4)
    a, b = sparse3d.SubMConv3d(4, 4, 3).double(), sparse3d.SubMConv3d(4, 4, 3).double()
    assert b(a(x)).geometry.subm(3) is x.geometry.subm(3)


@pytest.mark.parametrize("n", [0, 1])
def test_empty_and_single_voxel_scenes(n):
    x = scene(n, SHAPE, 5, dtype=torch.float32)
    net = sparse3d.Sequential(
        sparse3d.SubMConv3d(5, 8, 3),
        nn.ReLU(),
        sparse3d.SparseConv3d(8, 6, 3, 2, 1),
        sparse3d.SparseInverseConv3d(6, 4, 3),
    )
    y = net(x)
    assert y.feats.shape == (n, 4)
    y.feats.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


def test_inverse_without_its_strided_convolution_is_refused():
    x = scene(10, SHAPE, 4, dtype=torch.float32)
    with pytest.raises(sl.ShiplapError, match="SL208") as caught:
        sparse3d.SparseInverseConv3d(4, 4, 2)(x)
    assert "no strided convolution before it" in str(caught.value)
    with pytest.raises(sl.ShiplapError, match=r"one with kernel \(2, 2, 2\)"):
        sparse3d.SparseInverseConv3d(4, 4, 3)(sparse3d.SparseConv3d(4, 4, 2, 2)(x))


def test_one_empty_scene_in_a_batch():
    x = scene(30, SHAPE, 4, batch_size=1)
    moved = x.coords.clone()
    moved[:, 0] = 2  # scenes 0 and 1 have no voxel
    layer = sparse3d.SubMConv3d(4, 4, 3).double()
    alone, batched = layer(x).feats, layer(sparse3d.SparseTensor(x.feats, moved, SHAPE, 3)).feats
    assert torch.equal(alone, batched)


def test_row_order_follows_the_input():
    x = scene(80, SHAPE, 4)
    layer = sparse3d.SubMConv3d(4, 4, 3).double()
    order = torch.randperm(80)
    shuffled = sparse3d.SparseTensor(x.feats[order], x.coords[order], SHAPE, 2)
    torch.testing.assert_close(layer(shuffled).feats, layer(x).feats[order], rtol=1e-12, atol=1e-12)
