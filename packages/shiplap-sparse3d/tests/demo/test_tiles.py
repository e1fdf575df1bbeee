"""Tiles: standardised features, voxels that hold their points, and nothing of the held-out area in any of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from shiplap_sparse3d.demo import tiles
from shiplap_sparse3d.demo.features import FEATURES, describe_points
from shiplap_sparse3d.demo.scan import Scan
from shiplap_sparse3d.demo.tiles import (
    POINT_FEATURES,
    VOXEL,
    VOXEL_FEATURES,
    DescribedArea,
    FeatureScaling,
    TrainingTile,
    make_tile,
)

LEVELS = 3


def some(n: int, seed: int = 0, extent: tuple[float, float, float] = (60.0, 40.0, 12.0)) -> Scan:
    draw = torch.Generator().manual_seed(seed)
    return Scan(torch.rand(n, 3, generator=draw) * torch.tensor(extent), torch.rand(n, generator=draw) < 0.5)


def looked(scan: Scan) -> DescribedArea:
    """``scan`` as a network that was trained on it is told of it."""
    return FeatureScaling.of([scan])[1][0]


def first(areas: list[DescribedArea], seed: int, count: int = 3) -> list[TrainingTile]:
    return list(itertools.islice(tiles.random_tiles(areas, LEVELS, seed), count))


def same(a: TrainingTile, b: TrainingTile) -> bool:
    pairs = [
        (a.voxels.feats, b.voxels.feats),
        (a.voxels.coords, b.voxels.coords),
        (a.points, b.points),
        (a.inverse, b.inverse),
        (a.ground, b.ground),
    ]
    return all(torch.equal(x, y) for x, y in pairs)


# --- features


def test_features_are_standardised_by_the_training_area() -> None:
    scan, other = some(3000), some(2000, 1, (30.0, 90.0, 4.0))
    look, [area] = FeatureScaling.of([scan])
    expected = (describe_points(scan.xyz, look.spacing) - look.mean) / look.deviation
    assert torch.equal(area.features, expected.clamp(-4, 4))
    torch.testing.assert_close(expected.mean(0), torch.zeros(FEATURES), atol=1e-4, rtol=0)
    told = (describe_points(other.xyz, look.spacing) - look.mean) / look.deviation
    assert torch.equal(look.describe_area(other).features, told.clamp(-4, 4))


def test_the_areas_of_a_training_are_described_apart() -> None:
    """Points of one area are no neighbours of those of another, even where both lie over the same square."""
    scan = some(3000)
    both = FeatureScaling.of([scan, Scan(scan.xyz - torch.tensor([0, 0, 500.0]), scan.ground)])[1]
    torch.testing.assert_close(both[0].features, both[1].features, atol=1e-2, rtol=0)


# --- voxels


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_points_are_in_their_voxels(levels: int) -> None:
    scan = some(2000)
    area = looked(scan)
    tile = make_tile(area, levels)
    coords = tile.voxels.coords
    assert len(coords.unique(dim=0)) == len(coords)
    assert bool((coords[:, 0] == 0).all())
    assert bool((coords[:, 1:] >= 0).all())
    assert bool((coords[:, 1:] < torch.tensor(tile.voxels.spatial_shape)).all())
    assert all(size % 2 ** (levels - 1) == 0 for size in tile.voxels.spatial_shape)
    size = torch.tensor([area.spacing * spacings for spacings in VOXEL])
    cells = ((scan.xyz - scan.xyz.amin(0)) / size).floor().int()
    assert torch.equal(coords[tile.inverse, 1:], cells)
    assert tile.inverse.unique().tolist() == list(range(len(coords)))


def test_features_of_a_voxel_are_the_mean_of_its_points() -> None:
    scan = some(3000)
    area = looked(scan)
    tile = make_tile(area, LEVELS)
    told = tile.points[:, :FEATURES]
    assert torch.equal(told, area.features)
    count = torch.bincount(tile.inverse)
    mean = torch.zeros(len(count), FEATURES).index_add_(0, tile.inverse, told) / count[:, None]
    torch.testing.assert_close(tile.voxels.feats[:, :-1], mean, rtol=1e-5, atol=1e-5)
    assert torch.equal(tile.voxels.feats[:, -1], (count / 4).clamp_max(3))
    assert tuple(tile.voxels.feats.shape) == (len(count), VOXEL_FEATURES)
    assert tuple(tile.points.shape) == (3000, POINT_FEATURES)
    assert torch.equal(tile.ground, scan.ground.float())
    assert bool((tile.points[:, -1] == 1).all())
    assert bool((tile.points[:, FEATURES:-1].abs() <= 0.5).all())


@pytest.mark.parametrize("levels", [1, 4])
def test_a_tile_of_one_point(levels: int) -> None:
    tile = make_tile(looked(Scan(torch.tensor([[7.0, 8.0, 9.0]]), torch.tensor([True]))), levels)
    assert tile.voxels.coords.tolist() == [[0, 0, 0, 0]]
    assert tile.inverse.tolist() == [0]
    assert tile.points.tolist() == [[0.0] * FEATURES + [-0.5] * 3 + [1.0]]
    assert bool(tile.voxels.feats.isfinite().all())


def test_labels_are_not_features(part: Scan) -> None:
    a, b = make_tile(looked(part), LEVELS), make_tile(looked(Scan(part.xyz, ~part.ground)), LEVELS)
    assert torch.equal(a.points, b.points)
    assert torch.equal(a.voxels.feats, b.voxels.feats)
    assert torch.equal(a.ground, 1 - b.ground)


# --- random tiles


def test_the_seed_decides(part: Scan, part_held: Tensor) -> None:
    areas = [looked(part.take(~part_held))]
    one, repeated, other = first(areas, 1), first(areas, 1), first(areas, 2)
    assert all(same(a, b) for a, b in zip(one, repeated, strict=True))
    assert not any(same(a, b) for a, b in zip(one, other, strict=True))


def test_crops_hold_points_of_their_area_only(part: Scan, part_held: Tensor) -> None:
    border, draw = float(part.xyz[part_held, 0].min()), torch.Generator().manual_seed(0)
    area, widest = looked(part.take(~part_held)), 0.0
    for _ in range(60):
        crop = tiles._crop_square(area, draw).scan
        widest = max(widest, float(crop.xyz[:, 0].max()))
        assert bool((crop.xyz.amax(0)[:2] - crop.xyz.amin(0)[:2] <= 120 * area.spacing).all())
        assert float(crop.xyz[:, 0].max()) < border
    assert widest > border - 1  # some of them did reach the border


def test_small_crops_are_passed_over() -> None:
    """Of two areas one is too thin for any tile."""
    thin, thick = some(400, 1), some(3000, 2)
    assert all(len(tile.ground) >= 500 for tile in first(FeatureScaling.of([thin, thick])[1], 0, 5))


def test_a_move_keeps_distances_heights_and_labels() -> None:
    area, draw = looked(some(50)), torch.Generator().manual_seed(3)
    turned = tiles._turn_and_mirror(area, draw)
    part, moved = area.scan, turned.scan
    assert torch.equal(turned.features, area.features)
    before, after = ((s.xyz[:, None] - s.xyz).norm(dim=2) for s in (part, moved))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(moved.xyz[:, 2], part.xyz[:, 2])
    assert torch.equal(moved.ground, part.ground)
