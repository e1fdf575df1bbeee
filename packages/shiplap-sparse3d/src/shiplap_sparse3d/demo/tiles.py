"""Points → features → voxels with all their tables: everything that happens before the compiled graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shiplap.extend.compiling import mark_dynamic
from shiplap_sparse3d import Geometry, SparseTensor, voxelize
from shiplap_sparse3d.demo.scan import Scan

__all__ = ["POINT_FEATURES", "RADII", "VOXEL", "VOXEL_FEATURES", "Tile", "lowest_within", "make_tile", "random_tiles"]

VOXEL = (2.0, 2.0, 1.0)  # metres
RADII = (2.0, 4.0, 8.0, 16.0, 32.0, 48.0)  # metres
POINT_FEATURES = len(RADII) + 4
VOXEL_FEATURES = len(RADII) + 1
_CELL = 2.0  # metres, raster of local minima
_FAR = 1e4  # metres, the height of a raster cell without points: above any terrain


@dataclass(frozen=True)
class Tile:
    """One input of the network.

    Attributes:
        voxels: mean features ``[n, VOXEL_FEATURES]`` on a geometry whose tables all exist.
        points: ``[p, POINT_FEATURES]``.
        inverse: ``int64 [p]``, the voxel of each point.
        ground: ``float32 [p]``, the label.
    """

    voxels: SparseTensor
    points: Tensor
    inverse: Tensor
    ground: Tensor


def lowest_within(xyz: Tensor, radii: Sequence[float]) -> Tensor:
    """Height of each point above the lowest point within ``radii`` metres, on a raster of 2 m cells.

    Shape: ``[p, 3] -> [p, len(radii)]``, metres, never negative. Only the given points are looked at, so features of
    the training area know nothing of the held-out one.
    """
    cell = ((xyz[:, :2] - xyz[:, :2].amin(0)) / _CELL).long()
    width, height = (cell.amax(0) + 1).tolist()
    flat = cell[:, 0] * height + cell[:, 1]
    raster = xyz.new_full((width * height,), _FAR).scatter_reduce(0, flat, xyz[:, 2], "amin").view(1, 1, width, height)
    lowest = [_lowest_in_disc(raster, max(1, round(r / _CELL))).flatten()[flat] for r in radii]
    return xyz[:, 2:] - torch.stack(lowest, 1)


def _lowest_in_disc(raster: Tensor, radius: int) -> Tensor:
    """Minimum over a disc of ``radius`` cells: one pooling along x for each row of the disc, shifted along y."""
    result = torch.full_like(raster, _FAR)
    height = raster.shape[-1]
    for row in range(min(radius, height - 1) + 1):
        half = math.isqrt(radius * radius - row * row)
        low = -F.max_pool2d(-raster, (2 * half + 1, 1), 1, (half, 0))
        above, below = result[..., row:], result[..., : height - row]
        torch.minimum(above, low[..., : height - row], out=above)
        torch.minimum(below, low[..., row:], out=below)
    return result


def make_tile(scan: Scan, levels: int) -> Tile:
    """Features and voxels of ``scan``, and the tables for a U-Net of ``levels`` levels."""
    xyz, p = scan.xyz, len(scan)
    # The cloth parts from the ground where a step of height h is nearer than about sqrt(h): see 0003-demo.md.
    depth = lowest_within(xyz, RADII).clamp(0, 36).sqrt()
    cells = (xyz - xyz.amin(0)) / xyz.new_tensor(VOXEL)
    edge = 2 ** (levels - 1)  # the coarsest grid covers whole cells, or the border voxels would have no parent
    shape = [-(-(int(v) + 1) // edge) * edge for v in cells.amax(0).tolist()]
    voxels, inverse = voxelize(xyz, depth, VOXEL, spatial_shape=shape)
    inverse = inverse.long()
    count = torch.bincount(inverse, minlength=voxels.feats.shape[0])[:, None] / 4
    voxels = voxels.replace(torch.cat([voxels.feats, count.clamp_max(3)], 1))
    points = torch.cat([depth, cells - cells.floor() - 0.5, xyz.new_ones(p, 1)], 1)
    tile = Tile(voxels, points, inverse, scan.ground.float())
    _let_sizes_vary(tile, _tables(voxels.geometry, levels))
    return tile


def _tables(geometry: Geometry, levels: int) -> list[Tensor]:
    """Build every table of the U-Net now, so that the graph meets tensors only."""
    tables: list[Tensor] = []
    for level in range(levels):
        tables += [geometry.coords, *geometry.subm(3).tensors]
        if level < levels - 1:
            step = geometry.strided(2, 2)
            tables += step.plan.tensors
            geometry = step.geometry
    return tables


def _let_sizes_vary(tile: Tile, tables: Sequence[Tensor]) -> None:
    for tensor in (tile.voxels.feats, tile.points, tile.inverse, *tables):
        mark_dynamic(tensor, 0)


def random_tiles(areas: Sequence[Scan], levels: int, seed: int) -> Iterator[Tile]:
    """Endless tiles of 60 to 140 m, each cut from one area, thinned, turned and mirrored at random."""
    draw = torch.Generator().manual_seed(seed)
    weights = torch.tensor([float(len(a)) for a in areas])
    while True:
        area = areas[int(torch.multinomial(weights, 1, generator=draw))]
        tile = _crop(area, draw)
        if len(tile) >= 500:
            yield make_tile(_move(tile, draw), levels)


def _uniform(low: float, high: float, draw: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=draw))


def _crop(area: Scan, draw: torch.Generator) -> Scan:
    """A square around a random point, of which 70 to 100 % of the points stay."""
    centre = area.xyz[int(torch.randint(len(area), (), generator=draw)), :2]
    half, share = _uniform(30, 70, draw), _uniform(0.7, 1, draw)
    inside = ((area.xyz[:, :2] - centre).abs() < half).all(1)
    return area.take(inside & (torch.rand(len(area), generator=draw) < share).to(inside.device))


def _move(tile: Scan, draw: torch.Generator) -> Scan:
    """Any turn about the vertical, and a mirror: neither changes what is ground."""
    angle, mirror = _uniform(0, 2 * math.pi, draw), 1 if _uniform(0, 1, draw) < 0.5 else -1
    c, s = math.cos(angle), math.sin(angle)
    turn = tile.xyz.new_tensor([[mirror * c, s, 0], [-mirror * s, c, 0], [0, 0, 1]])
    return Scan(tile.xyz @ turn, tile.ground)
