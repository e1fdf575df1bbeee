"""The work before the compiled graph: from points to features to voxels with all their tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shiplap.plugin_api.compiling import mark_dynamic
from shiplap_sparse3d import Geometry, SparseTensor, voxelize
from shiplap_sparse3d.demo.features import FEATURES, describe_points, point_spacing
from shiplap_sparse3d.demo.scan import Scan

__all__ = [
    "POINT_FEATURES",
    "VOXEL",
    "VOXEL_FEATURES",
    "DescribedArea",
    "FeatureScaling",
    "TrainingTile",
    "make_tile",
    "random_tiles",
]

VOXEL = (2.0, 2.0, 1.0)  # spacings
POINT_FEATURES = FEATURES + 4
VOXEL_FEATURES = FEATURES + 1
_LIMIT = 4.0  # standard deviations


@dataclass(frozen=True)
class DescribedArea:
    """The points of one area with their features, as the network takes them.

    Attributes:
        scan: positions and labels.
        features: ``float32 [p, FEATURES]``, scaled by :class:`FeatureScaling`.
        spacing: the mean distance of points, in metres, of the scan that the network was trained on.
    """

    scan: Scan
    features: Tensor
    spacing: float

    def take(self, rows: Tensor) -> DescribedArea:
        """Return a new area with the points and features that ``rows``, indices or a boolean mask, selects."""
        return DescribedArea(self.scan.take(rows), self.features[rows], self.spacing)


@dataclass(frozen=True)
class FeatureScaling:
    """The scaling of the features of points to mean 0 and standard deviation 1 in the training area. ``mean`` and
    ``deviation`` hold one number for each feature. ``spacing`` is the mean distance of the training area's points in
    metres.
    """

    spacing: float
    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, areas: Sequence[Scan]) -> tuple[FeatureScaling, list[DescribedArea]]:
        """Return the scaling with which the features of all points of ``areas`` have mean 0 and standard deviation 1.
        Return also these areas with their scaled features. The features of an area depend on its own points only.
        """
        step = point_spacing(max(areas, key=len).xyz)
        described = [describe_points(area.xyz, step) for area in areas]
        every = torch.cat(described)
        look = cls(step, every.mean(0), every.std(0, correction=0).clamp_min(1e-3))
        return look, [look._standardise_features(area, told) for area, told in zip(areas, described, strict=True)]

    def describe_area(self, scan: Scan) -> DescribedArea:
        """Return ``scan`` with its scaled features, for :func:`make_tile`. The ground labels are not read."""
        return self._standardise_features(scan, describe_points(scan.xyz, self.spacing))

    def _standardise_features(self, scan: Scan, told: Tensor) -> DescribedArea:
        """Return ``scan`` as an area with the features ``told [p, f]``. The mean is subtracted, the result is divided
        by the standard deviation, and it is clamped to at most four deviations.
        """
        return DescribedArea(scan, ((told - self.mean) / self.deviation).clamp(-_LIMIT, _LIMIT), self.spacing)


@dataclass(frozen=True)
class TrainingTile:
    """One input of the network, with its labels.

    Attributes:
        voxels: the mean features ``[n, VOXEL_FEATURES]``, on a geometry whose neighbour tables are built.
        points: the features of the points, ``[p, POINT_FEATURES]``.
        inverse: ``int64 [p]``, the row of each point's voxel.
        ground: ``float32 [p]``, 1 for ground and 0 for other points.
    """

    voxels: SparseTensor
    points: Tensor
    inverse: Tensor
    ground: Tensor


def make_tile(area: DescribedArea, levels: int) -> TrainingTile:
    """Return the points of ``area`` as one tile, with voxels, features of points, the voxel of each point and the
    ground labels. The neighbour tables for a U-Net of ``levels`` levels are built, and the numbers of rows are marked
    as dynamic for ``torch.compile``.
    """
    xyz, told = area.scan.xyz, area.features
    size = tuple(area.spacing * cells for cells in VOXEL)
    cells = (xyz - xyz.amin(0)) / xyz.new_tensor(size)
    edge = 2 ** (levels - 1)  # the coarsest grid covers whole cells, or the border voxels would have no parent
    shape = [-(-(int(v) + 1) // edge) * edge for v in cells.amax(0).tolist()]
    voxels, inverse = voxelize(xyz, told, size, spatial_shape=shape)
    inverse = inverse.long()
    count = torch.bincount(inverse, minlength=voxels.feats.shape[0])[:, None] / 4
    voxels = voxels.replace(torch.cat([voxels.feats, count.clamp_max(3)], 1))
    points = torch.cat([told, cells - cells.floor() - 0.5, xyz.new_ones(len(xyz), 1)], 1)
    tile = TrainingTile(voxels, points, inverse, area.scan.ground.float())
    _let_sizes_vary(tile, _build_tables(voxels.geometry, levels))
    return tile


def _build_tables(geometry: Geometry, levels: int) -> list[Tensor]:
    """Build the neighbour tables of all convolutions of a U-Net of ``levels`` levels on ``geometry``, and return their
    tensors as a list. ``geometry`` stores the tables, so that the compiled graph need not build them.
    """
    tables: list[Tensor] = []
    for level in range(levels):
        tables += [geometry.coords, *geometry.subm(3).tensors]
        if level < levels - 1:
            step = geometry.strided(2, 2)
            tables += step.plan.tensors
            geometry = step.geometry
    return tables


def _let_sizes_vary(tile: TrainingTile, tables: Sequence[Tensor]) -> None:
    """Mark the first size of the tensors of ``tile`` and of ``tables`` as dynamic for ``torch.compile``. The next tile
    then needs no new compilation.
    """
    for tensor in (tile.voxels.feats, tile.points, tile.inverse, *tables):
        # Otherwise the second tile would be compiled for its own sizes before sizes became dynamic.
        mark_dynamic(tensor, 0)


def random_tiles(areas: Sequence[DescribedArea], levels: int, seed: int) -> Iterator[TrainingTile]:
    """Yield random tiles without end, by random numbers from ``seed``. A tile is a square part of one area, 50 to 120
    times the mean distance of points wide. It is thinned out, turned and mirrored at random, and has at least 500
    points.
    """
    draw = torch.Generator().manual_seed(seed)
    # Areas are drawn in proportion to their points.
    weights = torch.tensor([float(len(area.scan)) for area in areas])
    while True:
        tile = _crop_square(areas[int(torch.multinomial(weights, 1, generator=draw))], draw)
        # Tiles with few points lie at the border, and have few neighbours to learn from.
        if len(tile.scan) >= 500:
            yield make_tile(_turn_and_mirror(tile, draw), levels)


def _draw_uniform(low: float, high: float, draw: torch.Generator) -> float:
    """Return a random number between ``low`` and ``high`` from the generator ``draw``."""
    return low + (high - low) * float(torch.rand((), generator=draw))


def _crop_square(area: DescribedArea, draw: torch.Generator) -> DescribedArea:
    """Return the points of ``area`` in a square around a random point, which is 50 to 120 times the mean distance of
    points wide. A random share of 70 to 100 % of these points is kept. The random numbers come from ``draw``.
    """
    xyz = area.scan.xyz
    centre = xyz[int(torch.randint(len(xyz), (), generator=draw)), :2]
    half, share = _draw_uniform(25, 60, draw) * area.spacing, _draw_uniform(0.7, 1, draw)
    inside = ((xyz[:, :2] - centre).abs() < half).all(1)
    return area.take(inside & (torch.rand(len(xyz), generator=draw) < share).to(inside.device))


def _turn_and_mirror(tile: DescribedArea, draw: torch.Generator) -> DescribedArea:
    """Return ``tile`` turned about the vertical axis by a random angle, and mirrored with probability 1/2. The random
    numbers come from ``draw``. Neither change affects ground labels or distances.
    """
    angle, mirror = _draw_uniform(0, 2 * math.pi, draw), 1 if _draw_uniform(0, 1, draw) < 0.5 else -1
    c, s = math.cos(angle), math.sin(angle)
    turn = tile.scan.xyz.new_tensor([[mirror * c, s, 0], [-mirror * s, c, 0], [0, 0, 1]])
    return replace(tile, scan=Scan(tile.scan.xyz @ turn, tile.scan.ground))
