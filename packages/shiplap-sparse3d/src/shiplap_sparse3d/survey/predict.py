"""The classes of one tile: its points and those of its halo → features → voxels → the network → its own points.

Points are read as they are stored. All later steps are PyTorch, so that a GPU selects, sorts and counts the points
itself: on the host these steps took as long as a small network takes on the GPU. The device has three parts of the
work, so that a caller can begin the first for the next tile before the last has ended: ``prepare_tile``,
``run_network``, and :meth:`Answer.result`, which waits.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiplap_sparse3d.geometry import NOTHING, TableRecipe, Triple
from shiplap_sparse3d.survey.buckets import Buckets, Grid
from shiplap_sparse3d.survey.folder import POINT, RESULT, SurveyFolder, Tile
from shiplap_sparse3d.survey.model import Points, SurveyModel, VoxelScene, point_features
from shiplap_sparse3d.survey.tiles import CellBox, Tiling

__all__ = [
    "PreparedTile",
    "TileAnswer",
    "TilePoints",
    "TileQuestion",
    "points_of",
    "points_within",
    "predict_tile",
    "prepare_tile",
    "question_of",
    "read_tile",
    "run_network",
]

_BLOCK = 1 << 18  # points of a neighbouring bucket in memory at a time
_WORDS = POINT.itemsize // 4  # a point as int32: two of its number, three coordinates, intensity and returns


@dataclass(frozen=True)
class TileQuestion:
    """The input of the network for one tile.

    Attributes:
        index: ``int64 [c]``, the numbers in the file of the points of the tile.
        cells, feats: ``int32 [p, 3]`` and ``float32 [p, f]`` of these points and of those around them, in ``grid``.
        wanted: ``int64 [c]``, which of them are those of the tile.
    """

    index: Tensor
    cells: Tensor
    feats: Tensor
    grid: Triple
    wanted: Tensor


@dataclass(frozen=True)
class TilePoints:
    """The points of a tile and of all tiles that touch its halo, in pinned memory of the host, and the limits to cut
    them.
    """

    rows: Tensor
    grid: Grid
    tiling: Tiling
    tile: Tile
    box: CellBox

    def to_question(self, model: SurveyModel) -> TileQuestion:
        """Return the points within the limits, sorted and counted by the device of the network."""
        rows = self.rows.to(model.device, non_blocking=True)
        low, high = _box_limits(model, self.box)
        return question_of(model, self.grid, self.tiling, self.tile, self.box, _cut_to_box(rows, self.grid, low, high))


@dataclass(frozen=True)
class PreparedTile:
    """The input for one tile on the device of the network.

    Attributes:
        index, wanted: as those of the ``TileQuestion``.
        scene: the input of the network.
    """

    index: Tensor
    wanted: Tensor
    scene: VoxelScene

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors, those of tables included."""
        scene = self.scene
        return [self.index, self.wanted, scene.voxels.feats, scene.feats, scene.inverse, *scene.voxels.geometry.tensors]


@dataclass(frozen=True)
class TileAnswer:
    """The classes of the points of a tile, which may still be on their way to the host.

    Attributes:
        index: ``int64 [c]``, the numbers of the points in the file.
        best: ``int64 [c]``, which logit is the greatest.
        codes: the class code of each logit.
        arrived: when ``index`` and ``best`` are there, unless they are.
    """

    index: Tensor
    best: Tensor
    codes: tuple[int, ...]
    arrived: torch.cuda.Event | None

    def wait_for_result(self) -> np.ndarray[Any, Any]:
        """Wait for the classes and return them: ``[c]`` of :data:`RESULT`."""
        if self.arrived is not None:
            self.arrived.synchronize()
        result = np.empty(len(self.index), RESULT)
        result["index"] = self.index.numpy()
        result["code"] = np.array(self.codes, np.uint8)[self.best.numpy()]
        return result


