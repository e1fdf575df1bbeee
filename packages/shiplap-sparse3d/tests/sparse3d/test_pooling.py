"""Pooling against dense torch on the active set, its gradients, ties, NaN, and the edges of scenes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap_sparse3d import pooling
from shiplap_testing.effort import EFFORTS
from shiplap_testing.forked import interpreted
from tests.sparse3d.scenes import at, scene

GRID = (9, 8, 7)
WINDOWS = [(2, 2, 0), (3, 2, 1), (3, 1, 1), ((1, 2, 3), (1, 2, 2), (0, 1, 0)), (5, 3, 2)]


def axes(value):
    return (value,) * 3 if isinstance(value, int) else value


@pytest.mark.parametrize(("k", "stride", "padding"), WINDOWS)
def test_max_pool_equals_dense_over_the_voxels_that_are_there(k, stride, padding):
    """Absent cells are minus infinity to the dense one; negative values stay below zero."""
    x = scene(150, GRID, 4)
    feats = (x.feats - 10).requires_grad_()
    step = x.geometry.strided(k, stride, padding)
    got = pooling.max_pool(feats, step.plan.table, step.plan.back[0])
    b, cx, cy, cz = x.coords.long().unbind(1)
    lowest = torch.full((2, *GRID, 4), -torch.inf, dtype=torch.float64)
    dense = lowest.index_put((b, cx, cy, cz), feats).permute(0, 4, 1, 2, 3)
    dense = F.pad(dense, [p for a in reversed(axes(padding)) for p in (a, a)], value=-torch.inf)  # any padding
    want = at(F.max_pool3d(dense, k, stride), step.geometry.coords)
    assert torch.equal(got, want)
    assert (got < 0).all()
    weight = torch.randn_like(got)
    (g,), (w,) = (torch.autograd.grad(t, feats, weight, retain_graph=True) for t in (got, want))
    torch.testing.assert_close(g, w)


@pytest.mark.parametrize(("k", "stride", "padding"), WINDOWS)
def test_avg_pool_divides_by_the_voxels_that_are_there(k, stride, padding):
    x = scene(150, GRID, 4)
    feats = x.feats.requires_grad_()
    step = x.geometry.strided(k, stride, padding)
    got = pooling.avg_pool(feats, step.plan.table)
    there = x.replace(torch.ones(150, 4, dtype=torch.float64)).dense()
    pad = [p for a in reversed(axes(padding)) for p in (a, a)]
    total, count = (F.avg_pool3d(F.pad(d, pad), k, stride) for d in (x.replace(feats).dense(), there))
    want = at(total / count.clamp_min(1e-9), step.geometry.coords)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(got)
    (g,), (w,) = (torch.autograd.grad(t, feats, weight, retain_graph=True) for t in (got, want))
    torch.testing.assert_close(g, w)


def test_equal_values_give_the_gradient_to_the_first_tap():
    feats = torch.tensor([[1.0], [1.0], [0.0]], requires_grad=True)
    table = torch.tensor([[-1, 2, 1, 0], [-1, -1, -1, -1], [2, -1, -1, -1]], dtype=torch.int32)
    out, taps = pooling.max_pool_with_taps(feats, table)
    assert out.flatten().tolist() == [1, 0, 0]
    assert taps.flatten().tolist() == [2, -1, 0]
    out.backward(torch.tensor([[5.0], [7.0], [11.0]]))
    assert feats.grad.flatten().tolist() == [0, 5, 11]  # nothing for the row without hits


def test_nan_and_infinities_are_values_like_others():
    feats = torch.tensor([[-torch.inf], [torch.nan], [3.0]])
    table = torch.tensor([[0, -1], [2, 1], [1, 2], [-1, 0]], dtype=torch.int32)
    out, taps = pooling.max_pool_with_taps(feats, table)
    assert out.flatten().tolist()[::3] == [-torch.inf, -torch.inf]
    assert out[1:3].isnan().all()
    assert taps.flatten().tolist() == [0, 1, 0, 1]


def test_second_derivatives():
    x = scene(30, (4, 4, 4), 2)
    feats = x.feats.requires_grad_()
    table = x.geometry.strided(3, 2, 1).plan.table
    for run in (pooling.max_pool, pooling.avg_pool):
        assert torch.autograd.gradcheck(lambda f, r=run: r(f, table), (feats,))
        assert torch.autograd.gradgradcheck(lambda f, r=run: r(f, table), (feats,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_halves_are_kept_wider(dtype):
    feats = torch.full((27, 2), 60000.0, dtype=dtype)
    table = torch.arange(27, dtype=torch.int32)[None]
    assert (pooling.avg_pool(feats, table) == feats[:1]).all()
    coords = torch.zeros(27, 4, dtype=torch.int32)
    assert (sparse3d.global_pool(feats, coords, 1, "avg") == feats[:1]).all()


@pytest.mark.parametrize("mode", ["max", "avg", "sum"])
def test_global_pool_reduces_each_scene_without_its_padding(mode):
    x = scene(90, GRID, 3, batch_size=2)
    coords = x.coords.clone()
    coords[coords[:, 0] == 1, 0] = 2  # scene 1 is empty
    coords[::7] = -1
    feats = (x.feats - 5).requires_grad_()
    got = sparse3d.global_pool(feats, coords, 4, mode)
    assert got.shape == (4, 3)
    assert not got[1::2].any()
    reduce = {"max": lambda r: r.amax(0), "avg": lambda r: r.mean(0), "sum": lambda r: r.sum(0)}[mode]
    for b in (0, 2):
        torch.testing.assert_close(got[b], reduce(feats[coords[:, 0] == b]))
    weight = torch.randn_like(got)
    (g,) = torch.autograd.grad(got, feats, weight)
    want = sum((reduce(feats[coords[:, 0] == b]) * weight[b]).sum() for b in (0, 2))
    torch.testing.assert_close(g, torch.autograd.grad(want, feats)[0])
    assert not g[::7].any()


@pytest.mark.parametrize("n", [0, 1])
def test_no_voxel_and_one(n):
    feats = torch.randn(n, 3, dtype=torch.float64, requires_grad=True)
    coords = torch.zeros(n, 4, dtype=torch.int32)
    for mode in ("max", "avg", "sum"):
        out = sparse3d.global_pool(feats, coords, 2, mode)
        assert torch.equal(out, torch.cat([feats, torch.zeros(2 - n, 3, dtype=torch.float64)]))
        assert torch.autograd.grad(out.sum(), feats)[0].sum() == 3 * n
    for run in (pooling.max_pool, pooling.avg_pool):
        out = run(feats, torch.full((4, 8), -1, dtype=torch.int32))
        assert not out.any()
        assert not torch.autograd.grad(out.sum(), feats)[0].any()


def test_views_of_any_stride():
    feats = torch.randn(40, 9, dtype=torch.float64)[1:, ::2]
    table = torch.randint(-1, 39, (8, 20), dtype=torch.int32).t()
    for run in (pooling.max_pool_with_taps, pooling.sum_pool):
        for a, b in zip(run(feats, table), run(feats.contiguous(), table.contiguous()), strict=True):
            assert torch.equal(a, b)


def test_what_is_refused():
    feats, table = torch.randn(3, 2), torch.tensor([[0, 3]], dtype=torch.int32)
    for op in (pooling.max_pool_with_taps, pooling.sum_pool):
        with pytest.raises(sl.ShiplapError, match=r"SL211"):
            op(feats, table)
    coords = torch.tensor([[0, 1, 1, 1], [2, 1, 1, 1], [-1, -1, -1, -1]], dtype=torch.int32)
    for mode in ("max", "sum"):
        with pytest.raises(sl.ShiplapError, match=r"SL211(.|\n)*(row 1|\(2, 1, 1, 1\))"):
            sparse3d.global_pool(feats, coords, 2, mode)
    with pytest.raises(sl.ShiplapError, match=r"SL208(.|\n)*'median'(.|\n)*'max', 'avg' or 'sum'"):
        sparse3d.global_pool(feats, coords, 3, "median")


@pytest.mark.parametrize("effort", EFFORTS)
def test_triton_kernels_agree_with_the_references(effort):
    """In a process of its own, under Triton's interpreter."""
    done = interpreted("-m", "tests.sparse3d.interpret_pool", effort)
    assert done.stdout.endswith("pooling kernels agree\n"), done.stderr


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "c"), [(0, 3), (1, 1), (500, 70), (3000, 90), (20, 0)])
def test_global_pooling_on_the_cpu_is_its_reference(n, c, dtype):
    """Ties, NaN, infinities, padding and an empty scene; more channels than one task takes."""
    feats = (torch.randint(-9, 5, (n, c)) / 4).to(dtype)
    coords = torch.randint(-1, 3, (n, 4), dtype=torch.int32)
    for average in (False, True):
        args = feats, coords, 4, average
        torch.testing.assert_close(pooling.global_sum_pool(*args), pooling.global_sum_pool.reference(*args))
    feats[torch.rand(n, c) < 0.01], feats[:, :1] = torch.nan, -torch.inf
    got, want = (run(feats, coords, 4) for run in (pooling.global_max_pool, pooling.global_max_pool.reference))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
