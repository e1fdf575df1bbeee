"""Layers of one to four axes, in a grid and with negative coordinates, against dense volumes of any number of axes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import shiplap as sl
import shiplap_sparse3d as sparse3d
from tests.sparse3d.scenes import run_to_the_end

pytestmark = pytest.mark.usefixtures("each_device")
EDGE = {1: 14, 2: 8, 3: 6, 4: 4}
DOUBLE = {"dtype": torch.float64, "bias": False}
AXES = (1, 2, 3, 4)


def scene(axes: int, channels: int = 3, density: float = 0.4) -> sparse3d.SparseTensor:
    """Return voxels of two scenes in any order."""
    cells = (torch.rand(2, *[EDGE[axes]] * axes) < density).nonzero()
    coords = cells[torch.randperm(len(cells))].int()
    feats = torch.randn(len(coords), channels, dtype=torch.float64).requires_grad_()
    return sparse3d.SparseTensor(feats, coords, [EDGE[axes]] * axes, 2)


def layer(name: str, axes: int, *arguments: Any, **options: Any) -> Any:
    return getattr(sparse3d, f"{name}{axes}d")(*arguments, **options)


def cells_of(start: int, count: int, step: int, axes: int, tap: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the index of the cells ``start * tap`` and on, with a step, of a volume with the channels last."""
    return (slice(None), *(slice(start * t, start * t + (count - 1) * step + 1, step) for t in tap))


def convolve(volume: Tensor, weight: Tensor, stride: int = 1, padding: int = 0, dilation: int = 1) -> Tensor:
    """Convolve ``[b, *axes, c]`` with ``[co, *kernel, ci]``, tap by tap."""
    axes, kernel = volume.dim() - 2, weight.shape[1]
    wide = torch.nn.functional.pad(volume, (0, 0, *[padding] * 2 * axes))
    cells = (wide.shape[1] - dilation * (kernel - 1) - 1) // stride + 1
    taps = itertools.product(range(kernel), repeat=axes)
    return sum(wide[cells_of(dilation, cells, stride, axes, tap)] @ weight[(slice(None), *tap)].T for tap in taps)


def convolve_transposed(volume: Tensor, weight: Tensor, stride: int) -> Tensor:
    axes, kernel, cells = volume.dim() - 2, weight.shape[1], volume.shape[1]
    out = volume.new_zeros(2, *[(cells - 1) * stride + kernel] * axes, weight.shape[0])
    for tap in itertools.product(range(kernel), repeat=axes):
        spread = torch.zeros_like(out)
        spread[cells_of(1, cells, stride, axes, tap)] = volume @ weight[(slice(None), *tap)].T
        out = out + spread
    return out


def windows(volume: Tensor, kernel: int) -> Tensor:
    """Return the cells of each block of ``kernel`` cells: ``[taps, b, *axes, c]``; what is left over is dropped."""
    axes, cells = volume.dim() - 2, volume.shape[1] // kernel
    taps = itertools.product(range(kernel), repeat=axes)
    return torch.stack([volume[cells_of(1, cells, kernel, axes, tap)] for tap in taps])


def volume_of(x: sparse3d.SparseTensor) -> Tensor:
    return x.dense().movedim(1, -1)


def occupied(x: sparse3d.SparseTensor) -> Tensor:
    return volume_of(x.replace(torch.ones_like(x.feats[:, :1]))) > 0


