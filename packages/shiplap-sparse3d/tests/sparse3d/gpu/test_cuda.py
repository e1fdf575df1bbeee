"""sparse3d on an accelerator: the references run there, agree with the CPU kernels, and compile into one graph."""

from __future__ import annotations

import pytest
import torch

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap import torch_private
from tests.sparse3d.scenes import scene

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def on_cuda(args):
    return [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]


def calls():
    x = scene(300, (9, 8, 7), 5)
    window = [[9, 8, 7], [3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1]]
    outs = sparse3d.out_coords(x.coords, *window)
    table = x.geometry.subm(3).table
    yield sparse3d.unique_coords, [torch.randint(-5, 5, (200, 4), dtype=torch.int32)]
    yield sparse3d.subm_table, [x.coords, window[0], window[1], [1, 1, 1]]
    yield sparse3d.out_coords, [x.coords, *window]
    yield sparse3d.conv_table, [x.coords, outs, *window]
    yield sparse3d.transpose_table, [table, 300]
    yield sparse3d.conv, [x.feats, torch.randn(4, 27, 5).double(), table, torch.randn(4).double()]
    yield sparse3d.conv_weight_grad, [torch.randn(300, 4).double(), x.feats, table]


@pytest.mark.parametrize("index", range(7))
def test_cuda_reference_agrees_with_the_cpu_kernel(index):
    op, args = list(calls())[index]
    want, got = op(*args), op(*on_cuda(args))
    for a, b in zip(
        got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True
    ):
        assert a.is_cuda
        torch.testing.assert_close(a.cpu(), b)


def test_arguments_on_two_devices_are_refused():
    x = scene(20, (4, 4, 4), 3, dtype=torch.float32)
    table = x.geometry.subm(3).table
    with pytest.raises(sl.ShiplapError, match="SL206"):
        sparse3d.conv(x.feats.cuda(), torch.randn(2, 27, 3), table)


@pytest.mark.long  # test_graphs.py trains one with the same layers
def test_a_network_trains_on_cuda_in_one_graph():
    torch_private.reset_compiler()
    net = sparse3d.Sequential(
        sparse3d.SubMConv3d(5, 16, 3),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        sparse3d.SparseConv3d(16, 16, 2, 2),
        torch.nn.ReLU(),
        sparse3d.SparseInverseConv3d(16, 4, 2),
    ).cuda()
    compiled = torch.compile(lambda x: net(x).feats.square().mean(), fullgraph=True)
    for n in (100, 200, 300):
        x = scene(n, (9, 8, 7), 5, dtype=torch.float32)
        grads = []
        for run in (lambda x: net(x).feats.square().mean(), compiled):
            net.zero_grad()
            y = sparse3d.SparseTensor(x.feats.cuda(), x.coords.cuda(), x.spatial_shape, 2)
            run(y).backward()
            grads.append([p.grad.clone() for p in net.parameters()])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert torch_private.compile_counts().graph_breaks == 0


@pytest.mark.parametrize("rows", [150, 5000, 40_000])
def test_two_runs_give_the_same_bits_and_deterministic_mode_accepts_them(rows):
    """Whatever else is in memory; sums have no atomics in any number of parts."""
    x = scene(rows, (64, 48, 40), 32, dtype=torch.float16)
    feats, coords = x.feats.cuda().requires_grad_(), x.coords.cuda()
    weight = torch.randn(64, 27, 32, device="cuda").half().requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for fill in (0.0, 1e4, float("nan")):
            torch.full((1 << 26,), fill, device="cuda")  # what the allocator hands out next
            plan = sparse3d.Geometry(coords, x.spatial_shape, 2).subm(3)
            out = plan.conv(feats, weight)
            runs.append([plan.table, out, *torch.autograd.grad(out.float().square().sum(), (feats, weight))])
    finally:
        torch.use_deterministic_algorithms(False)
    for repeated in runs[1:]:
        assert all(map(torch.equal, runs[0], repeated))
