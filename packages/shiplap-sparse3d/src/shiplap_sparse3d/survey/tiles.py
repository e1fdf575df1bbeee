"""Tiles of a survey: squares of cells, aligned to the network's stride, each predicted with a halo around it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shiplap.plugin_api import error
from shiplap_sparse3d.axes import Triple
from shiplap_sparse3d.survey.field import Field

_SMALLEST = 128  # cells: below that, a tile is mostly halo


@dataclass(frozen=True)
class CellExtent:
    """The cells that a survey covers, counted from coordinate 0, from ``low`` to ``high``, both inclusive."""

    low: Triple
    high: Triple


@dataclass(frozen=True)
class CellBox:
    """A part of the grid of cells: its first cell, and how many cells it has along each axis."""

    origin: Triple
    shape: Triple


@dataclass(frozen=True)
class Tiling:
    """The cut of the plane of cells into square tiles. :func:`tiling` makes it, and checks the sizes.

    Attributes:
        size: cells of a tile along x and y.
        halo: cells of other tiles that a tile sees on each side.
        origin: a corner of a tile, in cells.
        stride: the total stride of the network.
    """

    size: int
    halo: int
    origin: tuple[int, int]
    stride: Triple

    def whole(self, extent: CellExtent) -> CellBox:
        """Return the grid that contains all cells of ``extent`` (first and last cell of the survey), with its origin
        and shape rounded outwards to multiples of the stride.
        """
        # Strided layers group cells from the origin of the grid, so it has to be aligned.
        low = [lo // s * s for lo, s in zip(extent.low, self.stride, strict=True)]
        x, y, z = (-(-(high + 1 - lo) // s) * s for lo, high, s in zip(low, extent.high, self.stride, strict=True))
        return CellBox((low[0], low[1], low[2]), (x, y, z))

    def core(self, tile: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return ((first x, end x), (first y, end y)) of the cells of ``tile`` without its halo, the ends exclusive."""
        x, y = (start + index * self.size for start, index in zip(self.origin, tile, strict=True))
        return (x, x + self.size), (y, y + self.size)

    def grid(self, tile: tuple[int, int], extent: CellExtent) -> CellBox:
        """Return the grid (origin and shape in cells) on which ``tile`` is predicted: its core and its halo, as far as
        the survey extends.

        Beyond the survey there is nothing, for a tile as for the untiled survey, so layers meet the same border.
        """
        whole = self.whole(extent)
        origin, shape = list(whole.origin), list(whole.shape)
        for axis, (start, end) in enumerate(self.core(tile)):
            # Cut off at the border of the survey, where the untiled grid ends as well.
            first = max(whole.origin[axis], start - self.halo)
            last = min(whole.origin[axis] + whole.shape[axis], end + self.halo)
            origin[axis], shape[axis] = first, last - first
        return CellBox((origin[0], origin[1], origin[2]), (shape[0], shape[1], shape[2]))

    def around(self, tile: tuple[int, int], cells: int) -> list[tuple[int, int]]:
        """Return the indices (x, y) of all tiles that may have a cell within ``halo + cells`` cells of ``tile``, itself
        among them.
        """
        far = -(-(self.halo + cells) // self.size)
        return [(tile[0] + x, tile[1] + y) for x in range(-far, far + 1) for y in range(-far, far + 1)]


def tiling(field: Field, size: int | None = None, halo: int | None = None, origin: tuple[int, int] = (0, 0)) -> Tiling:
    """Return the tiling of a survey into squares on which the network gives the same values as on the untiled survey.

    All lengths are numbers of voxels, and must be multiples of the total stride of the network.

    Args:
        field: the receptive field of the network.
        size: the edge of a tile along x and y. The default is four halos, and at least 128.
        halo: the margin around a tile. It must cover the receptive field, which is also the default.
        origin: a corner of a tile, counted from coordinate 0.

    Raises:
        SurveyError: SL821 for a size, a halo or an origin that is not a multiple of the total stride, and for a halo
            that is too small.
    """
    # Tiles are square, so both strides have to divide their edge.
    step = math.lcm(field.stride[0], field.stride[1])
    least = -(-max(field.before[0], field.before[1], field.after[0], field.after[1]) // step) * step
    halo = least if halo is None else halo
    size = -(-max(4 * halo, _SMALLEST) // step) * step if size is None else size
    for name, value in (("tile", size), ("halo", halo), ("origin", origin[0]), ("origin", origin[1])):
        if value % step:
            raise error(
                "SL821",
                where=f"{name} of the survey",
                got=f"{value} cells",
                expected=f"a multiple of {step}, the network's total stride",
                fix=f"pass {-(-value // step) * step}",
            )
    if size < 1:
        raise error("SL821", where="tile of the survey", got=f"{size} cells", expected=f"{step} or more")
    if halo < least:
        raise error(
            "SL821",
            where="halo of the survey",
            got=f"{halo} cells",
            expected=f"{least} or more: the network sees {field.before} cells before and {field.after} behind a voxel",
        )
    return Tiling(size, halo, origin, field.stride)
