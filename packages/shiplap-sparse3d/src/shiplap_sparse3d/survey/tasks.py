"""The job of a survey, its tasks (sort a segment, predict a tile, merge the classes of a segment), and the engine that
runs them in this process; :mod:`.cluster` has the one for Dask.

The points of the input are sorted by tile: a file for each segment of the input, with a table of what is in it. Each
segment is sorted by itself, so that workers sort in parallel and memory does not grow with the input.

A tile goes from its points and those of its halo to features, voxels, the network, and the classes of its own points.
Points are read as they are stored. All later steps are PyTorch, so that a GPU selects, sorts and counts the points
itself: on the host these steps took as long as a small network takes on the GPU.

Each task is a function of the job and a small value. A task may run twice, in any process, at any time: all its results
are files that are written whole, with the same bytes each time.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from shiplap.plugin_api.files import write_whole
from shiplap_sparse3d.axes import Triple
from shiplap_sparse3d.beside import hand_over
from shiplap_sparse3d.errors import survey_error
from shiplap_sparse3d.geometry import NOTHING
from shiplap_sparse3d.modes import evaluation_mode
from shiplap_sparse3d.survey.cloud import open_cloud, read_chunks
from shiplap_sparse3d.survey.field import MOST_SCENES, CellBox, Cells, Tile, Tiling, takes_batches
from shiplap_sparse3d.survey.folder import SurveyFolder, open_or_empty, with_digest, without_digest
from shiplap_sparse3d.survey.model import Points, SurveyModel, point_features

Item = TypeVar("Item")
Result = TypeVar("Result")

SEGMENT = 250_000  # points that are sorted at a time: five chunks of a LAZ file
THREADS = 3  # for a GPU: one launches the network, one prepares its next input, and one waits or writes classes
LOOK = 1.0  # seconds between looks at the state of the workers

# Points of the tiles, with their halos, that a network on such a device predicts at a time. With 0 it is one tile.
TOGETHER = {"cpu": 0, "cuda": 1 << 19}
_PART = {"cpu": 16, "cuda": 22}  # of the bits of a number: so many points are selected at a time

_COMPUTING = ("torch", "shiplap", "shiplap-sparse3d")  # whose versions decide the last bits of logits
_PACKAGES = (*_COMPUTING, "numpy", "distributed", "laspy", "lazrs")

# A sorted point: its number in the file, its stored coordinates, what features are made of, and its class there.
# ``returns`` holds the number of the return in its four lower bits, and the number of returns in the upper ones.
POINT = np.dtype([("index", "<i8"), ("raw", "<i4", 3), ("intensity", "<u2"), ("returns", "u1"), ("code", "u1")])

# The points of one tile in one segment: where they begin in its file, how many they are, how many points of the tile
# are in segments before it, and the sum of their words.
SLICE = np.dtype([*((name, "<i4") for name in ("x", "y", "segment", "start", "count", "before")), ("check", "<i8")])

# The table of one sorted segment, a ``SLICE`` for each tile, and the first and last cell of its points.
SortedSegment = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@dataclass(frozen=True)
class SurveyJob:
    """The arguments that all tasks of a survey share, and the table of its sorted points.

    Attributes:
        scales, offsets: the input's factor and summand for each axis, which turn stored numbers into coordinates.
        tiling, total, segment: the tiles, the number of points of the input, and the number of points of a segment.
        together: the number of points of a group of tiles and their halos, which the network predicts at once. A tile
            with more points is a group of its own.
        slices: the table of the sorted points, an array of ``SLICE`` sorted by tile and then in the order of the input.
            It is None until all points are sorted.
        extent: the box of the survey's cells, or None until all points are sorted.
    """

    model: SurveyModel
    source: Path
    folder: SurveyFolder
    scales: tuple[float, ...]
    offsets: tuple[float, ...]
    tiling: Tiling
    total: int
    segment: int = SEGMENT
    together: int = 0
    slices: Any = None  # a SLICE for each tile of each segment
    extent: Any = None  # a CellBox

    @cached_property
    def segments(self) -> dict[int, range]:
        """The numbers of the points of each segment of the input, by the number of the segment from 0. Each has
        ``segment`` successive points, and the last one may have fewer.
        """
        firsts = range(0, self.total, self.segment)
        return {number: range(first, min(first + self.segment, self.total)) for number, first in enumerate(firsts)}

    def coordinates(self, rows: Tensor) -> Tensor:
        """Return the coordinates of the points ``rows`` (``int32 [p, 6]``, as the folder stores them) in units of the
        input file, as ``float64 [3, p]``.
        """
        scales, offsets = on_device([self.scales, self.offsets], rows.device)[..., None]
        return rows[:, 2:5].t().to(torch.float64, memory_format=torch.contiguous_format) * scales + offsets

    def cells(self, rows: Tensor) -> Tensor:
        """Return the cells of the points ``rows`` (``int32 [p, 6]``, as the folder stores them). Cells have the edges
        ``model.voxel``, and cell 0 begins at coordinate 0. The result is ``float64 [3, p]``, whole numbers.
        """
        # A GPU divides by a tensor, but would multiply by the inverse of a plain number.
        return (self.coordinates(rows) / on_device(self.model.voxel, rows.device)[:, None]).floor()

    def with_points(self, segments: Sequence[SortedSegment]) -> SurveyJob:
        """Return this job with the table and the extent of all points. ``segments`` are the results of
        :func:`sort_segment` for all segments of the input.
        """
        slices = np.concatenate([table for table, _ in segments])
        slices = slices[np.lexsort((slices["segment"], slices["y"], slices["x"]))]
        heads = np.unique(slices[["x", "y"]], return_index=True)[1]
        before = np.cumsum(slices["count"], dtype=np.int64) - slices["count"]
        slices["before"] = before - np.repeat(before[heads], np.diff(heads, append=len(slices)))
        low, high = np.array([extent for _, extent in segments]).swapaxes(0, 1)
        return replace(self, slices=slices, extent=CellBox(low.min(0), high.max(0) + 1))

    @cached_property
    def _slices_of(self) -> dict[Tile, np.ndarray[Any, Any]]:
        """The elements of ``slices`` that belong to each tile, by tile."""
        heads = np.flatnonzero(self.slices["before"] == 0)
        return dict(zip(self.slices[["x", "y"]][heads].tolist(), np.split(self.slices, heads[1:]), strict=True))

    @property
    def tiles(self) -> list[Tile]:
        """The tiles that have points, as (x, y), in ascending order."""
        return list(self._slices_of)

    @cached_property
    def groups(self) -> dict[Tile, list[Tile]]:
        """The tiles that the network predicts at once, by the first of them. They have grids of equal shape, and are
        the scenes of one batch, at most ``MOST_SCENES``. The groups do not depend on the workers or on what is done.
        """
        groups, total, shape = dict[Tile, list[Tile]](), 0.0, cast(Any, None)
        shapes = {tile: self.tiling.grid(tile, self.extent).shape for tile in self.tiles}
        for tile in sorted(shapes, key=lambda each: (shapes[each], each)):  # neighbours, which share halos
            points = max(self._expected_points(tile), self.together / MOST_SCENES)  # a scene counts at least one share
            if shapes[tile] != shape or total + points > self.together:
                first, shape, total = tile, shapes[tile], 0.0
            total += points
            groups.setdefault(first, []).append(tile)
        return groups

    def _expected_points(self, tile: Tile) -> float:
        """Return about how many points the network gets for ``tile`` and its halo (the margin that it reads), if the
        points of each tile around are spread evenly.
        """
        ends, around = self.tiling.grid(tile, self.extent), self.tiling.around(tile, 0)
        cores = np.array([self.tiling.core(each) for each in around]).clip(*(end[:2] for end in self.extent))
        shares = np.diff(cores.clip(*(end[:2] for end in ends)), axis=1) / np.diff(cores, axis=1).clip(1)
        return float(shares.prod((1, 2)) @ [self.count(each) if each in self._slices_of else 0 for each in around])

    def count(self, tile: Tile) -> int:
        """Return the number of points of ``tile`` in all segments."""
        return int(self._slices_of[tile]["count"].sum())

    @property
    def network(self) -> SimpleNamespace:
        """The objects that the threads of this process share when they run the network. ``recipe`` describes the
        neighbour tables that it needed last, and ``lock`` is held while it runs. ``beside`` is the CUDA stream that
        prepares its input, or None on the CPU.
        """
        beside = torch.cuda.Stream(self.model.device, priority=-1) if self.model.device.type == "cuda" else None
        made = SimpleNamespace(recipe=NOTHING, lock=threading.Lock(), beside=beside)
        # One for all threads: from Python 3.12 on, two threads may compute a ``cached_property`` at the same time.
        return cast(SimpleNamespace, vars(self).setdefault("_network", made))


def points_of(job: SurveyJob, rows: Tensor) -> Points:
    """Return the points ``rows`` (``int32 [p, 6]``, as the folder stores them) as :class:`Points`, the argument of the
    function ``features`` of a model. They have the coordinates in units of the input file, the intensity, the return
    number and the number of returns.
    """
    packed, xyz = rows[:, 5].long(), job.coordinates(rows).t().contiguous()
    return Points(xyz, packed & 0xFFFF, packed >> 16 & 0xF, packed >> 20 & 0xF)


def point_numbers(rows: Tensor) -> Tensor:
    """Return the numbers in the input file of the points ``rows`` (``int32 [p, 6]``, as the folder stores them), as
    ``int64 [p]``.
    """
    return rows.view(torch.int64)[:, 0]


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """Return ``numbers``, an array or nested lists, as a tensor ``float64`` on ``device``."""
    made = torch.from_numpy(np.array(numbers, np.float64))
    # From pinned memory, so that the thread does not wait for the GPU.
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def cells_within(cells: Tensor, boxes: Sequence[tuple[Cells, Cells]]) -> Tensor:
    """Return a mask ``bool [boxes, p]`` of the points whose cell is in each of ``boxes`` along x and y. A box is the
    first cell and the cell behind the last, and ``cells`` is ``float64 [3, p]``.
    """
    low, high = on_device([[end[:2] for end in box] for box in boxes], cells.device)[..., None].unbind(1)
    return reduce(torch.logical_and, ((cells[:2] >= low) & (cells[:2] < high)).unbind(1))


def sort_segment(job: SurveyJob, number: int) -> SortedSegment:
    """Read segment ``number`` of the input (a run of successive points), sort its points by tile, and write them with
    their table to the folder. Return the table, a ``SLICE`` for each tile that has points, and the first and last cell
    of the points as ``int64 [2, 3]``.

    Raise ``SL822`` if the input cannot be read, and for a cell number beyond 2^31.
    """
    rows, done = np.empty(len(numbers := job.segments[number]), POINT), 0
    rows["index"] = numbers
    with open_cloud(job.source) as reader:
        for points in read_chunks(reader, job.source, numbers.start, numbers.stop):
            part = rows[done : (done := done + len(points))]
            part["raw"] = np.column_stack([points.X, points.Y, points.Z])
            part["returns"] = np.asarray(points["return_number"]) | np.asarray(points["number_of_returns"]) << 4
            part["intensity"], part["code"] = points["intensity"], points["classification"]
    cells = job.cells(torch.from_numpy(rows.view(np.int32).reshape(-1, 6))).t().contiguous().numpy()
    if not (np.abs(cells) < 2**31 - 1).all():  # also for NaN, which compares as false
        raise survey_error("SL822", "the input's scales and offsets", "a cell beyond 2^31", "cells that can be counted")
    extent = np.array([cells.min(0), cells.max(0)], np.int64)
    tiles = (cells[:, :2].astype(np.int64) - np.array(job.tiling.origin)) // job.tiling.size
    order = np.lexsort((tiles[:, 1], tiles[:, 0]))  # stable: points of a tile stay in the order of the file
    rows, tiles = rows[order], tiles[order]
    heads = np.flatnonzero(np.diff(tiles, axis=0, prepend=tiles[:1] - 1).any(1))  # the first row of each tile
    table = np.zeros(len(heads), SLICE)
    table["x"], table["y"] = tiles[heads].T
    table["segment"], table["start"], table["count"] = number, heads, np.diff(heads, append=len(rows))
    table["check"] = np.add.reduceat(rows.view("<i8").reshape(-1, 3).sum(1), heads)
    tail = with_digest(extent.tobytes() + table.tobytes())
    write_whole(job.folder.points_path(number), rows.tobytes() + tail, lasting=False)
    return table, extent


def read_segment(job: SurveyJob, number: int) -> SortedSegment | None:
    """Return what :func:`sort_segment` has written for segment ``number`` of the input, its table and its first and
    last cell. Return None unless the segment is completely sorted.

    The points themselves are checked only when they are read.
    """
    with open_or_empty(job.folder.points_path(number)) as file:
        file.seek(len(job.segments[number]) * POINT.itemsize)
        content = without_digest(file.read())
    return (np.frombuffer(content[48:], SLICE), np.frombuffer(content[:48], "<i8").reshape(2, 3)) if content else None


def read_points(folder: SurveyFolder, slices: np.ndarray[Any, Any], *, pinned: bool = False) -> Tensor:
    """Return the points of ``slices``, ``int32 [p, 6]`` as the folder stores them. Each element of ``slices`` is a
    ``SLICE``, which describes the points of one tile in one segment (a run of successive points of the input). If
    ``pinned`` is true, the result is in page-locked memory. Python's lock is free while the system reads.

    Raise ``SL824`` for points that are not those that were sorted.
    """
    rows = torch.empty(int(slices["count"].sum()), POINT.itemsize // 4, dtype=torch.int32, pin_memory=pinned)
    words, firsts = rows.view(torch.int64).numpy().ravel(), np.append(0, np.cumsum(slices["count"], dtype=np.int64)) * 3
    # Slices that follow each other in a file are read at once: whoever waits for the lock is delayed less often.
    follows = np.append(-1, (slices["start"] + slices["count"])[:-1]) == slices["start"]
    heads = np.flatnonzero(~follows | (np.diff(slices["segment"], prepend=-1) != 0))
    right = np.empty(len(slices), bool)
    for head, end in zip(heads, np.append(heads[1:], len(slices)), strict=True):
        some = words[firsts[head] : firsts[end]]
        with open_or_empty(folder.points_path(int(slices["segment"][head]))) as file:
            file.seek(int(slices["start"][head]) * POINT.itemsize)
            right[head:end] = file.readinto(some.data.cast("B")) == some.nbytes
    right &= np.add.reduceat(words, firsts[:-1]) == slices["check"]
    for segment in slices["segment"][~right][:1]:
        (path := folder.points_path(int(segment))).unlink(missing_ok=True)
        raise survey_error("SL824", path, "other points", "the sorted ones", "", "the sorted points are damaged")
    return rows


class TileQuestion(NamedTuple):
    """The input of the network for some tiles and the margins (halos) around them. Each tile is a scene.

    Attributes:
        own: ``int32 [c, 6]``, the points of the tiles as the folder stores them, tile after tile.
        cells: ``int32 [p, 4]``, the scenes and the cells in ``grid`` of the points of the tiles and their halos.
        feats: ``float32 [p, f]``, the features of these points.
        grid: the number of cells along each axis.
        wanted: ``int64 [c]``, the indices into ``cells`` of the points of the tiles.
    """

    own: Tensor
    cells: Tensor
    feats: Tensor
    grid: Triple
    wanted: Tensor


def points_within(job: SurveyJob, tiles: Sequence[Tile], device: torch.device) -> Tensor:
    """Return the points of ``tiles``, their halos and their contexts, and of what is between them, ``int32 [p, 6]`` as
    the folder stores them, in the order of the input and on ``device``. The halo is the margin that the network reads,
    and the context is the further margin in which ``features`` of the model looks for other points.

    The points of all tiles around are read in several parts, from which ``device`` selects those within the margins.
    """
    # One cell more, because the context is measured from points and not from cells.
    context = math.ceil(job.model.context / min(job.model.voxel[:2])) + 1 if job.model.context else 0
    low, high = zip(*(job.tiling.grid(tile, job.extent) for tile in tiles), strict=True)
    within = np.min(low, 0) - context, np.max(high, 0) + context
    around = {each for tile in tiles for each in job.tiling.around(tile, context)} & job._slices_of.keys()
    slices, parts = np.concatenate([job._slices_of[each] for each in around]), []
    slices = slices[np.lexsort((slices["start"], slices["segment"]))]  # as they are stored
    part = np.cumsum(slices["count"], dtype=np.int64) >> _PART[device.type]
    for some in np.split(slices, np.flatnonzero(np.diff(part)) + 1):
        rows = read_points(job.folder, some, pinned=device.type == "cuda").to(device, non_blocking=True)
        parts.append(rows[cells_within(job.cells(rows), [within])[0]])
    rows = torch.cat(parts)
    if rows.device.type == "cpu":  # runs of ascending numbers, which numpy merges; torch takes four times as long
        return rows[torch.from_numpy(np.argsort(point_numbers(rows).numpy(), kind="stable"))]
    return rows[point_numbers(rows).argsort()]


def question_of(job: SurveyJob, tiles: Sequence[Tile], device: torch.device) -> TileQuestion:
    """Return the input of the network for ``tiles``, whose grids have equal shapes, and the margins (halos) around
    them, computed on ``device``.
    """
    # Sums of floating-point features depend on the order, which must not depend on the tiles.
    rows = points_within(job, tiles, device)
    boxes, cells = [job.tiling.grid(tile, job.extent) for tile in tiles], job.cells(rows)
    feats = job.model.features_of(points_of(job, rows))  # they see points around a box, which the network does not
    scenes, points = cells_within(cells, boxes).nonzero().unbind(1)
    wanted = cells_within(cells, [job.tiling.core(tile) for tile in tiles])[scenes, points].nonzero()[:, 0]
    local = cells.t()[points] - on_device([box.low for box in boxes], device)[scenes]
    local = torch.cat([scenes[:, None], local], 1).int()
    return TileQuestion(rows[points[wanted]], local, feats[points], boxes[0].shape, wanted)


def predict_codes(job: SurveyJob, tiles: Sequence[Tile]) -> np.ndarray[Any, Any]:
    """Return the predicted class codes of the points of ``tiles``, ``uint8 [c]``, tile after tile and in the order of
    the input.

    Several threads may call this function at the same time. They read and prepare tiles in parallel, and run the
    network one after the other. On a GPU another CUDA stream, of high priority, sorts points into voxels, and builds
    the neighbour tables that the network needed before. The GPU then has work while a thread waits for the size of a
    table.
    """
    model, device, state = job.model, job.model.device, job.network
    if gpu := device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread: the network may make tensors there
    # ``torch.cuda.stream(None)`` would begin to use a GPU, of which a network on the CPU needs nothing.
    with torch.inference_mode(), torch.cuda.stream(state.beside) if gpu else contextlib.nullcontext():
        # The user's features may do anything, such as call NumPy, so they get tensors of the CPU.
        question = question_of(job, tiles, device if model.features is point_features else torch.device("cpu"))
        scene = model.scene(question.cells.to(device), question.feats.to(device), question.grid, len(tiles))
        scene.voxels.geometry.build(state.recipe)
        wanted = question.wanted.to(device)
    # Before the lock: while this thread waits, others give that stream further work.
    ready = state.beside.record_event() if gpu else None
    # A captured graph of the user's has one memory, so networks run one after the other.
    with state.lock, evaluation_mode(model.net), torch.inference_mode():
        if ready is not None:
            made = [wanted, scene.voxels.feats, scene.feats, scene.inverse, *scene.voxels.geometry.tensors]
            hand_over(made, ready, torch.cuda.current_stream(device))
        best = model.answer(scene)[wanted].argmax(1).to("cpu", non_blocking=True)
        if gpu:
            state.recipe = scene.voxels.geometry.recipe
            # Of its device, which need not be the current one. The thread that waits for the event sleeps.
            arrived = torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True))
    if gpu:
        arrived.synchronize()
    return np.array(model.classes, np.uint8)[best.numpy()]


def installed_versions() -> dict[str, str]:
    """Return the installed version, by name, of Python and of each package in which the client and all workers must
    agree. Local parts of a version, such as ``+cpu``, are left out, and so are packages that are not installed.
    """
    packages = {name: of.version.partition("+")[0] for name in _PACKAGES for of in [*distributions(name=name)][:1]}
    return {"Python": f"{sys.version_info.major}.{sys.version_info.minor}", **packages}


def choose_arithmetic(job: SurveyJob, known: int | None) -> dict[str, Any]:
    """Return the settings that decide the last bits of logits, for the network in this process, as a dict that JSON can
    hold. They are the type of the network's device, the number of points that it predicts at a time (``together`` of a
    job), and the versions of the packages that compute.

    The number is ``known``, that of an interrupted survey, if the device may have it. Otherwise small batches show
    whether the network keeps scenes apart.
    """
    model, device = job.model, job.model.device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    if known not in (0, most := TOGETHER[device.type]):
        known = most if most and takes_batches(model.net, model.channels, model.field, model.answer_voxels) else 0
    versions = {name: version for name, version in installed_versions().items() if name in _COMPUTING}
    return {"device": device.type, "points at a time": known, **versions}


def predict_group(job: SurveyJob, first: Tile) -> None:
    """Predict the class codes of the points of the group of tiles that begins with ``first``, and write those of each
    tile to the folder of the survey.
    """
    codes, tiles = predict_codes(job, job.groups[first]), job.groups[first]
    for tile, own in zip(tiles, np.split(codes, np.cumsum([job.count(each) for each in tiles])[:-1]), strict=True):
        job.folder.write_result(tile, own)


def merge_segment(job: SurveyJob, number: int) -> np.ndarray[Any, Any]:
    """Return the class code of each point of segment ``number`` of the input (a run of successive points), ``uint8
    [p]`` in the order of the input. The codes are read from the results of the tiles. Raise ``SL824`` if those of a
    tile are missing or damaged.
    """
    parts, codes = job.slices[job.slices["segment"] == number], np.empty(len(job.segments[number]), np.uint8)
    place = point_numbers(read_points(job.folder, parts)).numpy() - job.segments[number].start
    for x, y, start, size, before in parts[["x", "y", "start", "count", "before"]].tolist():
        found = job.folder.read_result((x, y), job.count((x, y)))
        if found is None:
            raise survey_error("SL824", job.folder.result_path((x, y)), "other classes, or none", "the written ones")
        codes[place[start : start + size]] = found[before : before + size]
    return codes


# Called with (stage, steps done, steps in all, note), for a progress bar.
Progress = Callable[[str, int, int, str], None]

Task = Callable[[SurveyJob, Item], Result]
Results = Iterator[tuple[Item, Result]]


class SurveyEngine:
    """The engine that runs the tasks of a survey in threads of this process.

    Args:
        threads: the number of threads. It is 1 for a network on a CPU, which uses all cores itself, and ``THREADS`` for
            one on a GPU.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)

    def share(self, job: SurveyJob) -> None:
        """Store ``job`` as the first argument of every task that :meth:`run` runs from now on."""
        self._job = job

    def run(self, task: Task[Item, Result], items: Iterable[Item], *, ordered: bool = False) -> Results[Item, Result]:
        """Yield ``(item, task(job, item))`` for each of ``items``. If ``ordered`` is true, they come in the order of
        ``items``, and otherwise as they are completed.

        Only some of the items are computed before their results are taken, so memory does not depend on their number.
        """
        waiting, running = deque(items), dict[Future[Result], Item]()
        try:
            while waiting or running:
                places = self._count_places()
                while waiting and len(running) < places:
                    running |= {self._submit(task, waiting[0]): waiting.popleft()}
                first = [next(iter(running))] if ordered else running
                for future in wait(first, LOOK, FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            for future in running:
                future.cancel()

    def _count_places(self) -> int:
        """Return how many items may be begun at a time, which is twice the number of threads."""
        return 2 * self._threads

    def _submit(self, task: Task[Item, Result], item: Item) -> Future[Result]:
        """Begin ``task`` for ``item`` in one of the threads, and return a future of the result."""
        return self._pool.submit(task, self._job, item)

    def close(self) -> None:
        """End the threads after the tasks that are running. Tasks that wait for a thread are cancelled."""
        self._pool.shutdown(cancel_futures=True)
