"""The classes of one tile: its points and those of its halo → features → voxels → the network → its own points.

Points are read as they are stored. All later steps are PyTorch, so that a GPU selects, sorts and counts the points
itself: on the host these steps took as long as a small network takes on the GPU. The device has three parts of the
work, so that a caller can begin the first for the next tile before the last has ended: ``prepare_tile``,
``run_network``, and :meth:`TileAnswer.wait_for_codes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap_sparse3d.axes import Triple
from shiplap_sparse3d.geometry import NOTHING, TableRecipe
from shiplap_sparse3d.survey.folder import POINT, SurveyFolder, Tile
from shiplap_sparse3d.survey.job import Grid, SurveyJob
from shiplap_sparse3d.survey.model import Points, SurveyModel, VoxelScene, point_features
from shiplap_sparse3d.survey.sorting import check_sum
from shiplap_sparse3d.survey.tiles import CellBox

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
    """The points of a tile and of all tiles that touch its halo, in pinned memory of the host."""

    rows: Tensor
    job: SurveyJob
    tile: Tile

    def to_question(self) -> TileQuestion:
        """Return the network's input for the tile: the points in its box and context, sorted and counted on the device
        of the network.
        """
        rows = self.rows.to(self.job.model.device, non_blocking=True)
        # The rows are those of whole tiles, of which the network needs a margin only.
        return question_of(self.job, self.tile, _cut_to_box(rows, self.job, self.tile))


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
        """Return all tensors of the tile, those of its convolution tables included, so that they can be handed to
        another stream.
        """
        scene = self.scene
        return [self.index, self.wanted, scene.voxels.feats, scene.feats, scene.inverse, *scene.voxels.geometry.tensors]


@dataclass(frozen=True)
class TileAnswer:
    """The classes of the points of a tile, which may still be on their way to the host.

    Attributes:
        best: ``int64 [c]``, which logit is the greatest.
        codes: the class code of each logit.
        arrived: when ``best`` is there, unless it is.
    """

    best: Tensor
    codes: tuple[int, ...]
    arrived: torch.cuda.Event | None

    def wait_for_codes(self) -> np.ndarray[Any, Any]:
        """Wait until a GPU has copied the classes to the host, and return their codes, ``uint8 [c]``, in the order of
        the file.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        return np.array(self.codes, np.uint8)[self.best.numpy()]


def read_tile(job: SurveyJob, tile: Tile) -> TileQuestion | TilePoints:
    """Return the network's input for ``tile`` or, on a GPU with the features of this package, only its points, from
    which the GPU makes that input.

    A GPU does so for :func:`point_features`. Features of the user's get tensors on the CPU.
    """
    # The user's features may do anything, such as call NumPy, so they get tensors of the CPU.
    if job.model.device.type == "cuda" and job.model.features is point_features:
        return TilePoints(read_points(job.folder, _slices_around(job, tile), pinned=True), job, tile)
    return question_of(job, tile, points_within(job, tile))


def prepare_tile(model: SurveyModel, read: TileQuestion | TilePoints, recipe: TableRecipe = NOTHING) -> PreparedTile:
    """Return the input of the network on its device: voxels, features, and the convolution tables that ``recipe`` lists
    (those that the tile before needed). ``read`` is the result of :func:`read_tile`.
    """
    with torch.inference_mode():
        question, device = read.to_question() if isinstance(read, TilePoints) else read, model.device
        scene = model.scene(question.cells.to(device), question.feats.to(device), question.grid)
        scene.voxels.geometry.build(recipe)
        return PreparedTile(question.index, question.wanted.to(device), scene)


def run_network(model: SurveyModel, of: PreparedTile) -> TileAnswer:
    """Run the network on a prepared tile and return the index of the greatest logit of each of its points. A GPU may
    still be at work on them: ``wait_for_codes`` waits.
    """
    best = _tile_logits(model, of).argmax(1)
    if not best.is_cuda:
        return TileAnswer(best, model.classes, None)
    stream = torch.cuda.current_stream(best.device)  # of its device, which need not be the current one
    # Into pinned memory, since a copy to other memory waits for the GPU.
    best = torch.empty(best.shape, dtype=best.dtype, pin_memory=True).copy_(best, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)  # the thread that waits for it sleeps
    arrived.record(stream)
    return TileAnswer(best, model.classes, arrived)


def _tile_logits(model: SurveyModel, of: PreparedTile) -> Tensor:
    """Return the logits ``[c, classes]`` of the points of the tile itself, without those of its halo, on the device of
    the network.
    """
    return model.logits(of.scene)[of.wanted]


def points_within(job: SurveyJob, tile: Tile) -> Tensor:
    """Return the stored points of ``tile``, its halo and its context, read slice by slice, so that points outside are
    not kept in memory.

    Shape: ``int32 [p, 6]``, as they lie on the disk.
    """
    slices = _slices_around(job, tile)
    parts = [_cut_to_box(read_points(job.folder, slices[i : i + 1]), job, tile) for i in range(len(slices))]
    return torch.cat(parts) if parts else torch.empty(0, _WORDS, dtype=torch.int32)


def _point_numbers(rows: Tensor) -> Tensor:
    """Return the numbers of stored points (``rows``, ``int32 [p, 6]``) in the input file, ``int64 [p]``."""
    return rows.view(torch.int64)[:, 0]


def _stored_coords(rows: Tensor) -> Tensor:
    """Return the coordinates of stored points (``rows``, ``int32 [p, 6]``) as the file has them, ``int32 [p, 3]``."""
    return rows[:, 2:5]