def read_tile(
    model: SurveyModel, folder: SurveyFolder, buckets: Buckets, grid: Grid, tiling: Tiling, tile: Tile
) -> TileQuestion | TilePoints:
    """Return the network's input for ``tile``, or the points of which a GPU makes that input.

    A GPU does so for :func:`point_features`. The user's features are made of tensors of the CPU.
    """
    box = tiling.grid(tile, buckets.extent)
    # The user's features may do anything, such as call NumPy, so they get tensors of the CPU.
    if model.device.type == "cuda" and model.features is point_features:
        paths = _bucket_paths(model, folder, buckets, tiling, tile)
        return TilePoints(_read_whole(paths, pinned=True), grid, tiling, tile, box)
    rows = points_within(model, folder, buckets, grid, tiling, tile, box)
    return question_of(model, grid, tiling, tile, box, rows)


def predict_tile(model: SurveyModel, read: TileQuestion | TilePoints) -> np.ndarray[Any, Any]:
    """Return the classes of the points of a tile, by their number in the file: ``[c]`` of :data:`RESULT`."""
    return run_network(model, prepare_tile(model, read)).wait_for_result()


def prepare_tile(model: SurveyModel, read: TileQuestion | TilePoints, recipe: TableRecipe = NOTHING) -> PreparedTile:
    """Return the points of a tile on the device of the network, with voxels and the tables of ``recipe``."""
    with torch.inference_mode():
        question, device = read.to_question(model) if isinstance(read, TilePoints) else read, model.device
        scene = model.scene(question.cells.to(device), question.feats.to(device), question.grid)
        scene.voxels.geometry.build(recipe)
        return PreparedTile(question.index, question.wanted.to(device), scene)


def run_network(model: SurveyModel, of: PreparedTile) -> TileAnswer:
    """Run the network and return its answer, on which a GPU may still be working."""
    best = _tile_logits(model, of).argmax(1)
    if not best.is_cuda:
        return TileAnswer(of.index, best, model.classes, None)
    stream = torch.cuda.current_stream(best.device)  # of its device, which need not be the current one
    index, best = _to_host(of.index), _to_host(best)
    arrived = torch.cuda.Event(blocking=True)  # whoever waits for it sleeps
    arrived.record(stream)
    return TileAnswer(index, best, model.classes, arrived)


def _tile_logits(model: SurveyModel, of: PreparedTile) -> Tensor:
    """Return the logits of the points of the tile, on the device of the network."""
    return model.logits(of.scene)[of.wanted]


def _to_host(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, without waiting for it."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def points_within(
    model: SurveyModel, folder: SurveyFolder, buckets: Buckets, grid: Grid, tiling: Tiling, tile: Tile, box: CellBox
) -> Tensor:
    """Return the points of ``box`` and of the context around it, tile by tile, without keeping the others in memory.

    Shape: ``int32 [p, 6]``, as they lie on the disk.
    """
    low, high = _box_limits(model, box)
    parts = [
        _cut_to_box(rows, grid, low, high) for rows in _read_blocks(_bucket_paths(model, folder, buckets, tiling, tile))
    ]
    return torch.cat(parts) if parts else torch.empty(0, _WORDS, dtype=torch.int32)


def _point_numbers(rows: Tensor) -> Tensor:
    """Return the numbers of points in the file, ``int64 [p]``."""
    return rows.view(torch.int64)[:, 0]


def _stored_coords(rows: Tensor) -> Tensor:
    """Return the stored coordinates of points, ``int32 [p, 3]``."""
    return rows[:, 2:5]


def points_of(rows: Tensor, grid: Grid) -> Points:
    """Return the points as the input of features."""
    packed = rows[:, 5].long()
    xyz = torch.stack(grid.coordinates(_stored_coords(rows)), 1)
    return Points(xyz, packed & 0xFFFF, packed >> 16 & 0xFF, packed >> 24 & 0xFF)


