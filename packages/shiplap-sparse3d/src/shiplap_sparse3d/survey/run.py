"""A survey from the input file to the output file. ``shiplap survey`` only prints the result."""

from __future__ import annotations

import contextlib
import hashlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shiplap.plugin_api import error
from shiplap_sparse3d.survey.cloud import check_codes, open_cloud, write_cloud
from shiplap_sparse3d.survey.engine import SurveyEngine
from shiplap_sparse3d.survey.field import Field
from shiplap_sparse3d.survey.folder import SurveyFolder
from shiplap_sparse3d.survey.job import SEGMENT, Grid, PointTable, SurveyJob
from shiplap_sparse3d.survey.model import SurveyModel
from shiplap_sparse3d.survey.probe import Seen
from shiplap_sparse3d.survey.sorting import read_segment, sort_segment
from shiplap_sparse3d.survey.tasks import merge_segment, predict_tile
from shiplap_sparse3d.survey.tiles import tiling

Progress = Callable[[str, int, int, str], None]
"""Called with (stage, steps done, steps in all, note), for a progress bar."""

_HEAD = 1 << 20  # bytes of the input that its identity looks at


@dataclass(frozen=True)
class SurveyResult:
    """The result of :func:`survey`.

    Attributes:
        output: the file that was written.
        points, tiles: the number of points and of tiles of the whole survey.
        predicted: the number of tiles that this call predicted. Earlier calls predicted the others.
        tile, halo: the edge of a tile and the width of its margin, in voxels.
        field, seen: the receptive field as derived from the layers, and as observed by the probe.
        seconds: the duration of this call.
        peak_mb: the largest resident memory of this process so far, in units of 10^6 bytes.
    """

    output: str
    points: int
    tiles: int
    predicted: int
    tile: int
    halo: int
    field: Field
    seen: Seen
    seconds: float
    peak_mb: float

    def json(self) -> dict[str, Any]:
        """Return the result as a dictionary of plain values for JSON."""
        return asdict(self)


def survey(
    source: str | Path,
    target: str | Path,
    model: SurveyModel,
    *,
    tile: int | None = None,
    halo: int | None = None,
    origin: tuple[int, int] = (0, 0),
    folder: str | Path | None = None,
    keep: bool = False,
    segment: int = SEGMENT,
    workers: int | None = None,
    scheduler: str | None = None,
    device: str | None = None,
    progress: Progress = lambda stage, done, total, note: None,
) -> SurveyResult:
    """Classify every point of ``source`` with the network of ``model``, write ``target`` (the same points in the same
    order with new classes), and return the numbers of the run.

    Memory depends on the number of points in a tile and its halo, and not on the size of the survey. To continue an
    interrupted survey, call this function again with the same arguments; the workers may be others.

    Args:
        source: a LAS, LAZ or COPC file.
        target: the ``.las`` or ``.laz`` file to write. It is replaced at the end, in one step.
        model: the network, the size of a voxel, and the class codes. Its receptive field is derived and probed first.
        tile, halo, origin: in voxels, see :func:`tiling`. By default as large as the network needs.
        folder: the folder for sorted points and results, about 25 bytes for each point. The default is the path of
            ``target`` followed by ``.survey``. Workers on several machines need it, and ``source``, at the same path.
        keep: whether the folder stays afterwards, so that training can use it. False by default: what the survey wrote
            there is removed, and the folder too unless other things are in it.
        segment: the number of points that are sorted at a time.
        workers: the number of processes of a Dask cluster to start on this machine. By default the survey runs in this
            process.
        scheduler: the address of a running Dask scheduler whose workers to use, such as ``tcp://10.0.0.1:8786``.
        device: the device of the network, by default the one it is on. With Dask it is a device of the workers, and
            ``cuda`` takes the GPUs of a machine in turn.
        progress: called with (stage, done, total, note). The note of the stage ``workers`` is the address of Dask's
            dashboard.

    Raises:
        SurveyError: SL820 and SL825 for the model, SL821 for the tiles, SL822 for the input, SL823 for a folder of
            another survey, SL824 for damaged files in it, SL827 for a scheduler that cannot be used, SL828 for workers.
        CommandError: SL602 for a target that cannot be written, SL603 without laspy and lazrs or without Dask, SL613
            for both ``workers`` and ``scheduler``.
    """
    start, source, target = time.perf_counter(), Path(source).absolute(), Path(target).absolute()
    _check_target(source, target)
    # Workers of a cluster move their own copies of the network.
    if device is not None and workers is None and scheduler is None:
        model.net.to(device)
    check_codes(source, model.classes)
    place = Path(folder).absolute() if folder is not None else target.with_name(target.name + ".survey")
    job = open_job(source, place, model, tile, halo, origin, segment)
    seen = model.check()
    with _writes_named(place), contextlib.closing(_open_engine(workers, scheduler, device, progress)) as engine:
        with job.folder.lock():
            job = sort_points(job, engine, progress)
            identity = {"model": model.digest(), "halo": job.tiling.halo}
            job.folder.claim(job.folder.identity, {**_points_identity(job), **identity})
            predicted = _predict_tiles(job, engine, progress)
            write_cloud(source, target, _merged_codes(job, engine, progress))
        if not keep:
            job.folder.remove_written()
    # macOS counts bytes, and Linux counts units of 1,024 bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return SurveyResult(
        str(target),
        job.total,
        len(job.points.tiles),
        predicted,
        job.tiling.size,
        job.tiling.halo,
        model.field,
        seen,
        time.perf_counter() - start,
        peak,
    )


