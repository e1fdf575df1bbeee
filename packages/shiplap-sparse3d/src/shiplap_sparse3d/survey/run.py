"""A survey from the input file to the output file. ``shiplap survey`` only prints the result."""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shiplap.plugin_api import error
from shiplap_sparse3d.survey import buckets as sorting
from shiplap_sparse3d.survey.buckets import Buckets, Grid
from shiplap_sparse3d.survey.cloud import CHUNK, open_cloud
from shiplap_sparse3d.survey.field import Field
from shiplap_sparse3d.survey.folder import SurveyFolder, Tile
from shiplap_sparse3d.survey.merge import check_codes, gather_classes, write_cloud
from shiplap_sparse3d.survey.model import SurveyModel
from shiplap_sparse3d.survey.probe import Seen
from shiplap_sparse3d.survey.shares import predict_tiles, share_tiles, tiles_in_turn
from shiplap_sparse3d.survey.tiles import Tiling, tiling
from shiplap_sparse3d.survey.workers import rank_and_world

__all__ = ["Progress", "SurveyResult", "survey"]

Progress = Callable[[str, int, int, str], None]
"""Called with (stage, steps done, steps in all, note), for a progress bar."""

_PAUSE = 0.2  # seconds between looks at what other workers have done
_HEAD = 1 << 20  # bytes of the input that its identity looks at