def assert_same(y: sparse3d.SparseTensor, dense: Tensor, leaves: list[Tensor]) -> None:
    """Compare a whole volume: no output is left out, and there is none where none should be."""
    got = volume_of(y)
    torch.testing.assert_close(got, dense)
    grad = torch.randn_like(dense)
    for a, b in zip(*(torch.autograd.grad(o, leaves, grad, retain_graph=True) for o in (got, dense)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("axes", AXES)
def test_convolutions_are_those_of_dense_volumes(axes):
    x = scene(axes)
    full = volume_of(x)
    subm = layer("SubMConv", axes, 3, 4, 3, dilation=2, **DOUBLE)
    assert_same(subm(x), convolve(full, subm.weight, 1, 2, 2) * occupied(x), [x.feats, subm.weight])
    strided = layer("SparseConv", axes, 3, 4, 3, 2, 1, **DOUBLE)
    low = strided(x)
    assert_same(low, convolve(full, strided.weight, 2, 1), [x.feats, strided.weight])
    up = layer("SparseConvTranspose", axes, 4, 2, 2, 2, **DOUBLE)
    assert_same(up(low), convolve_transposed(volume_of(low), up.weight, 2), [x.feats, strided.weight, up.weight])
    inverse = layer("SparseInverseConv", axes, 4, 2, 3, **DOUBLE)
    back = inverse(low)
    assert torch.equal(back.coords, x.coords)
    cut = (slice(None), *[slice(1, 1 + EDGE[axes])] * axes)
    wide = convolve_transposed(volume_of(low), inverse.weight, 2)
    wide = torch.nn.functional.pad(wide, (0, 0, *[0, 2] * axes))
    assert_same(back, wide[cut] * occupied(x), [x.feats, strided.weight, inverse.weight])
    grown = layer("GenerativeConv", axes, 3, 2, 3, **DOUBLE)
    assert_same(grown(x), convolve(full, grown.weight, 1, 1), [x.feats, grown.weight])


@pytest.mark.parametrize("axes", AXES)
def test_convolutions_onto_given_voxels(axes):
    x, wanted = scene(axes), scene(axes, density=0.3)
    conv = layer("SparseConv", axes, 3, 4, 3, padding=1, **DOUBLE)
    assert_same(conv(x, wanted), convolve(volume_of(x), conv.weight, 1, 1) * occupied(wanted), [x.feats, conv.weight])
    floor = layer("SparseConv", axes, 3, 4, 3, 2, out_coords="floor", **DOUBLE)
    low = floor(x)
    assert low.tensor_stride == (2,) * axes
    some = windows(occupied(x), 2).any(0)
    dense = convolve(volume_of(x), floor.weight, 2, 1)
    assert_same(low, dense[(slice(None), *[slice(0, EDGE[axes] // 2)] * axes)] * some, [x.feats, floor.weight])
    up = layer("SparseConvTranspose", axes, 4, 2, 3, 2, 1, 1, **DOUBLE)
    cut = (slice(None), *[slice(1, 1 + EDGE[axes])] * axes)
    wide = torch.nn.functional.pad(convolve_transposed(volume_of(low), up.weight, 2), (0, 0, *[0, 2] * axes))
    assert_same(up(low, x), wide[cut] * occupied(x), [x.feats, floor.weight, up.weight])


@pytest.mark.parametrize("axes", AXES)
def test_pooling_and_resampling(axes):
    x = scene(axes)
    full, there = volume_of(x), occupied(x)
    blocks, hits = windows(full, 2), windows(there.double(), 2).sum(0)
    assert_same(layer("SparseSumPool", axes, 2)(x), blocks.sum(0), [x.feats])
    assert_same(layer("SparseAvgPool", axes, 2)(x), blocks.sum(0) / hits.clamp_min(1), [x.feats])
    lowest = torch.where(there, full, -torch.inf)
    most = torch.where(hits > 0, windows(lowest, 2).amax(0), 0)
    low = layer("SparseMaxPool", axes, 2)(x)
    assert_same(low, most, [x.feats])
    spread = most
    for axis in range(axes):
        spread = spread.repeat_interleave(2, 1 + axis)
    assert_same(layer("SparseUpsample", axes, 2)(low), spread, [x.feats])
    assert_same(layer("SparseUnpool", axes, 2)(low), spread * there, [x.feats])
    coarse = layer("SparsePixelUnshuffle", axes, 2)(x)
    assert_same(coarse, blocks.movedim(0, -1).flatten(-2), [x.feats])
    fine = layer("SparsePixelShuffle", axes, 2)(coarse, x)
    assert torch.equal(fine.feats, x.feats)
    means = sparse3d.GlobalPool("avg")(x)
    torch.testing.assert_close(means, full.flatten(1, -2).sum(1) / there.flatten(1).sum(1, keepdim=True))
    normed = sparse3d.InstanceNorm(3)(x)
    torch.testing.assert_close(sparse3d.GlobalPool("avg")(normed), torch.zeros(2, 3).double())


@pytest.mark.parametrize("axes", AXES)
def test_layers_without_a_grid_are_those_of_a_grid_moved(axes):
    """Coordinates moved below zero by a multiple of every stride: the same rows with the same features."""
    x = scene(axes)
    shift = torch.tensor([0, *[8] * axes], dtype=torch.int32)
    free = sparse3d.SparseTensor(x.feats, x.coords - shift, None, 2)
    wide = sparse3d.SparseTensor(x.feats, x.coords + shift, [32] * axes, 2)
    net = [
        layer("SubMConv", axes, 3, 4, 3, **DOUBLE),
        layer("SparseConv", axes, 4, 4, 3, 2, 1, **DOUBLE),
        layer("SparseConv", axes, 4, 4, 2, 2, out_coords="floor", **DOUBLE),
        layer("SparseConvTranspose", axes, 4, 4, 2, 2, **DOUBLE),
        layer("SparseMaxPool", axes, 2),
        layer("SparsePixelUnshuffle", axes, 2),
    ]
    here, there, move = free, wide, 16
    for part, factor in zip(net, (1, 0.5, 0.5, 2, 0.5, 0.5), strict=True):
        here, there, move = part(here), part(there), int(move * factor)
        assert torch.equal(here.coords[:, 1:] + move, there.coords[:, 1:])
        torch.testing.assert_close(here.feats, there.feats)
    got, want = (torch.autograd.grad(y.feats.square().sum(), x.feats)[0] for y in (here, there))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("axes", AXES)
def test_unions_and_masks(axes):
    x, y = scene(axes), scene(axes)
    both = sparse3d.union([x, y])
    assert_same(both, volume_of(x) + volume_of(y), [x.feats, y.feats])
    assert both.coords.tolist() == sorted(both.coords.tolist())
    there, plans = x.geometry.union(y.geometry)
    assert torch.equal(there.coords[:, -axes:], both.coords[:, -axes:])
    total = sum(sparse3d.sum_pool(t.feats, plan.table, plan.back[0]) for t, plan in zip((x, y), plans, strict=True))
    torch.testing.assert_close(total, both.feats)
    mask = torch.rand(len(x.feats)) < 0.5
    kept = x.geometry.select(mask)
    torch.testing.assert_close(sparse3d.sum_pool(x.feats, kept.plan.table), x[mask].feats)
    blocks = x.geometry.coarsen(2)
    assert torch.equal(blocks.geometry.coords[:, -axes:] // 2, x.geometry.floored(2, 2).geometry.coords[:, -axes:])
    sums = sparse3d.sum_pool(x.feats, blocks.plan.table)
    torch.testing.assert_close(sums, layer("SparseSumPool", axes, 2)(x).feats)


@pytest.mark.long
def test_a_network_of_four_axes_is_one_graph_and_trains(fresh_compiler):
    net = sparse3d.Sequential(
        sparse3d.SubMConv4d(3, 4, 3),
        sparse3d.BatchNorm(4),
        torch.nn.ReLU(),
        sparse3d.SparseConv4d(4, 8, 2, 2),
        sparse3d.SparseInverseConv4d(8, 2, 2),
    ).double()

    def run(feats: Tensor, coords: Tensor) -> Tensor:
        return net(sparse3d.SparseTensor(feats, coords, [4] * 4, 2)).feats

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for density in (0.3, 0.5):
        x = scene(4, density=density)
        got, want = (f(x.feats, x.coords) for f in (compiled, run))
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(y.square().sum(), [x.feats, *net.parameters()]) for y in (got, want)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("axes", AXES)
def test_voxels_of_another_scene_or_of_other_axes_are_refused(axes):
    x = scene(axes)
    conv = layer("SparseConv", axes, 3, 4, 3, padding=1, **DOUBLE)
    wrong = x.coords.clone()
    wrong[3, 0] = 2
    with pytest.raises(sl.ShiplapError, match="SL211"):
        conv(x, wrong)
    wrong[3, 0] = -2
    with pytest.raises(sl.ShiplapError, match="SL211"):
        run_to_the_end(conv, sparse3d.SparseTensor(x.feats, wrong, x.spatial_shape, 2))
    with pytest.raises(sl.ShiplapError, match="SL202"):
        conv(x, torch.zeros(1, 1 + (axes % 4 + 1), dtype=torch.int32))
    with pytest.raises(sl.ShiplapError, match="SL202"):
        conv(x, sparse3d.SparseTensor(x.feats, x.coords, x.spatial_shape, 3))