def question_of(model: SurveyModel, grid: Grid, tiling: Tiling, tile: Tile, box: CellBox, rows: Tensor) -> TileQuestion:
    """Return the network's input from points of ``box`` and of the context around it, on their device."""
    # Sums of floating-point features depend on the order, which must not depend on the tiles.
    rows = rows[_file_order(rows)]
    cells = grid.places(_stored_coords(rows))
    feats = model.features_of(points_of(rows, grid))
    if model.context:  # features have seen the points around the box; the network does not
        inside = _cells_within(cells, box.origin, _box_end(box)).nonzero()[:, 0]
        rows, feats, cells = rows[inside], feats[inside], [axis[inside] for axis in cells]
    (left, right), (low, high) = tiling.core(tile)
    wanted = _cells_within(cells, (left, low), (right, high)).nonzero()[:, 0]
    local = torch.stack([axis - first for axis, first in zip(cells, box.origin, strict=True)], 1).int()
    return TileQuestion(_point_numbers(rows)[wanted], local, feats, box.shape, wanted)


def _file_order(rows: Tensor) -> Tensor:
    """Return the order of the file, ``int64 [p]``, so that sums are always the same."""
    if rows.device.type == "cpu":  # runs of ascending numbers, which numpy merges; torch takes four times as long
        return torch.from_numpy(np.argsort(_point_numbers(rows).numpy(), kind="stable"))
    return _point_numbers(rows).argsort()


def _box_limits(model: SurveyModel, box: CellBox) -> tuple[list[int], list[int]]:
    """Return first and last cells of ``box`` and of the context around it, the last ones exclusive."""
    around = _context_cells(model), _context_cells(model), 0
    low = [first - more for first, more in zip(box.origin, around, strict=True)]
    return low, [end + more for end, more in zip(_box_end(box), around, strict=True)]


def _context_cells(model: SurveyModel) -> int:
    # One cell more, because the context is measured from points and not from cells.
    return math.ceil(model.context / min(model.voxel[:2])) + 1 if model.context else 0


def _box_end(box: CellBox) -> Triple:
    x, y, z = (first + cells for first, cells in zip(box.origin, box.shape, strict=True))
    return x, y, z


def _bucket_paths(model: SurveyModel, folder: SurveyFolder, buckets: Buckets, tiling: Tiling, tile: Tile) -> list[Path]:
    return [folder.bucket_path(other) for other in tiling.around(tile, _context_cells(model)) if other in buckets.sizes]


def _read_whole(paths: list[Path], *, pinned: bool) -> Tensor:
    """Return all points of ``paths``, ``int32 [p, 6]``. Python's lock is free while the system reads."""
    sizes = [path.stat().st_size // POINT.itemsize for path in paths]
    rows = torch.empty(sum(sizes), _WORDS, dtype=torch.int32, pin_memory=pinned)
    start, memory = 0, rows.view(torch.uint8).flatten().numpy().data
    for path, size in zip(paths, sizes, strict=True):
        end = start + size * POINT.itemsize
        with path.open("rb", buffering=0) as file:
            while start < end:
                # Directly into pinned memory, without a copy in between.
                count = file.readinto(memory[start:end])
                if not count:
                    raise OSError(5, os.strerror(5), str(path))  # it has become shorter meanwhile
                start += count
    return rows


def _read_blocks(paths: list[Path]) -> Iterator[Tensor]:
    """Yield the points of ``paths``, ``int32 [n, 6]``, some of them at a time."""
    for path in paths:
        with path.open("rb") as file:
            while len(block := np.fromfile(file, POINT, _BLOCK)):
                yield torch.from_numpy(block.view(np.int32).reshape(-1, _WORDS))


def _cut_to_box(rows: Tensor, grid: Grid, low: list[int], high: list[int]) -> Tensor:
    return rows[_cells_within(grid.places(_stored_coords(rows)), low, high)]


def _cells_within(cells: list[Tensor], low: Sequence[int], high: Sequence[int]) -> Tensor:
    """Return ``bool [p]``: which cells are at or above ``low`` and below ``high`` on each of their axes."""
    masks = [(c >= first) & (c < end) for c, first, end in zip(cells, low, high, strict=False)]
    return functools.reduce(torch.logical_and, masks)
