"""The features of each point: its height over surfaces through low points, and over its neighbours.

All lengths are multiples of the *spacing*, the mean distance between points, so that the same numbers describe a scan
with ten points per square metre and one with a point per ten square metres. Only the given points are used. Heights are
not learned and no label is used, but the surfaces are those of the usual ground filters: morphological erosions and
openings (Zhang et al., IEEE Transactions on Geoscience and Remote Sensing 41(4), 2003).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["FEATURES", "describe_points", "ground_surfaces", "nearest_points", "point_spacing"]

_CELL = 0.5  # spacings, a cell of the raster of lowest points
_MOST_CELLS = 2**22  # of the raster: those of an area with few points on it become larger
_RADII = 1, 2, 4, 8, 16, 32, 64, 128  # cells
# Numbers of nearest points that are looked at.
_NEIGHBOURS = 4, 8, 16, 32
_BLOCK, _MARGIN = 8, 5  # spacings: neighbours are looked for within the margin around a block
_STEP = 0.05  # metres: less is noise of the scanner
FEATURES = 3 * len(_RADII) + 5 * len(_NEIGHBOURS) + 5
_FAR = 1e4  # metres: above any terrain


def point_spacing(xyz: Tensor) -> float:
    """Return the mean distance of neighbouring points in metres, as if the points ``xyz`` lay on a square grid. It is
    computed from the number of points in those 5 m squares that contain any, and is at most 5 m.
    """
    squares = (xyz[:, :2] / 5).floor().long().unique(dim=0)
    return (25 * len(squares) / max(1, len(xyz))) ** 0.5


def describe_points(xyz: Tensor, step: float) -> Tensor:
    """Return the features from which the network learns, ``[p, FEATURES]``, for the points ``xyz [p, 3]``. They
    describe heights above the ground and above neighbouring points. ``step`` is the mean distance of the points in
    metres.

    Heights are in square roots of metres, with their sign, since ten centimetres matter only near the ground.
    """
    described = torch.cat([ground_surfaces(xyz, step), _neighbour_features(xyz, step)], 1)
    return described.sign() * described.abs().clamp_max(100).sqrt()


def ground_surfaces(xyz: Tensor, step: float) -> Tensor:
    """Return the height of each point above three surfaces for each of ``r`` radii (``_RADII``), ``[p, 3 r]`` in
    metres. ``step`` is the mean distance of the points in metres.

    The surfaces are the erosion, the opening, and the mean of the opening. The erosion is the lowest point within the
    radius. The opening is the highest erosion within the radius. On a slope the erosion lies below the ground, and the
    opening does not. Squares are used in place of discs.
    """
    xy = xyz[:, :2] - xyz[:, :2].amin(0)
    # A few stray points far away must not make the raster huge.
    cell = max(_CELL * step, (float(xy.amax(0).double().prod()) / _MOST_CELLS) ** 0.5)
    place = (xy / cell).long()
    width, height = (place.amax(0) + 1).tolist()
    flat, z = place[:, 0] * height + place[:, 1], xyz[:, 2]
    low = z.new_full((width * height,), _FAR).scatter_reduce(0, flat, z, "amin").view(width, height)
    filled = (low < _FAR / 2).to(z)
    above, eroded, before = [], low, 0
    for radius in _RADII:
        # Radii ascend, so each erosion continues the one before.
        eroded, before = -_square_maximum(-eroded, radius - before), radius
        opened = _square_maximum(torch.where(eroded < _FAR / 2, eroded, -_FAR), radius)
        mean = _square_mean(torch.where(filled > 0, opened, 0), filled, max(1, radius // 2))
        mean = _square_mean(mean, filled, max(1, radius // 2))
        above += [z - surface.flatten()[flat] for surface in (eroded, opened, mean)]
    return torch.stack(above, 1)


def _square_maximum(raster: Tensor, radius: int) -> Tensor:
    """Return a matrix with the maximum of ``raster`` over the square around each cell. The square extends ``radius``
    cells to each side.
    """
    for _ in range(2):
        # The transpose lets the second round go along the other axis, and undoes itself.
        raster = _maximum_along_rows(raster, radius).T
    return raster


def _maximum_along_rows(raster: Tensor, radius: int) -> Tensor:
    """Return a matrix whose row ``i`` is the maximum of the rows ``i - radius`` to ``i + radius`` of ``raster``. It is
    computed from windows that double in length.
    """
    window, wide, rows = 2 * radius + 1, 1, raster.shape[0]
    # Cells beyond the border never are the maximum.
    raster = F.pad(raster, (0, 0, radius, radius), value=-torch.inf)
    while 2 * wide <= window:
        # Windows double: the number of passes is logarithmic in the radius.
        raster = torch.maximum(raster[: len(raster) - wide], raster[wide:])
        wide *= 2
    return torch.maximum(raster[:rows], raster[window - wide :][:rows])


def _square_mean(values: Tensor, weights: Tensor, radius: int) -> Tensor:
    """Return a matrix with the weighted mean of ``values`` over the square around each cell, or 0 where all weights are
    0. The square extends ``radius`` cells to each side.
    """
    total, weight = (_square_sum(v, radius) for v in (values * weights, weights))
    return (total / weight.clamp_min(0.5)).to(values)


def _square_sum(values: Tensor, radius: int) -> Tensor:
    """Return the sum of ``values`` over the square around each cell, in ``float64``, from differences of running sums.
    The square extends ``radius`` cells to each side.
    """
    total = values.double()
    for _ in range(2):
        # A difference of running sums is the sum of a window, whatever its size.
        running = F.pad(total, (0, 0, radius + 1, radius)).cumsum(0)
        total = (running[2 * radius + 1 :] - running[: -2 * radius - 1]).T
    return total


def _neighbour_features(xyz: Tensor, step: float) -> Tensor:
    """Return features of the heights and distances of each point's nearest neighbours in the horizontal plane, ``[p,
    n]``. They are shares, quantiles, deviations and slopes. ``step`` is the mean distance of the points in metres.
    """
    rise, distance = nearest_points(xyz, _NEIGHBOURS[-1], step)
    told = []
    for count in _NEIGHBOURS:
        part = rise[:, :count]
        ordered = part.sort(1).values
        told += [(part < -_STEP / 2).to(xyz).mean(1), -ordered[:, 0], ordered[:, count // 2], ordered[:, count // 4]]
        told.append(part.std(1))
    lower = torch.where(rise < -_STEP, distance, _MARGIN * step).amin(1)
    slope = (rise / distance.clamp_min(_STEP)).clamp(-9, 9)
    told += [lower / step, distance[:, 0] / step, distance[:, -1] / step, -slope.amin(1), slope.amax(1)]
    return torch.stack(told, 1)


def nearest_points(xyz: Tensor, count: int, step: float) -> tuple[Tensor, Tensor]:
    """Return the height differences (neighbour minus point) to the ``count`` nearest other points in the horizontal
    plane, and the horizontal distances to them. Both are ``[p, count]`` in metres. ``step`` is the mean distance of the
    points in metres.

    A neighbour that is farther away than five times ``step`` can be missed. It counts as a neighbour at that distance
    with the height difference 0.
    """
    rise, distance = xyz.new_zeros(len(xyz), count), xyz.new_full((len(xyz), count), _MARGIN * step)
    for rows, near in _square_blocks(xyz[:, :2], step):
        # The product form of ``cdist`` loses the digits of small distances.
        separation = torch.cdist(xyz[rows, :2], xyz[near, :2], compute_mode="donot_use_mm_for_euclid_dist")
        # A point is no neighbour of itself.
        separation.masked_fill_(rows[:, None] == near, torch.inf)
        reached = min(count, len(near) - 1)
        value, index = separation.topk(reached, largest=False)
        within = value < _MARGIN * step
        distance[rows, :reached] = torch.where(within, value, _MARGIN * step)
        rise[rows, :reached] = torch.where(within, xyz[near[index], 2] - xyz[rows, 2:], 0)
    return rise, distance


def _square_blocks(xy: Tensor, step: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of index tensors of the points ``xy``, which are divided into square blocks. The first tensor has at
    most 2,048 points of one block. The second has all points in that block and in the margin around it. All first
    tensors together contain each point once. ``step`` is the mean distance of the points in metres.
    """
    place = ((xy - xy.amin(0)) / (_BLOCK * step)).long()
    block = place[:, 0] * (int(place[:, 1].max()) + 1) + place[:, 1]
    order, (along, by_x) = block.argsort(stable=True), xy[:, 0].sort()
    sizes = block[order].unique_consecutive(return_counts=True)[1].tolist()
    for rows in order.split(sizes):
        low, high = xy[rows].amin(0) - _MARGIN * step, xy[rows].amax(0) + _MARGIN * step
        first, last = torch.searchsorted(along, torch.stack([low[0], high[0]])).tolist()
        near = by_x[first:last]
        near = near[(xy[near, 1] >= low[1]) & (xy[near, 1] <= high[1])]
        # Bounds the matrix of distances.
        for part in rows.split(2048):
            yield part, near
