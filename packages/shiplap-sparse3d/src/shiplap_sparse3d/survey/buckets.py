"""One pass over the input that sorts its points into a file for each tile. Memory does not grow with the input."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d.survey.cloud import open_cloud, read_chunks
from shiplap_sparse3d.survey.folder import POINT, SurveyFolder, Tile, read_mark, write_mark
from shiplap_sparse3d.survey.tiles import CellExtent, Tiling

if TYPE_CHECKING:
    import laspy

__all__ = ["Buckets", "Grid", "fill_buckets", "finished_buckets"]

_LARGEST = 2**31 - 1  # a cell, and a coordinate as the file stores it


@dataclass(frozen=True)
class Grid:
    """The conversion of stored coordinates to coordinates and cells.

    It gives the same numbers wherever a point is read.
    """

    scales: tuple[float, float, float]
    offsets: tuple[float, float, float]
    voxel: tuple[float, float, float]

    def xyz(self, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the coordinates of the file, ``float64 [p, 3]``."""
        xyz = np.empty((len(raw), 3))
        for axis, (scale, offset) in enumerate(zip(self.scales, self.offsets, strict=True)):
            xyz[:, axis] = raw[:, axis] * scale + offset  # numpy is four times slower on rows of three
        return xyz

    def coordinates(self, raw: Tensor) -> list[Tensor]:
        """Return ``float64 [p]`` for each axis: as :meth:`xyz`, of a tensor on any device."""
        axes = zip(raw.unbind(1), self.scales, self.offsets, strict=True)
        return [axis.double() * scale + offset for axis, scale, offset in axes]

    def places(self, raw: Tensor) -> list[Tensor]:
        """Return ``int64 [p]`` for each axis: as :meth:`cells`, of points whose cells can be counted."""
        axes = zip(self.coordinates(raw), self.voxel, strict=True)  # a GPU multiplies by the inverse of a plain number
        return [(axis / axis.new_full((), edge)).floor().long() for axis, edge in axes]

    def cells(self, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return ``int64 [p, 3]``: cells, counted from coordinate 0. Raises SL822 for coordinates without a cell."""
        cells = self.xyz(raw)
        for axis, edge in enumerate(self.voxel):
            cells[:, axis] = np.floor(cells[:, axis] / edge)
        # Also true for NaN, which compares as false.
        if not (np.abs(cells) < _LARGEST).all():
            where = "the input's scales and offsets"
            raise error(
                "SL822", where=where, got="a cell beyond 2^31", expected="coordinates that the voxels can count"
            )
        return cells.astype(np.int64)


@dataclass
class Buckets:
    """The points that have been sorted so far.

    Attributes:
        points: the number of points, the first ones of the file.
        sizes: points in each bucket.
        low, high: the cells that they cover.
    """

    points: int = 0
    sizes: dict[Tile, int] = field(default_factory=dict)
    low: list[int] = field(default_factory=lambda: [_LARGEST] * 3)
    high: list[int] = field(default_factory=lambda: [-_LARGEST] * 3)

    @property
    def tiles(self) -> list[Tile]:
        """Return the tiles that have points, in a fixed order."""
        return sorted(self.sizes)

    @property
    def extent(self) -> CellExtent:
        """Return the cells of the survey."""
        return CellExtent((self.low[0], self.low[1], self.low[2]), (self.high[0], self.high[1], self.high[2]))


def finished_buckets(folder: SurveyFolder, total: int) -> Buckets | None:
    """Return the buckets of a survey of ``total`` points if every point is in one, or None."""
    buckets = _marked_buckets(folder)
    return buckets if buckets is not None and buckets.points == total else None


def fill_buckets(
    folder: SurveyFolder, path: Path, grid: Grid, tiling: Tiling, chunk: int, progress: Callable[[int, int], None]
) -> Buckets:
    """Sort the points of ``path`` into buckets, from the place where an interrupted pass stopped.

    Raises:
        SurveyError: SL822 if the input cannot be read to its end.
    """
    buckets = _resume_buckets(folder)
    with open_cloud(path) as reader:
        total = reader.header.point_count
        progress(buckets.points, total)
        for points in read_chunks(reader, path, buckets.points, chunk):
            _sort_chunk(folder, buckets, points, grid, tiling)
            sizes = {f"{x}_{y}": size for (x, y), size in buckets.sizes.items()}
            state = {"points": buckets.points, "sizes": sizes, "low": buckets.low, "high": buckets.high}
            # The mark follows the buckets: points behind the last mark are cut off and sorted again.
            write_mark(folder.progress, state)
            progress(buckets.points, total)
    return buckets


def _sort_chunk(
    folder: SurveyFolder, buckets: Buckets, points: laspy.ScaleAwarePointRecord, grid: Grid, tiling: Tiling
) -> None:
    rows = np.empty(len(points), POINT)
    rows["index"] = np.arange(buckets.points, buckets.points + len(points))
    for axis, name in enumerate("XYZ"):
        rows["raw"][:, axis] = points[name]
    for name in ("intensity", "return_number", "number_of_returns"):
        rows[name] = points[name]
    cells = grid.cells(rows["raw"])
    tiles = (cells[:, :2] - np.array(tiling.origin)) // tiling.size
    order = np.lexsort((tiles[:, 1], tiles[:, 0]))  # stable: points of a bucket stay in the order of the file
    # Sorted by tile, so each tile is one slice.
    ends = np.flatnonzero(np.any(np.diff(tiles[order], axis=0), axis=1)) + 1
    folder.bucket_path((0, 0)).parent.mkdir(parents=True, exist_ok=True)
    for part in np.split(order, ends):
        tile = int(tiles[part[0], 0]), int(tiles[part[0], 1])
        with folder.bucket_path(tile).open("ab") as file:
            file.write(rows[part].tobytes())
        buckets.sizes[tile] = buckets.sizes.get(tile, 0) + len(part)
    buckets.points += len(points)
    buckets.low = np.minimum(buckets.low, cells.min(0)).tolist()
    buckets.high = np.maximum(buckets.high, cells.max(0)).tolist()


def _marked_buckets(folder: SurveyFolder) -> Buckets | None:
    """Return the buckets of the last mark, or None without a mark or for one of another form."""
    state = read_mark(folder.progress)
    try:
        return (
            None
            if state is None
            else Buckets(_point_count(state["points"]), _parse_tiles(state["sizes"]), *_extent_corners(state))
        )
    # Marks of another version, or edited by hand, mean a new start and no error.
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _point_count(value: Any) -> int:
    """Return a number of points. Raises TypeError or ValueError for anything else."""
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _extent_corners(state: dict[str, Any]) -> tuple[list[int], list[int]]:
    low, high = ([int(cell) for cell in state[name]] for name in ("low", "high"))
    if len(low) != 3 or len(high) != 3:
        raise ValueError(low, high)
    return low, high


def _parse_tiles(sizes: dict[str, Any]) -> dict[Tile, int]:
    """Convert ``{"3_-4": 10}`` to ``{(3, -4): 10}``."""
    return {_parse_tile(name): _point_count(size) for name, size in sizes.items()}


def _parse_tile(name: str) -> Tile:
    x, _, y = name.partition("_")
    return int(x), int(y)


def _resume_buckets(folder: SurveyFolder) -> Buckets:
    """Return the buckets as of the last mark, and cut off later writes. A lost bucket means a new start."""
    buckets = _marked_buckets(folder) or Buckets()
    wanted = {folder.bucket_path(tile) for tile in buckets.sizes}
    for path in (folder.path / "points").glob("*.bin"):
        if path not in wanted:
            path.unlink()
    for tile, size in buckets.sizes.items():
        path, length = folder.bucket_path(tile), size * POINT.itemsize
        # Points are missing that the mark counts, as after a loss of power.
        if not path.exists() or path.stat().st_size < length:
            folder.progress.unlink()
            return _resume_buckets(folder)
        os.truncate(path, length)
    return buckets
