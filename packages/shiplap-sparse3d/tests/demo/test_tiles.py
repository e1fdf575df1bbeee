"""Tiles: right features, voxels that hold their points, and nothing of the held-out area in any of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from shiplap_sparse3d.demo import tiles
from shiplap_sparse3d.demo.scan import Scan
from shiplap_sparse3d.demo.tiles import POINT_FEATURES, RADII, VOXEL, VOXEL_FEATURES, Tile, lowest_within, make_tile

LEVELS = 3


def some(n: int, seed: int = 0, extent: tuple[float, float, float] = (60.0, 40.0, 12.0)) -> Scan:
    draw = torch.Generator().manual_seed(seed)
    return Scan(torch.rand(n, 3, generator=draw) * torch.tensor(extent), torch.rand(n, generator=draw) < 0.5)


def first(areas: list[Scan], seed: int, count: int = 3) -> list[Tile]:
    return list(itertools.islice(tiles.random_tiles(areas, LEVELS, seed), count))


def same(a: Tile, b: Tile) -> bool:
    pairs = [
        (a.voxels.feats, b.voxels.feats),
        (a.voxels.coords, b.voxels.coords),
        (a.points, b.points),
        (a.inverse, b.inverse),
        (a.ground, b.ground),
    ]
    return all(torch.equal(x, y) for x, y in pairs)


# --- features


def by_hand(xyz: Tensor, radius: float) -> Tensor:
    """Height above the lowest point of all 2 m cells whose centres are within ``radius``."""
    cell = ((xyz[:, :2] - xyz[:, :2].amin(0)) / 2).long()
    disjoint = (cell[:, None] - cell).square().sum(2)
    near = disjoint <= max(1, round(radius / 2)) ** 2
    return xyz[:, 2] - torch.where(near, xyz[:, 2], torch.inf).amin(1)


@pytest.mark.parametrize("extent", [(60.0, 40.0, 12.0), (150.0, 1.0, 5.0), (1.0, 130.0, 5.0)])
def test_lowest_within_by_brute_force(extent: tuple[float, float, float]) -> None:
    xyz = some(500, extent=extent).xyz
    expected = torch.stack([by_hand(xyz, r) for r in RADII], 1)
    assert torch.equal(lowest_within(xyz, RADII), expected)
    assert bool((expected >= 0).all())


def test_a_wider_look_never_finds_less_depth(training: Scan) -> None:
    depth = lowest_within(training.xyz, RADII)
    assert bool((depth.diff(dim=1) >= 0).all())


# --- voxels


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_points_are_in_their_voxels(levels: int) -> None:
    scan = some(2000)
    tile = make_tile(scan, levels)
    coords = tile.voxels.coords
    assert len(coords.unique(dim=0)) == len(coords)
    assert bool((coords[:, 0] == 0).all())
    assert bool((coords[:, 1:] >= 0).all())
    assert bool((coords[:, 1:] < torch.tensor(tile.voxels.spatial_shape)).all())
    assert all(size % 2 ** (levels - 1) == 0 for size in tile.voxels.spatial_shape)
    cells = ((scan.xyz - scan.xyz.amin(0)) / torch.tensor(VOXEL)).floor().int()
    assert torch.equal(coords[tile.inverse, 1:], cells)
    assert tile.inverse.unique().tolist() == list(range(len(coords)))


def test_features_of_a_voxel_are_the_mean_of_its_points() -> None:
    scan = some(3000)
    tile = make_tile(scan, LEVELS)
    depth = tile.points[:, : len(RADII)]
    count = torch.bincount(tile.inverse)
    mean = torch.zeros(len(count), len(RADII)).index_add_(0, tile.inverse, depth) / count[:, None]
    torch.testing.assert_close(tile.voxels.feats[:, :-1], mean, rtol=1e-5, atol=1e-5)
    assert torch.equal(tile.voxels.feats[:, -1], (count / 4).clamp_max(3))
    assert tuple(tile.voxels.feats.shape) == (len(count), VOXEL_FEATURES)
    assert tuple(tile.points.shape) == (3000, POINT_FEATURES)
    assert torch.equal(tile.ground, scan.ground.float())
    assert bool((tile.points[:, -1] == 1).all())
    assert bool((tile.points[:, len(RADII) : -1].abs() <= 0.5).all())


@pytest.mark.parametrize("levels", [1, 4])
def test_a_tile_of_one_point(levels: int) -> None:
    tile = make_tile(Scan(torch.tensor([[7.0, 8.0, 9.0]]), torch.tensor([True])), levels)
    assert tile.voxels.coords.tolist() == [[0, 0, 0, 0]]
    assert tile.inverse.tolist() == [0]
    assert tile.points.tolist() == [[0.0] * len(RADII) + [-0.5] * 3 + [1.0]]
    assert bool(tile.voxels.feats.isfinite().all())


def test_labels_are_not_features(scan: Scan, held: Tensor) -> None:
    part = scan.take(held)
    a, b = make_tile(part, LEVELS), make_tile(Scan(part.xyz, ~part.ground), LEVELS)
    assert torch.equal(a.points, b.points)
    assert torch.equal(a.voxels.feats, b.voxels.feats)
    assert torch.equal(a.ground, 1 - b.ground)


# --- random tiles


def test_the_seed_decides(training: Scan) -> None:
    one, repeated, other = first([training], 1), first([training], 1), first([training], 2)
    assert all(same(a, b) for a, b in zip(one, repeated, strict=True))
    assert not any(same(a, b) for a, b in zip(one, other, strict=True))


def test_crops_hold_points_of_their_area_only(training: Scan, held: Tensor, scan: Scan) -> None:
    border, draw = float(scan.xyz[held, 0].min()), torch.Generator().manual_seed(0)
    widest = 0.0
    for _ in range(60):
        crop = tiles._crop(training, draw)
        widest = max(widest, float(crop.xyz[:, 0].max()))
        assert bool((crop.xyz.amax(0)[:2] - crop.xyz.amin(0)[:2] <= 140).all())
        assert float(crop.xyz[:, 0].max()) < border
    assert widest > border - 1  # some of them did reach the border


def test_border_tiles() -> None:
    """Tiles in the corners of an area: most of the square is empty, and all is as elsewhere."""
    area = some(4000, extent=(200.0, 200.0, 5.0))
    corner = (area.xyz[:, :2] - area.xyz[:, :2].amax(0)).norm(dim=1).argmin()
    inside = ((area.xyz[:, :2] - area.xyz[corner, :2]).abs() < 30).all(1)
    part = area.take(inside)
    tile = make_tile(part, LEVELS)
    assert torch.equal(tile.points[:, : len(RADII)], lowest_within(part.xyz, RADII).clamp(0, 36).sqrt())
    assert bool(tile.voxels.feats.isfinite().all())


def test_small_crops_are_passed_over() -> None:
    """Of two areas one is too thin for any tile."""
    thin, thick = some(400, 1), some(3000, 2)
    assert all(len(tile.ground) >= 500 for tile in first([thin, thick], 0, 5))


def test_a_move_keeps_distances_heights_and_labels() -> None:
    part, draw = some(50), torch.Generator().manual_seed(3)
    moved = tiles._move(part, draw)
    before, after = ((s.xyz[:, None] - s.xyz).norm(dim=2) for s in (part, moved))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(moved.xyz[:, 2], part.xyz[:, 2])
    assert torch.equal(moved.ground, part.ground)
