"""Networks in capacity form on CUDA: no synchronisation, captured and replayed with new values, errors told late."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap import torch_private
from shiplap_sparse3d import pooling
from tests.sparse3d.nets import GRID, ROWS, UNet, padded
from tests.sparse3d.scenes import scene

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


def cuda(x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
    return sparse3d.SparseTensor(x.feats.cuda(), x.coords.cuda(), x.spatial_shape, x.batch_size)


def inputs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    feats, coords = padded(n)
    return feats.cuda(), coords.cuda()


def gradients(net: nn.Module, run, *args: object) -> list[torch.Tensor]:
    net.zero_grad()
    value = run(*args).square().sum()
    value.backward()
    return [value.detach().clone(), *(p.grad.clone() for p in net.parameters())]


# --- every kind -------------------------------------------------------------------------------------------------------

KINDS = {
    "subm": lambda: sparse3d.SubMConv3d(8, 16, 3),
    "even": lambda: sparse3d.SubMConv3d(8, 16, 2),
    "wide": lambda: sparse3d.SubMConv3d(8, 16, 5),
    "groups": lambda: sparse3d.SubMConv3d(8, 16, 3, groups=4),
    "depthwise": lambda: sparse3d.SubMConv3d(8, 8, 3, groups=8),
    "strided": lambda: sparse3d.SparseConv3d(8, 16, 3, 2, 1),
    "transposed": lambda: sparse3d.SparseConvTranspose3d(8, 16, 2, 2),
    "generative": lambda: sparse3d.GenerativeConv3d(8, 16, 3),
    "inverse": lambda: sparse3d.Sequential(sparse3d.SparseConv3d(8, 8, 2, 2), sparse3d.SparseInverseConv3d(8, 16, 2)),
    "max": lambda: sparse3d.SparseMaxPool3d(2),
    "avg": lambda: sparse3d.SparseAvgPool3d(3, 2, 1),
    "unpool": lambda: sparse3d.Sequential(sparse3d.SparseMaxPool3d(2), sparse3d.SparseInverseConv3d(8, 16, 2)),
    "norm": lambda: sparse3d.BatchNorm(8),
    "global max": lambda: sparse3d.GlobalPool("max"),
    "global avg": lambda: sparse3d.GlobalPool("avg"),
    "global sum": lambda: sparse3d.GlobalPool("sum"),
}


@pytest.mark.parametrize("padding", [0, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_that_of_the_cpu(kind, padding):
    torch.manual_seed(0)
    net = KINDS[kind]()
    x = scene(400, GRID, 8, dtype=torch.float32)
    x = x.pad(400 + padding) if padding else x
    results = []
    for device in ("cpu", "cuda"):
        feats = x.feats.to(device).requires_grad_()
        y = net.to(device)(sparse3d.SparseTensor(feats, x.coords.to(device), GRID, 2, padded=padding > 0))
        dense = y.dense() if isinstance(y, sparse3d.SparseTensor) else y
        torch.manual_seed(1)
        weight = torch.randn(dense.shape).to(device)
        gradients = torch.autograd.grad(dense, [feats, *net.parameters()], weight)
        results.append([dense, *gradients])
        sparse3d.synchronize()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b.cpu(), a, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_pooling_is_its_reference_and_the_same_in_each_run(dtype):
    x = cuda(scene(500, GRID, 37))
    feats = (x.feats * 4).round().to(dtype)  # with ties
    step = x.geometry.pooled(3, 2, 1)
    table, back = step.plan.table, step.plan.back[0]
    grad = torch.randn(table.shape[0], 37, device="cuda").to(dtype)
    taps = pooling.max_pool_with_taps(feats, table)[1]
    for op, args in (
        (pooling.max_pool_with_taps, (feats, table)),
        (pooling.max_pool_grad, (grad, taps, back)),
        (pooling.sum_pool, (feats, table)),
        (pooling.sum_pool, (feats[:, ::2], table, None, True)),
        (pooling.global_max_pool, (feats, x.coords, 3)),
        (pooling.global_sum_pool, (feats, x.coords, 3, True)),
    ):
        runs = [r if isinstance(r, tuple) else (r,) for r in (op.reference(*args), op(*args), op(*args))]
        for want, got, repeated in zip(*runs, strict=True):
            torch.testing.assert_close(got, want)
            assert torch.equal(got, repeated)


def test_pooling_beyond_two_to_the_31_elements():
    n, c = 2**24 + 8, 128
    feats = torch.zeros(n, c, dtype=torch.float16, device="cuda")
    feats[-1], feats[-2] = 3, 1
    table = torch.tensor([[n - 1, n - 2], [-1, n - 2]], dtype=torch.int32, device="cuda")
    assert (pooling.max_pool(feats, table) == torch.tensor([[3.0], [1.0]], device="cuda")).all()
    assert (pooling.avg_pool(feats, table) == torch.tensor([[2.0], [1.0]], device="cuda")).all()
    coords = torch.zeros(n, 4, dtype=torch.int32, device="cuda")
    assert (pooling.global_pool(feats, coords, 1, "max") == 3).all()
    assert (pooling.global_pool(feats, coords, 1, "sum") == 4).all()


# --- the host ---------------------------------------------------------------------------------------------------------


def test_nothing_waits_for_the_device():
    net = UNet().cuda()
    args = inputs(200)
    gradients(net, net, *args)  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(net, net, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_voxels_than_the_capacity_are_told_late():
    net = UNet(capacity=20).cuda()

    def run() -> None:
        net(*inputs(200))  # told by a later call, if the device has come so far
        sparse3d.synchronize()

    with pytest.raises(sl.ShiplapError, match=r"SL211(.|\n)*more than 20 output voxels"):
        run()
    sparse3d.synchronize()  # told once


# --- compiled ---------------------------------------------------------------------------------------------------------


def test_one_graph_for_eight_voxel_counts():
    torch_private.reset_compiler()
    net = sparse3d.Sequential(
        sparse3d.SubMConv3d(5, 8, 3),
        sparse3d.BatchNorm(8),
        nn.ReLU(),
        sparse3d.SparseConv3d(8, 8, 2, 2),
        sparse3d.SubMConv3d(8, 8, 3),
        sparse3d.SparseInverseConv3d(8, 4, 2),
        sparse3d.GlobalPool("avg"),
    ).cuda()
    compiled = torch.compile(net, fullgraph=True)
    for n in (1000, 1300, 700, 12000, 900, 40000, 1600, 2400):
        x = cuda(scene(n, (64, 64, 64), 5, dtype=torch.float32))
        repeated = sparse3d.SparseTensor(x.feats, x.coords, x.spatial_shape, x.batch_size)
        for a, b in zip(gradients(net, compiled, x), gradients(net, net, repeated), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert torch_private.compile_counts().recompiles <= 1


@pytest.mark.parametrize("training", [False, True])
def test_reduce_overhead_is_right_with_new_values(training):
    torch_private.reset_compiler()
    net = UNet().cuda().train(training)
    compiled = torch.compile(net, fullgraph=True, mode="reduce-overhead")
    for n in (200, 90, ROWS, 0, 150, 250):
        args = inputs(n)
        torch.compiler.cudagraph_mark_step_begin()
        if training:
            actual, want = gradients(net, compiled, *args), gradients(net, net, *args)
        else:
            with torch.no_grad():
                actual, want = [compiled(*args).clone()], [net(*args)]
        for a, b in zip(actual, want, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
    assert counters["inductor"]["cudagraph_skips"] == 0
    sparse3d.synchronize()


def test_a_training_step_is_captured_and_replayed():
    net = UNet().cuda()
    for module in net.modules():
        if isinstance(module, sparse3d.BatchNorm):
            module.momentum = 0.0  # replays and eager steps see the same statistics
    feats, coords = inputs(200)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            gradients(net, net, feats, coords)
    torch.cuda.current_stream().wait_stream(aside)
    net.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = net(feats, coords).square().sum()
        value.backward()
    for n in (90, ROWS, 0, 200):
        fresh = inputs(n)
        feats.copy_(fresh[0])
        coords.copy_(fresh[1])
        for p in net.parameters():
            p.grad.zero_()
        graph.replay()
        got = [value.clone(), *(p.grad.clone() for p in net.parameters())]
        kept = [p.grad for p in net.parameters()]
        want = gradients(net, net, *fresh)
        for p, grad in zip(net.parameters(), kept, strict=True):
            p.grad = grad  # the memory that the graph writes
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
    sparse3d.synchronize()