@dataclass(frozen=True)
class SurveyResult:
    """The result of :func:`survey`.

    Attributes:
        output: the file that was written, or None for a worker other than worker 0, which writes no file.
        points, tiles: the number of points and of tiles of the whole survey.
        predicted: the number of tiles that this call predicted. Earlier calls or other workers predicted the others.
        tile, halo: the edge of a tile and the width of its margin, in voxels.
        field, seen: the receptive field as derived from the layers, and as observed by the probe.
        seconds: the duration of this call.
        peak_mb: the largest resident memory of this process so far, in units of 10^6 bytes.
    """

    output: str | None
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
        """One object of plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _SurveyJob:
    """The arguments that all stages share."""

    model: SurveyModel
    source: Path
    target: Path
    folder: SurveyFolder
    grid: Grid
    tiling: Tiling
    total: int
    chunk: int
    workers: tuple[int, int]
    patience: float
    progress: Progress


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
    chunk: int = CHUNK,
    workers: tuple[int, int] | None = None,
    patience: float = 600.0,
    progress: Progress = lambda stage, done, total, note: None,
) -> SurveyResult:
    """Classify every point of ``source`` and write ``target``: the same points in the same order, with new classes.

    Memory depends on the number of points in a tile and its halo, and not on the size of the survey. To continue an
    interrupted survey, call this function again with the same arguments.

    Args:
        source: a LAS, LAZ or COPC file.
        target: the ``.las`` or ``.laz`` file to write. It is replaced at the end, in one step.
        model: the network, the size of a voxel, and the class codes. Its receptive field is derived and probed first.
        tile, halo, origin: in voxels, see :func:`tiling`. By default as large as the network needs.
        folder: the folder for sorted points and results, about 24 bytes for each point. The default is the path of
            ``target`` followed by ``.survey``. Workers on several machines need a folder on a shared file system.
        keep: whether the folder stays afterwards, so that training can use it. False by default: what the survey wrote
            there is removed, and the folder too unless other things are in it.
        chunk: the number of points that are read at a time.
        workers: ``(rank, number of workers)``, by default as torchrun, Slurm or MPI state them in the environment.
            Worker 0 sorts the points and writes the output.
        patience: the seconds, 600 by default, after which a worker gives up if no other worker has finished anything.
        progress: called with (stage, done, total, note).

    Raises:
        SurveyError: SL820 and SL825 for the model, SL821 for the tiles, SL822 for the input, SL823 for a folder of
            another survey, SL824 if another worker has stopped.
        CommandError: SL602 for a target that cannot be written, SL603 without laspy and lazrs.
    """
    start, source, target = time.perf_counter(), Path(source), Path(target)
    _check_target(source, target)
    tiles = tiling(model.field, tile, halo, origin)
    check_codes(source, model.classes)
    seen = model.check()
    place = SurveyFolder(Path(folder) if folder is not None else target.with_name(target.name + ".survey"))
    with open_cloud(source) as reader:
        header = reader.header
        grid = Grid(tuple(header.scales), tuple(header.offsets), model.voxel)
        total = header.point_count
    rank, _ = workers = rank_and_world() if workers is None else workers
    job = _SurveyJob(model, source, target, place, grid, tiles, total, chunk, workers, patience, progress)
    try:
        with place.hold_worker(rank):
            done, predicted = _run_stages(job)
    except OSError as failure:
        raise error(
            "SL602",
            where=str(failure.filename or place.path),
            what="the survey cannot be written",
            got=failure.strerror or failure,
            expected="a writable folder with room for 24 bytes a point",
        ) from None
    if rank == 0 and not keep:
        _let_others_end(job)
        place.remove_written()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return SurveyResult(
        str(target) if rank == 0 else None,
        total,
        len(done.tiles),
        predicted,
        tiles.size,
        tiles.halo,
        model.field,
        seen,
        time.perf_counter() - start,
        peak,
    )


def _run_stages(job: _SurveyJob) -> tuple[Buckets, int]:
    """Sort, predict and write. Returns the buckets and the number of tiles that this worker predicted."""
    rank, world = job.workers
    if rank == 0:
        job.folder.claim(_survey_identity(job))
        done = sorting.finished_buckets(job.folder, job.total) or sorting.fill_buckets(
            job.folder, job.source, job.grid, job.tiling, job.chunk, lambda n, of: job.progress("read", n, of, "points")
        )
    else:
        done = _wait_for(job, lambda: _sorted_by_worker_0(job), "worker 0 to sort the points")
    predicted = _predict_share(job, done, share_tiles(done, job.tiling, world))
    if rank == 0:
        _wait_for(job, lambda: _all_done(job, done.tiles), "the other workers")
        gather_classes(job.folder, done.tiles, job.total, lambda n, of: job.progress("gather", n, of, "tiles"))
        write_cloud(job.folder, job.source, job.target, job.chunk, lambda n, of: job.progress("write", n, of, "points"))
    return done, predicted


def _predict_share(job: _SurveyJob, done: Buckets, parts: list[list[Tile]]) -> int:
    """Predict the tiles of this worker, and of slower ones; return how many tiles that were."""
    (rank, _), predicted = job.workers, 0
    share = len(parts[rank])

    def left() -> Iterator[Tile]:
        for number, tile in enumerate(tiles_in_turn(job.folder, parts, rank)):
            job.progress("predict", min(number, share), share, "tiles")
            yield tile

    for _ in predict_tiles(job.model, job.folder, done, job.grid, job.tiling, left()):
        predicted += 1
    job.progress("predict", share, share, "tiles")
    return predicted


def _sorted_by_worker_0(job: _SurveyJob) -> tuple[int, Buckets | None]:
    """Return the progress of worker 0, and its buckets when it is done."""
    if not job.folder.identity.exists():
        return 0, None
    job.folder.claim(_survey_identity(job))
    done = sorting.finished_buckets(job.folder, job.total)
    return job.folder.progress.stat().st_mtime_ns if job.folder.progress.exists() else 0, done


def _all_done(job: _SurveyJob, tiles: list[Tile]) -> tuple[int, bool | None]:
    marks = sum(job.folder.done_mark_path(tile).exists() for tile in tiles)
    return marks, True if marks == len(tiles) else None


def _wait_for(job: _SurveyJob, look: Callable[[], tuple[int, Any]], what: str) -> Any:
    """Call ``look`` until it returns a result. Raises SL824 after ``patience`` seconds without a change."""
    last, since = -1, time.monotonic()
    while True:
        state, value = look()
        if value is not None:
            return value
        # Patience counts from the last change, and not from the start.
        if state != last:
            last, since = state, time.monotonic()
        if time.monotonic() - since > job.patience:
            raise error("SL824", where=str(job.folder.path), got=f"nothing new for {job.patience:.0f} s", expected=what)
        time.sleep(_PAUSE)


def _let_others_end(job: _SurveyJob) -> None:
    """Wait for workers that are still in the folder, since removing the folder would make them fail.

    They have nothing left to do. A worker that hangs is not waited for.
    """
    until = time.monotonic() + job.patience
    # Only worker 0 removes the folder, after all tiles have their marks.
    while job.workers[1] > 1 and job.folder.in_use() and time.monotonic() < until:
        time.sleep(_PAUSE / 10)


def _survey_identity(job: _SurveyJob) -> dict[str, Any]:
    """Return the settings on which results depend, in plain values."""
    with job.source.open("rb") as file:
        # The head has the header. To read all of a large survey would take as long as to sort it.
        head = hashlib.sha256(file.read(_HEAD)).hexdigest()
    return {
        "input": {"bytes": job.source.stat().st_size, "points": job.total, "sha256 of its head": head},
        "model": job.model.digest(),
        "tile": job.tiling.size,
        "halo": job.tiling.halo,
        "origin": list(job.tiling.origin),
    }


def _check_target(source: Path, target: Path) -> None:
    """Check before any work that the target is of a known kind, in an existing folder, and not the source."""
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
