"""The job of a survey, which all its tasks share, and the table of its sorted points."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d.geometry import NOTHING, TableRecipe
from shiplap_sparse3d.survey.folder import SurveyFolder, Tile
from shiplap_sparse3d.survey.model import SurveyModel
from shiplap_sparse3d.survey.tiles import CellExtent, Tiling

LARGEST = 2**31 - 1  # a cell, and a coordinate as the file stores it
SEGMENT = 250_000  # points that are sorted at a time: five chunks of a LAZ file

_SLICE = np.dtype([(name, "<i8") for name in ("x", "y", "segment", "start", "count", "check", "before")])
"""The points of one tile in one segment: where they begin in its file, how many they are, the sum of their words, and
how many points of the tile are in segments before it.
"""


@dataclass(frozen=True)
class Grid:
    """The conversion of stored coordinates to coordinates and cells.

    It gives the same numbers wherever a point is read.
    """

    scales: tuple[float, float, float]
    offsets: tuple[float, float, float]
    voxel: tuple[float, float, float]

    def xyz(self, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the coordinates of points in the units of the file, ``float64 [p, 3]``, from stored ones,
        ``int [p, 3]``.
        """
        xyz = np.empty((len(raw), 3))
        for axis, (scale, offset) in enumerate(zip(self.scales, self.offsets, strict=True)):
            xyz[:, axis] = raw[:, axis] * scale + offset  # numpy is four times slower on rows of three
        return xyz

    def coordinates(self, raw: Tensor) -> list[Tensor]:
        """Return ``float64 [p]`` coordinates for each of the three axes: those of :meth:`xyz`, for stored ones
        ``int [p, 3]`` in a tensor on any device.
        """
        axes = zip(raw.unbind(1), self.scales, self.offsets, strict=True)
        return [axis.double() * scale + offset for axis, scale, offset in axes]

    def places(self, raw: Tensor) -> list[Tensor]:
        """Return ``int64 [p]`` voxel indices for each of the three axes: those of :meth:`cells`, for stored coordinates
        in a tensor on any device that :meth:`cells` has accepted before.
        """
        axes = zip(self.coordinates(raw), self.voxel, strict=True)  # a GPU multiplies by the inverse of a plain number
        return [(axis / axis.new_full((), edge)).floor().long() for axis, edge in axes]

    def cells(self, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the voxel of each point, ``int64 [p, 3]``, counted from coordinate 0, from stored coordinates
        ``int [p, 3]``. Raises SL822 for coordinates that are not finite or too large to count.
        """
        cells = self.xyz(raw)
        for axis, edge in enumerate(self.voxel):
            cells[:, axis] = np.floor(cells[:, axis] / edge)
        # Also true for NaN, which compares as false.
        if not (np.abs(cells) < LARGEST).all():
            where, expected = "the input's scales and offsets", "coordinates that the voxels can count"
            raise error("SL822", where=where, got="a cell beyond 2^31", expected=expected)
        return cells.astype(np.int64)


@dataclass(frozen=True)
class SortedSegment:
    """The content of one sorted segment.

    Attributes:
        tiles: ``int64 [t, 4]``, in the order of the file: x and y of a tile, the number of its points, their check sum.
        low, high: the cells that the points cover.
    """

    tiles: np.ndarray[Any, Any]
    low: list[int]
    high: list[int]


@dataclass(frozen=True)
class PointTable:
    """The content of all sorted segments, by tile.

    Attributes:
        slices: sorted by tile, and those of a tile in the order of the input.
        extent: the cells of the survey.
    """

    slices: np.ndarray[Any, Any]
    extent: CellExtent

    @classmethod
    def from_segments(cls, segments: list[SortedSegment]) -> PointTable:
        """Return the table of ``segments``, whose list positions are their numbers: one slice for each tile and
        segment, and the cells that contain all points.
        """
        slices = np.zeros(sum(len(each.tiles) for each in segments), _SLICE)
        slices["segment"] = np.repeat(np.arange(len(segments)), [len(each.tiles) for each in segments])
        for column, name in enumerate(("x", "y", "count", "check")):
            slices[name] = np.concatenate([each.tiles[:, column] for each in segments])
        slices["start"] = np.concatenate([np.cumsum(each.tiles[:, 2]) - each.tiles[:, 2] for each in segments])
        # Within a tile by segment, which is the order of the input.
        slices = slices[np.lexsort((slices["segment"], slices["y"], slices["x"]))]
        before = np.cumsum(slices["count"]) - slices["count"]
        changed = (np.diff(slices["x"], prepend=slices["x"][0]) != 0) | (np.diff(slices["y"], prepend=0) != 0)
        # The differences do not show the first tile if its y is zero.
        changed[0] = True
        heads = np.flatnonzero(changed)
        slices["before"] = before - np.repeat(before[heads], np.diff(heads, append=len(slices)))
        (x, y, z), (u, v, w) = (np.array([s.low for s in segments]).min(0), np.array([s.high for s in segments]).max(0))
        return cls(slices, CellExtent((int(x), int(y), int(z)), (int(u), int(v), int(w))))

    @cached_property
    def _places(self) -> dict[Tile, tuple[int, int]]:
        """Return the slices of each tile as (first, end) in ``slices``, the end exclusive."""
        heads = np.flatnonzero(self.slices["before"] == 0)
        ends = np.append(heads[1:], len(self.slices))
        names = zip(self.slices["x"][heads].tolist(), self.slices["y"][heads].tolist(), strict=True)
        return dict(zip(names, zip(heads.tolist(), ends.tolist(), strict=True), strict=True))

    @property
    def tiles(self) -> list[Tile]:
        """Return the tiles that have points, as (x, y), in ascending order."""
        return list(self._places)

    def count(self, tile: Tile) -> int:
        """Return the number of points of ``tile`` in all segments."""
        return int(self.of_tiles([tile])["count"].sum())

    def of_tiles(self, tiles: list[Tile]) -> np.ndarray[Any, Any]:
        """Return the slices of all ``tiles``, one after the other. Tiles without points are skipped."""
        parts = [self.slices[slice(*self._places[tile])] for tile in tiles if tile in self._places]
        return np.concatenate(parts) if parts else self.slices[:0]

    def of_segment(self, number: int) -> np.ndarray[Any, Any]:
        """Return the slices of segment ``number`` (its points tile by tile, as rows of the table), sorted by tile."""
        return self.slices[self.slices["segment"] == number]


@dataclass
class NetworkState:
    """The state of the network of one process: tables that it needed last, its lock, and a stream for each thread."""

    recipe: TableRecipe = NOTHING
    lock: threading.Lock = field(default_factory=threading.Lock)
    here: threading.local = field(default_factory=threading.local)


@dataclass(frozen=True)
class SurveyJob:
    """The arguments that all tasks share.

    Attributes:
        table: the sorted points, when all of them are sorted.
    """

    model: SurveyModel
    source: Path
    folder: SurveyFolder
    grid: Grid
    tiling: Tiling
    total: int
    segment: int = SEGMENT
    table: PointTable | None = None

    @property
    def segments(self) -> range:
        """Return the numbers of the segments of the input, from 0. Each has ``segment`` points, the last one fewer."""
        return range(-(-self.total // self.segment))

    def segment_range(self, number: int) -> tuple[int, int]:
        """Return the number of the first point of segment ``number``, and how many points the segment has."""
        first = number * self.segment
        return first, min(self.segment, self.total - first)

    @property
    def points(self) -> PointTable:
        """Return the table of the sorted points. All segments must have been sorted."""
        assert self.table is not None
        return self.table

    @cached_property
    def network(self) -> NetworkState:
        """Return the state that the threads of this process share when they run the network, made at the first
        access.
        """
        return NetworkState()
