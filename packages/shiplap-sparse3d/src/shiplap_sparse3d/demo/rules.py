"""Rules of two numbers on the same split, as a yardstick for the network on any scan.

There are two families of rules, each fitted on the training area by trying a grid of pairs. *Height over cell* calls a
point ground if it is less than ``h`` above the lowest point of its square cell of ``w`` metres. *Slope* calls it ground
if it is less than ``h + k d`` above the lowest point within ``d`` metres, for each of six distances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from shiplap_sparse3d.demo.result import FittedRule
from shiplap_sparse3d.demo.scan import Scan
from shiplap_sparse3d.demo.score import iou

__all__ = ["RADII", "best_rules", "lowest_within", "over_cell"]

RADII = (2.0, 4.0, 8.0, 16.0, 32.0, 48.0)  # metres

_CELLS = 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0  # metres
_HEIGHTS = 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0  # metres
_SLOPES = 0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0  # metres a metre
_FAR = 1e9  # metres, the height of a raster cell without points: above any terrain
_CELL = 2.0  # metres, raster of local minima


def over_cell(xyz: Tensor, width: float) -> Tensor:
    """Return the height of each point above the lowest point of its square cell, ``[p]`` in metres for points ``xyz [p,
    3]``. ``width`` is the edge of a cell in metres.
    """
    cell = (xyz[:, :2] / width).floor().long()
    cell -= cell.amin(0)
    flat = cell[:, 0] * (int(cell[:, 1].max()) + 1) + cell[:, 1]
    # Numbers of used cells, since most cells of a wide area are empty.
    _, inverse = flat.unique(return_inverse=True)
    lowest = xyz.new_full((int(inverse.max()) + 1,), _FAR).scatter_reduce(0, inverse, xyz[:, 2], "amin")
    return xyz[:, 2] - lowest[inverse]


def lowest_within(xyz: Tensor, radii: Sequence[float]) -> Tensor:
    """Return the height of each point above the lowest point within each of ``radii`` (metres), ``[p, len(radii)]`` in
    metres for points ``xyz [p, 3]``. It is measured on a raster of 2 m cells and is never negative.
    """
    cell = ((xyz[:, :2] - xyz[:, :2].amin(0)) / _CELL).long()
    width, height = (cell.amax(0) + 1).tolist()
    flat = cell[:, 0] * height + cell[:, 1]
    raster = xyz.new_full((width * height,), _FAR).scatter_reduce(0, flat, xyz[:, 2], "amin").view(1, 1, width, height)
    lowest = [_lowest_in_disc(raster, max(1, round(r / _CELL))).flatten()[flat] for r in radii]
    return xyz[:, 2:] - torch.stack(lowest, 1)


def _lowest_in_disc(raster: Tensor, radius: int) -> Tensor:
    """Return the minimum of ``raster`` (``[1, 1, x, y]``) over a disc of ``radius`` cells around each cell, in the same
    shape. Each row of the disc takes one pooling along x, whose result is shifted along y.
    """
    result = torch.full_like(raster, _FAR)
    height = raster.shape[-1]
    for row in range(min(radius, height - 1) + 1):
        # The disc is as wide as this at the distance ``row`` from its centre.
        half = math.isqrt(radius * radius - row * row)
        low = -F.max_pool2d(-raster, (2 * half + 1, 1), 1, (half, 0))
        above, below = result[..., row:], result[..., : height - row]
        torch.minimum(above, low[..., : height - row], out=above)
        torch.minimum(below, low[..., row:], out=below)
    return result


def best_rules(scan: Scan, held: Tensor) -> tuple[FittedRule, ...]:
    """Return the best rule of each of two families of rules that classify a point by its height. A rule is chosen on
    the points outside the mask ``held``. Its score is the intersection over union with the truth on the points inside
    the mask.
    """
    return tuple(
        _best_rule(name, tried, scan, held)
        for name, tried in (("height over cell", _cell_rules(scan.xyz)), ("slope", _slope_rules(scan.xyz)))
    )


def _best_rule(name: str, tried: Iterator[tuple[str, Tensor]], scan: Scan, held: Tensor) -> FittedRule:
    """Return the best rule of ``tried``, with its score on the points inside the mask ``held``. The best rule has the
    greatest intersection over union with the truth on the points outside the mask. ``name`` is the name of the family
    of rules.

    ``tried`` yields a description of each rule and the rule's prediction of ground, ``bool [p]``.
    """
    top = FittedRule(name, "", -1.0, 0.0)
    for text, ground in tried:
        fitted = iou(ground[~held], scan.ground[~held])
        if fitted > top.fitted:
            top = FittedRule(name, text, fitted, iou(ground[held], scan.ground[held]))
    return top


def _cell_rules(xyz: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a description and the prediction of ground, ``bool [p]``, of one rule for each pair of a width of cells and
    a height. A rule calls a point ground if it is less than the height above the lowest point of its cell.
    """
    for width in _CELLS:
        height = over_cell(xyz, width)
        for limit in _HEIGHTS:
            yield f"less than {limit:g} m above the lowest point of a {width:g} m cell", height < limit


def _slope_rules(xyz: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a description and the prediction of ground, ``bool [p]``, of one rule for each pair of a height and a
    slope.

    A rule compares the height of a point above the lowest point within each of several distances. The point is ground
    if this height is always less than the rule's height plus its slope times the distance.
    """
    height, distance = lowest_within(xyz, RADII), xyz.new_tensor(RADII)
    for limit, slope in product(_HEIGHTS, _SLOPES):
        text = f"less than {limit:g} m + {slope:g} d above the lowest point within d = {RADII[0]:g} to {RADII[-1]:g} m"
        yield text, (height < limit + slope * distance).all(1)