def _open_engine(workers: int | None, scheduler: str | None, device: str | None, progress: Progress) -> SurveyEngine:
    """Return the engine for the survey: this process without ``workers`` and ``scheduler``, otherwise a Dask engine,
    whose dashboard address goes to ``progress``. Raises SL613 for both or for fewer than one worker, SL603 without
    Dask.
    """
    if workers is None and scheduler is None:
        return SurveyEngine()
    if (workers is not None and scheduler is not None) or (workers is not None and workers < 1):
        got = f"workers={workers} and scheduler={scheduler!r}"
        raise error(
            "SL613", where="survey", got=got, expected="a number of workers from 1 on, or a scheduler, not both"
        )
    try:
        from shiplap_sparse3d.survey.cluster import DaskEngine
    except ModuleNotFoundError as missing:
        raise error(
            "SL603",
            where="survey",
            got=f"no {missing.name}",
            expected="dask.distributed",
            fix='install it: pip install "shiplap-sparse3d[survey]"',
        ) from None
    engine = DaskEngine(workers, scheduler, device)
    progress("workers", engine.workers, engine.workers, engine.dashboard)
    return engine


@contextlib.contextmanager
def _writes_named(place: Path) -> Iterator[None]:
    """Turn an ``OSError`` in the block of a context manager, such as a full disk here or on a worker, into SL602, which
    names the file or else ``place``.
    """
    try:
        yield
    except OSError as failure:
        raise error(
            "SL602",
            where=str(failure.filename or place),
            what="the survey cannot be written",
            got=failure.strerror or failure,
            expected="a writable folder with room for 25 bytes a point",
        ) from None


def open_job(
    source: Path,
    folder: Path,
    model: SurveyModel,
    tile: int | None = None,
    halo: int | None = None,
    origin: tuple[int, int] = (0, 0),
    segment: int = SEGMENT,
) -> SurveyJob:
    """Return the job of a survey, before its points are sorted. Nothing is written, and SL821 for the tiles or SL822
    for the input is raised here, before a folder is made.
    """
    tiles = tiling(model.field, tile, halo, origin)
    with open_cloud(source) as reader:
        grid = Grid(tuple(reader.header.scales), tuple(reader.header.offsets), model.voxel)
        return SurveyJob(model, source, SurveyFolder(folder), grid, tiles, reader.header.point_count, segment)


def sort_points(job: SurveyJob, engine: SurveyEngine, progress: Progress) -> SurveyJob:
    """Sort the points of the segments that the folder does not yet have sorted, and return ``job`` with the table of
    all points.

    Raises:
        SurveyError: SL823 if the folder has other points, or tiles of another size.
    """
    job.folder.claim(job.folder.points_identity, _points_identity(job))
    known = {number: read_segment(job.folder, number, job.segment_range(number)[1]) for number in job.segments}
    segments = {number: made for number, made in known.items() if made is not None}
    engine.share(job)
    done = sum(job.segment_range(number)[1] for number in segments)
    progress("read", done, job.total, "points")
    for number, made in engine.run(sort_segment, [number for number in job.segments if number not in segments]):
        segments[number], done = made, done + job.segment_range(number)[1]
        progress("read", done, job.total, "points")
    return replace(job, table=PointTable.from_segments([segments[number] for number in job.segments]))


def _predict_tiles(job: SurveyJob, engine: SurveyEngine, progress: Progress) -> int:
    """Predict and write the classes of all tiles that have no result in the folder, and return the number of those
    tiles.
    """
    counts = {tile: job.points.count(tile) for tile in job.points.tiles}
    left = [tile for tile, count in counts.items() if not job.folder.has_result(tile, count)]
    left.sort(key=lambda tile: (-counts[tile], tile))  # large ones first, so that all workers end at the same time
    engine.share(job)
    done = len(counts) - len(left)
    progress("predict", done, len(counts), "tiles")
    for _ in engine.run(predict_tile, left):
        done += 1
        progress("predict", done, len(counts), "tiles")
    return len(left)


def _merged_codes(job: SurveyJob, engine: SurveyEngine, progress: Progress) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the class codes of the points, ``uint8`` arrays for one segment each, in the order of the input."""
    done = 0
    for _, codes in engine.run(merge_segment, job.segments, ordered=True):
        yield codes
        done += len(codes)
        progress("write", done, job.total, "points")


def _points_identity(job: SurveyJob) -> dict[str, Any]:
    """Return the settings on which the sorted points depend, as plain values: the input's size and head, the voxel, and
    the sizes of tiles and segments.
    """
    with job.source.open("rb") as file:
        # The head has the header. To read all of a large survey would take as long as to sort it.
        head = hashlib.sha256(file.read(_HEAD)).hexdigest()
    return {
        "input": {"bytes": job.source.stat().st_size, "points": job.total, "sha256 of its head": head},
        "voxel": list(job.model.voxel),
        "tile": job.tiling.size,
        "origin": list(job.tiling.origin),
        "segment": job.segment,
    }


def _check_target(source: Path, target: Path) -> None:
    """Raise SL602, before any work, unless ``target`` ends in .las or .laz, lies in an existing folder and is neither a
    folder nor ``source``.
    """
    problem = ""
    if target.suffix.lower() not in (".las", ".laz"):
        problem = f"the ending {target.suffix!r}"
    elif target.exists() and source.exists() and target.samefile(source):
        problem = "the input itself"
    elif not target.parent.is_dir():
        problem = f"no folder {target.parent}"
    elif target.is_dir():
        problem = "a folder"
    if problem:
        expected = "a .las or .laz file other than the input, in a folder that exists"
        raise error("SL602", where=str(target), what="the output cannot be written", got=problem, expected=expected)
