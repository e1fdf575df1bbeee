"""Models on the spconv facade on a GPU: as on the CPU, layer by layer and as one compiled graph, under autocast too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.spconv as spconv
from shiplap_sparse3d.spconv.hash import HashTable
from tests.sparse3d.scenes import scene

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GRID = (19, 18, 17)


def network() -> spconv.SparseSequential:
    return spconv.SparseSequential(
        spconv.SubMConv3d(16, 32, 3, bias=False, indice_key="s1"),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        spconv.SubMConv3d(32, 32, 3, indice_key="s1"),
        spconv.SparseConv3d(32, 32, 3, 2, 1, bias=False, indice_key="d1"),
        spconv.SparseBatchNorm(32),
        spconv.SparseReLU(),
        spconv.SparseMaxPool3d(2, 1, 1, indice_key="d2"),
        spconv.SparseInverseConv3d(32, 32, 2, "d2"),
        spconv.SparseConvTranspose3d(32, 16, 2, 2, indice_key="u1"),
        spconv.SparseInverseConv3d(16, 32, 2, "u1"),
        spconv.SparseAvgPool3d(3, 1, 1, indice_key="d3"),
        spconv.SparseInverseConv3d(32, 32, 3, "d3"),
        spconv.SparseInverseConv3d(32, 16, 3, "d1"),
        spconv.SubMConv3d(16, 8, 1),
    )


def results(net: nn.Module, features: torch.Tensor, indices: torch.Tensor, run=None) -> list[torch.Tensor]:
    features = features.clone().requires_grad_()

    def loss(features: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = net(spconv.SparseConvTensor(features, indices, GRID, 2))
        return y.features, y.dense(), spconv.SparseGlobalMaxPool()(y), spconv.SparseGlobalAvgPool()(y)

    outputs = (torch.compile(loss, fullgraph=True) if run == "compiled" else loss)(features, indices)
    sum(o.float().square().sum() for o in outputs).backward()
    sparse3d.synchronize()
    return [*outputs, features.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("run", ["eager", "compiled"])
def test_a_network_is_on_the_gpu_what_it_is_on_the_cpu(run):
    torch.manual_seed(0)
    net, x = network(), scene(3000, GRID, 16, dtype=torch.float32)
    expected = results(copy.deepcopy(net).double(), x.feats.double(), x.coords)
    result = results(net.cuda(), x.feats.cuda(), x.coords.cuda(), run)
    for ours, wanted in zip(result, expected, strict=True):
        scale = wanted.detach().abs().max().clamp_min(1e-6)
        assert float((ours.detach().cpu().double() - wanted).abs().max() / scale) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_autocast_narrows_every_layer(dtype, training):
    net, x = network().cuda().train(training), scene(3000, GRID, 16, dtype=torch.float32)
    x = spconv.SparseConvTensor(x.feats.cuda(), x.coords.cuda(), GRID, 2)
    wide = net(x).features
    with torch.autocast("cuda", dtype=dtype):
        narrow = net(x).features
    assert narrow.dtype == dtype
    assert float(((narrow - wide).abs().max() / wide.abs().max()).detach()) < 0.1


def test_records_and_utilities_on_the_gpu():
    x = scene(500, GRID, 4, dtype=torch.float32)
    here = spconv.SparseConvTensor(x.feats, x.coords, GRID, 2)
    there = spconv.SparseConvTensor(x.feats.cuda(), x.coords.cuda(), GRID, 2)
    layer = spconv.SparseConv3d(4, 6, 3, 2, 1, indice_key="a")
    records = [layer.to(t.features.device)(t).indice_dict["a"] for t in (here, there)]
    for name in ("out_indices", "pair_fwd", "pair_bwd", "indice_pairs", "indice_pair_num"):
        assert torch.equal(getattr(records[0], name), getattr(records[1], name).cpu()), name
    voxelizers = [
        spconv.utils.PointToVoxel([1.0] * 3, [0, 0, 0, 8, 8, 8], 4, 50, 3, torch.device(d)) for d in ("cpu", "cuda")
    ]
    points = torch.rand(400, 4) * 9 - 0.5
    for ours, wanted in zip(
        voxelizers[1].generate_voxel_with_id(points.cuda()), voxelizers[0].generate_voxel_with_id(points), strict=True
    ):
        assert torch.equal(ours.cpu(), wanted)
    table = HashTable(torch.device("cuda"), torch.int64, torch.int32, 10)
    table.insert(torch.tensor([5, 3, 5], device="cuda"), torch.tensor([1, 2, 3], dtype=torch.int32, device="cuda"))
    values, missing = table.query(torch.tensor([3, 5, 7], device="cuda"))
    assert (values.tolist()[:2], missing.tolist()) == ([2, 3], [False, False, True])


@pytest.mark.parametrize("compiled", [False, True])
def test_voxels_that_share_a_cell_on_the_gpu(compiled):
    torch.manual_seed(0)
    columns = [torch.randint(0, size, (900,)) for size in (2, 16, 18)]
    indices, features = torch.stack(columns, 1).int(), torch.randn(900, 16)
    layers = spconv.SubMConv2d(16, 32, 3, indice_key="a"), nn.ReLU(), spconv.SubMConv2d(32, 32, 3, indice_key="a")
    net, results, before = spconv.SparseSequential(*layers), [], spconv.expect_duplicates()
    try:
        for device in ("cpu", "cuda"):
            ours = copy.deepcopy(net).to(device)
            run = torch.compile(ours) if compiled and device == "cuda" else ours
            there = features.to(device, copy=True).requires_grad_()
            out = run(spconv.SparseConvTensor(there, indices.to(device), [16, 18], 2)).features
            out.square().mean().backward()
            results.append([t.detach().cpu() for t in (out, there.grad, *(p.grad for p in ours.parameters()))])
    finally:
        spconv.expect_duplicates(before)
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))
