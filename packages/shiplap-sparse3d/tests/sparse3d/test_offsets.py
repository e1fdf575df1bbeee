"""Convolutions onto given voxels by any offsets: against a dense volume in float64, with all gradients."""

from __future__ import annotations

import math
import random

import pytest
import torch

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap_sparse3d import pooling
from shiplap_sparse3d.offsets import box_offsets, offset_table, unbounded
from shiplap_testing.effort import sampled
from tests.sparse3d.scenes import run_to_the_end

pytestmark = pytest.mark.usefixtures("each_device")
MARGIN = 8  # empty cells around a volume; what lies beyond reads the outermost of them


def voxels(rng: random.Random, axes: int, rows: int, low: int, edge: int) -> torch.Tensor:
    """Return distinct rows of two scenes, in any order."""
    cells = rng.sample(range(2 * edge**axes), min(rows, 2 * edge**axes))
    digits = [[c // edge**axes, *(c // edge**a % edge + low for a in range(axes))] for c in cells]
    return torch.tensor(digits, dtype=torch.int32).view(-1, 1 + axes)


def dense_volume(feats: torch.Tensor, coords: torch.Tensor, low: int, size: int) -> torch.Tensor:
    """Return ``[scenes, *axes, c]`` with ``feats`` at ``coords``; cell 0 is ``low - MARGIN``."""
    axes = coords.shape[1] - 1
    at = (coords[:, 0].long(), *(coords[:, 1:].long() - low + MARGIN).unbind(1))
    empty = feats.new_zeros(2, *[size + 2 * MARGIN] * axes, feats.shape[1])
    return empty.index_put(at, feats)


def dense_convolution(feats, coords, outputs, weight, bias, taps, stride, low, size, transposed):
    """Convolve by reading a dense volume at each tap, cell by cell; no table and no lookup."""
    if transposed:  # each input adds to the cells that its taps reach, and the outputs are read from that volume
        low, high = min(low, 2 * low) - 8, max(low + size, 2 * (low + size)) + 8
        size = high - low
        volume = feats.new_zeros(2, *[size] * (coords.shape[1] - 1), weight.shape[0])
        for v, tap in enumerate(taps.tolist()):
            cells = coords[:, 1:].long() * torch.tensor(stride) + torch.tensor(tap) - low
            volume = volume.index_put((coords[:, 0].long(), *cells.unbind(1)), feats @ weight[:, v].T, accumulate=True)
        return volume[(outputs[:, 0].long(), *(outputs[:, 1:].long() - low).unbind(1))] + bias
    volume, out = dense_volume(feats, coords, low, size), bias.expand(len(outputs), -1)
    for v, tap in enumerate(taps.tolist()):
        cells = outputs[:, 1:].long() * torch.tensor(stride) + torch.tensor(tap) - low + MARGIN
        cells = cells.clamp(0, size + 2 * MARGIN - 1)  # what is beyond the margin is as empty as the margin
        out = out + volume[(outputs[:, 0].long(), *cells.unbind(1))] @ weight[:, v].T
    return out


def draw_taps(rng: random.Random, axes: int) -> torch.Tensor:
    """Return the offsets of a cube, a cross, or of any region, in any order."""
    kind = rng.choice(("cube", "cross", "any"))
    if kind == "any":
        return torch.tensor([[rng.randint(-4, 4) for _ in range(axes)] for _ in range(rng.randint(1, 6))])
    kernel, dilation = [rng.randint(1, 3) for _ in range(axes)], [rng.randint(1, 2) for _ in range(axes)]
    return torch.tensor(box_offsets(kernel, dilation, region=kind))


def check_case(seed: int) -> None:
    """Compare one random case, its outputs and all gradients, with the dense volume."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    axes, low = rng.randint(1, 4) if seed % 3 else rng.randint(2, 3), rng.choice((0, -7))
    edge = {1: 30, 2: 12, 3: 7, 4: 4}[axes]
    coords = voxels(rng, axes, rng.choice((0, 1, 40)), low, edge)
    taps, transposed = draw_taps(rng, axes).unique(dim=0), rng.random() < 0.3
    stride = [rng.randint(1, 2) for _ in range(axes)]
    given = voxels(rng, axes, rng.choice((1, 25)), low * (2 if transposed else 1), edge) if rng.random() < 0.6 else None
    here = sparse3d.Geometry(coords, None, 2)
    step = here.onto(given, taps.tolist(), stride, transposed=transposed)
    outputs = step.geometry.coords
    outputs = torch.cat([outputs[:, :1], outputs[:, -axes:]], 1)
    if given is not None:
        assert torch.equal(outputs, given)
    feats, weight = torch.randn(len(coords), 3).double(), torch.randn(4, len(taps), 3).double()
    leaves = [t.requires_grad_() for t in (feats, weight, torch.randn(4).double())]
    out = step.plan.conv(*leaves)
    want = dense_convolution(leaves[0], coords, outputs, *leaves[1:], taps, stride, low, edge, transposed)
    torch.testing.assert_close(out, want)
    grad = torch.randn_like(out)
    for got, expected in zip(*(torch.autograd.grad(o, leaves, grad) for o in (out, want)), strict=True):
        torch.testing.assert_close(got, expected)
    if given is None and len(coords):  # every output that an input reaches, and no other
        ones = [torch.ones_like(feats[:, :1]).detach(), torch.ones(1, len(taps), 1).double(), torch.zeros(1).double()]
        assert bool((step.plan.conv(*ones) > 0).all())
        steps = torch.tensor(stride)
        reached = set()
        for row in coords.tolist():
            for tap in taps.tolist():
                place = torch.tensor(row[1:]) * steps + torch.tensor(tap)
                back = torch.tensor(row[1:]) - torch.tensor(tap)
                if transposed or bool((back % steps == 0).all()):
                    reached.add((row[0], *(place if transposed else back // steps).tolist()))
        assert {tuple(r) for r in outputs.tolist()} == reached
        assert outputs.tolist() == sorted(outputs.tolist())


@pytest.mark.parametrize("block", sampled(range(4), 2))
def test_given_voxels_equal_the_dense_volume(block):
    for seed in range(10):
        check_case(10 * block + seed)


@pytest.mark.long
@pytest.mark.parametrize("block", range(26))
def test_many_given_voxels_equal_the_dense_volume(block):
    for seed in range(10):
        check_case(1000 + 10 * block + seed)


@pytest.mark.parametrize("axes", [2, 3])
def test_layers_of_voxels_without_a_grid_are_those_of_the_moved_grid(axes):
    """Coordinates below zero, and the same ones moved into a grid."""
    rng = random.Random(axes)
    coords = voxels(rng, axes, 60, -5, 9)
    moved = coords + torch.tensor([0, *[8] * axes], dtype=torch.int32)
    free, grid = sparse3d.Geometry(coords, None, 2), sparse3d.Geometry(moved, [24] * axes, 2)
    assert torch.equal(free.subm([3] * axes).table, grid.subm([3] * axes).table)
    assert free.subm([3] * axes).symmetric
    assert free.subm([3] * axes) is free.subm([3] * axes)
    for name, window in (("strided", (3, 2, 1)), ("pooled", (2, 2)), ("generative", (3,)), ("transposed", (2, 2))):
        one, other = getattr(free, name)(*window), getattr(grid, name)(*window)
        shift = {"strided": 4, "pooled": 4, "generative": 8, "transposed": 16}[name]
        back = torch.tensor([0, *[shift] * axes])
        assert torch.equal(one.geometry.coords[:, -axes:] + back[1:], other.geometry.coords[:, -axes:])
        assert torch.equal(one.plan.table, other.plan.table)
        assert not one.geometry.bounded
        assert one.geometry.parent.plan.table.shape == one.plan.table.shape


def test_four_axes_train_in_a_grid():
    coords = voxels(random.Random(3), 4, 50, 0, 5)
    x = sparse3d.Geometry(coords, (5, 5, 5, 5), 2)
    feats, weight = torch.randn(50, 2).double().requires_grad_(), torch.randn(3, 81, 2).double().requires_grad_()
    volume = dense_4d(feats, coords)
    want = sum(
        torch.roll(volume, [-o for o in offset], (1, 2, 3, 4)) @ weight[:, v].T
        for v, offset in enumerate(box_offsets([3] * 4, [1] * 4))
    )[tuple((coords.long() + torch.tensor([0, 2, 2, 2, 2])).unbind(1))]
    out = x.subm(3).conv(feats, weight)
    torch.testing.assert_close(out, want)
    for got, expected in zip(
        *(torch.autograd.grad(o.square().sum(), (feats, weight)) for o in (out, want)), strict=True
    ):
        torch.testing.assert_close(got, expected)
    step = x.strided(2, 2)
    assert step.geometry.spatial_shape == (2, 2, 2, 2)
    assert int(step.geometry.coords[:, 1:].max()) == 1
    with pytest.raises(sl.ShiplapError, match=r"SL208(.|\n)*1 cell or more"):
        x.strided(7)


def dense_4d(feats: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
    at = tuple((coords.long() + torch.tensor([0, 2, 2, 2, 2])).unbind(1))
    return feats.new_zeros(2, 9, 9, 9, 9, feats.shape[1]).index_put(at, feats)


def test_pruning_union_blocks_and_resampling():
    rng = random.Random(5)
    coords, others = voxels(rng, 3, 50, -6, 6), voxels(rng, 3, 40, -4, 6)
    x, y = sparse3d.Geometry(coords, None, 2), sparse3d.Geometry(others, None, 2)
    feats, more = torch.randn(50, 4).double().requires_grad_(), torch.randn(40, 4).double().requires_grad_()
    mask = torch.rand(50) > 0.5
    kept = x.select(mask)
    assert torch.equal(kept.geometry.coords, coords[mask])
    torch.testing.assert_close(pooling.sum_pool(feats, kept.plan.table), feats[mask])

    both, plans = x.union(y)
    rows = {tuple(r) for r in coords.tolist()} | {tuple(r) for r in others.tolist()}
    assert [tuple(r) for r in both.coords.tolist()] == sorted(rows)
    total = pooling.sum_pool(feats, plans[0].table) + pooling.sum_pool(more, plans[1].table)
    dense = dense_volume(feats, coords, -6, 10) + dense_volume(more, others, -6, 10)
    cells = (both.coords[:, 1:] + 6 + MARGIN).long().unbind(1)
    torch.testing.assert_close(total, dense[(both.coords[:, 0].long(), *cells)])
    grads = torch.autograd.grad(total.sum(), (feats, more))
    assert all(bool((g == 1).all()) for g in grads)

    blocks = x.coarsen(4)
    assert torch.equal(blocks.geometry.coords[:, 1:] % 4, torch.zeros_like(blocks.geometry.coords[:, 1:]))
    assert int((blocks.plan.table >= 0).sum()) == 50  # each voxel lies in one block
    torch.testing.assert_close(pooling.sum_pool(feats, blocks.plan.table).sum(0), feats.sum(0))

    here = x.onto(others, [[0, 0, 0]], plain=True)
    index = {tuple(r): i for i, r in enumerate(coords.tolist())}
    assert here.plan.table[:, 0].tolist() == [index.get(tuple(r), -1) for r in others.tolist()]


def test_rows_of_any_range_are_told_apart():
    """Eight columns of the whole range of int32: no number of 64 bits holds such a row."""
    edge = torch.iinfo(torch.int32)
    rows = torch.randint(edge.min, edge.max, (500, 8)).int()
    rows[:, 0] = 0
    wanted = torch.cat([rows[::3], rows[:100] ^ 1])
    nothing, ones = torch.zeros(1, 8, dtype=torch.int32), [1] * 8
    got = offset_table(rows, wanted, nothing, ones)
    assert torch.equal(got, offset_table.reference(rows, wanted, nothing, ones))
    assert got[:167, 0].tolist() == list(range(0, 500, 3))
    assert not (got[167:] >= 0).any()
    cells = sparse3d.offset_cells(torch.cat([rows, rows[:50]]), nothing, ones, *unbounded(7))
    assert cells.tolist() == sorted(rows.tolist())


@pytest.mark.parametrize(
    "call",
    [
        lambda c, g: offset_table(torch.cat([c, c[:1]]), c, torch.zeros(1, 4, dtype=torch.int32), [1] * 4),
        lambda c, g: g.onto(torch.cat([c, c[:1]]), [[0, 0, 0]], back=True),
        lambda c, g: sparse3d.Geometry(torch.cat([c, c[:1]]), None, 2).subm(3),
        lambda c, g: sparse3d.Geometry(c, None, 1).onto(c, [[0, 0, 0]]),
    ],
)
def test_duplicates_and_other_scenes_are_refused(call):
    coords = voxels(random.Random(1), 3, 30, -3, 6)
    with pytest.raises(sl.ShiplapError, match="SL211"):
        run_to_the_end(call, coords, sparse3d.Geometry(coords, None, 2))


def test_wrong_arguments_are_refused():
    g = sparse3d.Geometry(voxels(random.Random(1), 3, 30, -3, 6), None, 2)
    for call in (
        lambda: g.onto(None, [[0, 0, 0]], 0),
        lambda: g.strided(2, 2, capacity=9),
        lambda: box_offsets([3], [1], region="ball"),
    ):
        with pytest.raises(sl.ShiplapError, match="SL208"):
            call()
    assert math.prod(map(len, (box_offsets([3, 3], [1, 1], region="cross"), box_offsets([2], [3])))) == 10