def points_of(rows: Tensor, grid: Grid) -> Points:
    """Return stored points (``rows``, ``int32 [p, 6]``) as the argument of the features function: coordinates in file
    units, intensity, return number and number of returns.
    """
    packed = rows[:, 5].long()
    xyz = torch.stack(grid.coordinates(_stored_coords(rows)), 1)
    return Points(xyz, packed & 0xFFFF, packed >> 16 & 0xFF, packed >> 24 & 0xFF)


def question_of(job: SurveyJob, tile: Tile, rows: Tensor) -> TileQuestion:
    """Return the network's input for ``tile`` from stored points (``rows``, ``int32 [p, 6]``) of the tile, its halo and
    its context, on their device and in the order of the file.
    """
    # Sums of floating-point features depend on the order, which must not depend on the tiles.
    rows = rows[_file_order(rows)]
    box, cells = job.tiling.grid(tile, job.points.extent), job.grid.places(_stored_coords(rows))
    feats = job.model.features_of(points_of(rows, job.grid))
    if job.model.context:  # features have seen the points around the box; the network does not
        inside = _cells_within(cells, box.origin, _box_end(box)).nonzero()[:, 0]
        rows, feats, cells = rows[inside], feats[inside], [axis[inside] for axis in cells]
    (left, right), (low, high) = job.tiling.core(tile)
    wanted = _cells_within(cells, (left, low), (right, high)).nonzero()[:, 0]
    local = torch.stack([axis - first for axis, first in zip(cells, box.origin, strict=True)], 1).int()
    return TileQuestion(_point_numbers(rows)[wanted], local, feats, box.shape, wanted)


def _file_order(rows: Tensor) -> Tensor:
    """Return the permutation ``int64 [p]`` that puts stored points into the order of the input file, so that sums over
    them are always the same.
    """
    if rows.device.type == "cpu":  # runs of ascending numbers, which numpy merges; torch takes four times as long
        return torch.from_numpy(np.argsort(_point_numbers(rows).numpy(), kind="stable"))
    return _point_numbers(rows).argsort()


def _context_cells(model: SurveyModel) -> int:
    """Return how many cells beyond the halo the features of a point may depend on: the model's context in cells,
    rounded up, or 0 without context.
    """
    # One cell more, because the context is measured from points and not from cells.
    return math.ceil(model.context / min(model.voxel[:2])) + 1 if model.context else 0


def _box_end(box: CellBox) -> Triple:
    """Return the first cell beyond ``box`` on each axis, that is its origin plus its shape."""
    x, y, z = (first + cells for first, cells in zip(box.origin, box.shape, strict=True))
    return x, y, z


def _slices_around(job: SurveyJob, tile: Tile) -> np.ndarray[Any, Any]:
    """Return the slices of the point table for ``tile`` and all tiles that its halo and context reach."""
    return job.points.of_tiles(job.tiling.around(tile, _context_cells(job.model)))


def read_points(folder: SurveyFolder, slices: np.ndarray[Any, Any], *, pinned: bool = False) -> Tensor:
    """Return the stored points of ``slices``, ``int32 [p, 6]``, read from the segment files, if ``pinned`` into
    page-locked memory. Python's lock is free while the system reads.

    Raises:
        SurveyError: SL824 for points that are not those that were sorted.
    """
    rows = torch.empty(int(slices["count"].sum()), _WORDS, dtype=torch.int32, pin_memory=pinned)
    words, first = rows.view(torch.int64).numpy(), 0
    for part in slices:
        some = words[first : first + int(part["count"])]
        memory, done = some.data.cast("B"), 0
        try:
            with folder.points_path(int(part["segment"])).open("rb", buffering=0) as file:
                file.seek(int(part["start"]) * POINT.itemsize)
                # Directly into pinned memory, without a copy in between.
                while done < len(memory) and (count := file.readinto(memory[done:])):
                    done += count
        except FileNotFoundError:
            done = -1
        if done != len(memory) or check_sum(some) != int(part["check"]):
            raise damaged_points(folder, int(part["segment"]))
        first += len(some)
    return rows


def damaged_points(folder: SurveyFolder, segment: int) -> ShiplapError:
    """Remove the mark of ``segment``, so that it is sorted again, and return the error SL824 for sorted points that
    have changed on the disk.
    """
    folder.sorted_mark_path(segment).unlink(missing_ok=True)
    where, expected = str(folder.points_path(segment)), "the points that were sorted"
    return error("SL824", where=where, what="the sorted points are damaged", got="other points", expected=expected)


def _cut_to_box(rows: Tensor, job: SurveyJob, tile: Tile) -> Tensor:
    """Return those of the stored points ``rows`` that lie in the box of ``tile`` (its core and halo) or in the context
    around it.
    """
    box, more = job.tiling.grid(tile, job.points.extent), _context_cells(job.model)
    low = [first - around for first, around in zip(box.origin, (more, more, 0), strict=True)]
    high = [end + around for end, around in zip(_box_end(box), (more, more, 0), strict=True)]
    return rows[_cells_within(job.grid.places(_stored_coords(rows)), low, high)]


def _cells_within(cells: list[Tensor], low: Sequence[int], high: Sequence[int]) -> Tensor:
    """Return ``bool [p]``: whether each point's cell is at or above ``low`` and below ``high`` on every axis. ``cells``
    has ``int64 [p]`` for each axis, and axes beyond the length of ``low`` are ignored.
    """
    masks = [(c >= first) & (c < end) for c, first, end in zip(cells, low, high, strict=False)]
    return functools.reduce(torch.logical_and, masks)
