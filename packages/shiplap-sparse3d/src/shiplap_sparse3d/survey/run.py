"""A survey from the input file to the output file, or to the tiles with classes of a training loop."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiplap.plugin_api import verbs
from shiplap_sparse3d.axes import Triple, per_axis
from shiplap_sparse3d.errors import SurveyError, require_packages, survey_error
from shiplap_sparse3d.survey import tasks
from shiplap_sparse3d.survey.cloud import check_codes, open_cloud, write_cloud
from shiplap_sparse3d.survey.field import Field, Tile, tiling
from shiplap_sparse3d.survey.folder import SurveyFolder
from shiplap_sparse3d.survey.model import SurveyModel
from shiplap_sparse3d.survey.tasks import SEGMENT, Item, Progress, Result, Results, SurveyEngine, SurveyJob, Task


@dataclass(frozen=True)
class SurveyResult:
    """The result of :func:`survey`.

    Attributes:
        output: the file that was written.
        points, tiles: the number of points and of tiles of the whole survey.
        predicted: the number of tiles that this call predicted. Earlier calls predicted the others.
        tile, halo: the edge of a tile and the width of its margin, in voxels.
        field, seen: the receptive field as derived from the layers, and as measured on small inputs.
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
    seen: Field
    seconds: float
    peak_mb: float


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
    """Classify every point of ``source`` with the network of ``model``, and write the points with their new classes to
    ``target`` in the same order. Return the numbers of the run.

    Memory depends on the number of points in a tile and its halo, and not on the size of the survey. To continue an
    interrupted survey, call this function again with the same arguments. The workers may be other ones.

    Args:
        source: a LAS, LAZ or COPC file.
        target: the ``.las`` or ``.laz`` file to write. It is replaced at the end, in one step.
        model: the network, the size of a voxel, and the class codes. Its receptive field is derived and probed first.
        tile, halo, origin: the arguments ``size``, ``halo`` and ``origin`` of :func:`tiling`, in voxels.
        folder: the folder for sorted points and results, about 25 bytes for each point. The default is the path of
            ``target`` followed by ``.survey``. Workers on several machines need it, and ``source``, at the same path.
        keep: whether the folder stays afterwards, so that training can use it. If it is false, the files of the survey
            are removed, and also the folder unless other files are in it.
        segment: the number of points that are sorted at a time.
        workers: the number of processes of a Dask cluster to start on this machine. By default the survey runs in this
            process.
        scheduler: the address of a running Dask scheduler whose workers to use, such as ``tcp://10.0.0.1:8786``.
        device: the device of the network, by default the one it is on. With Dask it is a device of the workers, and
            ``cuda`` takes the GPUs of a machine in turn.
        progress: called with (stage, done, total, note). The stage ``workers`` has a total of 0, and a note for the
            user, such as the address of Dask's dashboard.

    Raises:
        SurveyError: ``SL820`` and ``SL825`` for the model, ``SL821`` for the tiles, ``SL822`` for the input, ``SL823``
            for a folder of another survey, ``SL824`` for damaged files in the folder, ``SL827`` for a scheduler that
            cannot be used, and ``SL828`` for workers that cannot run the survey.
        CommandError: ``SL602`` for a target that cannot be written, ``SL603`` without laspy and lazrs or without Dask,
            and ``SL613`` for both ``workers`` and ``scheduler``.
    """
    start, source, target = time.perf_counter(), Path(source).absolute(), Path(target).absolute()
    _check_arguments(source, target, model)
    if device is not None and workers is None and scheduler is None:
        verbs.require_device(str(device))
        model.net.to(device)
    place = Path(folder).absolute() if folder is not None else target.with_name(target.name + ".survey")
    job = open_job(source, place, model, (tile, halo, origin), segment)
    with contextlib.closing(_open_engine(model, workers, scheduler, device, progress)) as engine:
        seen = model.check()  # while local workers start
        with job.folder.open_for_work(), job.folder.lock():
            job = sort_points(job, engine, progress)
            known = job.folder.claim({"model": model.digest(), "halo": job.tiling.halo})
            # By a worker, whose device need not be the client's, and once: all must predict the same batches.
            ((_, arithmetic),) = engine.run(tasks.choose_arithmetic, [known.get("points at a time")])
            job = replace(job, together=job.folder.claim(arithmetic)["points at a time"])
            predicted = _predict_tiles(job, engine, progress)
            merged = _run_stage(engine, tasks.merge_segment, job.segments, job.total, "write", progress)
            write_cloud(source, target, (codes for _, codes in merged))
        if not keep:
            job.folder.remove_written()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    tiles, seconds, size, halo = len(job.tiles), time.perf_counter() - start, job.tiling.size, job.tiling.halo
    return SurveyResult(str(target), job.total, tiles, predicted, size, halo, model.field, seen, seconds, peak)


def _open_engine(
    model: SurveyModel, workers: int | None, scheduler: str | None, device: str | None, progress: Progress
) -> SurveyEngine:
    """Return the engine that runs the tasks of a survey. Without ``workers`` and ``scheduler`` it uses this process,
    and otherwise Dask, with networks on ``device``, by default of the model's type, and notes to the user by
    ``progress``. Raise ``SL613`` for both or for fewer than one worker, and ``SL603`` without Dask.
    """
    if workers is None and scheduler is None:
        return SurveyEngine(1 if model.device.type == "cpu" else tasks.THREADS)
    if workers is not None and (scheduler is not None or not isinstance(workers, int) or workers < 1):
        raise survey_error("SL613", "survey", f"{workers=} and {scheduler=}", "one worker or more, or a scheduler")
    require_packages("survey", "survey", "distributed", "cryptography")
    from shiplap_sparse3d.survey.cluster import DaskEngine

    return DaskEngine(workers, scheduler, device or model.device.type, progress)


def open_job(source: Path, folder: Path, model: SurveyModel, cut: Any, segment: int = SEGMENT) -> SurveyJob:
    """Return the job of a survey, whose points are not yet sorted. ``cut`` holds the arguments of :func:`tiling` after
    the first, and ``segment`` is the number of points that are sorted at a time.

    Nothing is written. Raise ``SL821`` for the tiles, ``SL822`` for the input, and ``SL825`` for classes that the
    input's format cannot hold.
    """
    per_axis(segment, "survey, argument 'segment'", 1, 1)
    tiles = tiling(model.field, *cut)
    with open_cloud(source) as reader:
        header = reader.header
    check_codes(source, header, model.classes)
    scales, offsets = tuple(map(float, header.scales)), tuple(map(float, header.offsets))
    return SurveyJob(model, source, SurveyFolder(folder), scales, offsets, tiles, header.point_count, segment)


def _run_stage(
    engine: SurveyEngine, task: Task[Item, Result], left: dict[Item, Any], total: int, stage: str, progress: Progress
) -> Results[Item, Result]:
    """Yield ``(item, task(job, item))`` for the keys of ``left``, in order if ``stage`` is ``"write"``. The values of
    ``left`` are the points or the tiles of each key. ``progress`` is called for ``stage`` with how many of all
    ``total`` points or tiles are done, at first those that are not in ``left``.
    """
    done, unit = total - sum(map(len, left.values())), "tiles" if stage == "predict" else "points"
    progress(stage, done, total, unit)
    for item, result in engine.run(task, left, ordered=stage == "write"):
        yield item, result
        progress(stage, done := done + len(left[item]), total, unit)


def sort_points(job: SurveyJob, engine: SurveyEngine, progress: Progress) -> SurveyJob:
    """Sort the points of the segments (runs of successive points) of the input for which the folder has no sorted
    points. Return ``job`` with the table of all points. ``progress`` is called with the number of points done. Raise
    ``SL823`` if the folder has other points, or tiles of another size.
    """
    job.folder.claim(_points_identity(job))
    segments = {number: known for number in job.segments if (known := tasks.read_segment(job, number)) is not None}
    left = {number: points for number, points in job.segments.items() if number not in segments}
    engine.share(job)
    try:
        segments |= _run_stage(engine, tasks.sort_segment, left, job.total, "read", progress)
    except SurveyError as failure:
        if failure.id == "SL822" and not (job.folder.path / "classes").exists():  # a repaired one is another input
            job.folder.remove_written()
        raise
    return job.with_points([*segments.values()])


def _predict_tiles(job: SurveyJob, engine: SurveyEngine, progress: Progress) -> int:
    """Predict and write the class codes of all groups of tiles of which a tile has no result in the folder. Return the
    number of tiles of these groups. ``progress`` is called after each group.
    """
    missing = {tile for tile in job.tiles if job.folder.read_result(tile, job.count(tile)) is None}
    # Large ones first, so that all workers end at the same time.
    groups = sorted(job.groups.items(), key=lambda group: (-sum(map(job.count, group[1])), group[0]))
    left = {first: tiles for first, tiles in groups if not missing.isdisjoint(tiles)}
    engine.share(job)
    done = _run_stage(engine, tasks.predict_group, left, len(job.tiles), "predict", progress)
    return sum(len(left[first]) for first, _ in done)


def _points_identity(job: SurveyJob) -> dict[str, Any]:
    """Return the settings on which the sorted points depend, as a dict that JSON can hold. They are the input's size,
    time and first bytes, the size of a voxel, and the sizes of tiles and segments.
    """
    # The head has the header. To read all of a large survey would take as long as to sort it.
    head, of = hashlib.sha256(np.fromfile(job.source, "u1", 1 << 20).tobytes()).hexdigest(), job.source.stat()
    known = {"bytes": of.st_size, "changed": of.st_mtime_ns, "points": job.total, "sha256 of its head": head}
    cut = {"voxel": job.model.voxel, "tile": job.tiling.size, "origin": job.tiling.origin, "segment": job.segment}
    return {"format": 3, "input": known, **cut}


def _check_arguments(source: Path, target: Path, model: object) -> None:
    """Raise ``SL825`` unless ``model`` is a ``SurveyModel``. Raise ``SL602`` unless ``target`` ends in .las or .laz and
    lies in an existing folder that can be written. Raise it also if ``target`` is a folder or the input ``source``.
    """
    if not isinstance(model, SurveyModel):
        raise survey_error("SL825", "survey", f"a {type(model).__name__}", "a SurveyModel")
    problems = {
        f"the ending {target.suffix!r}": target.suffix.lower() not in (".las", ".laz"),
        "the input itself": target.exists() and source.exists() and target.samefile(source),
        f"no folder {target.parent} to write into": not (target.parent.is_dir() and os.access(target.parent, os.W_OK)),
        "a folder": target.is_dir(),
    }
    if problem := next((problem for problem, there in problems.items() if there), None):
        expected = "a .las or .laz file other than the input, in a folder that you can write"
        raise survey_error("SL602", target, problem, expected, what="the output cannot be written")


@dataclass(frozen=True)
class Manifest:
    """A survey for training, the result of :func:`prepare`. It holds the ``job``, whose points are sorted into tiles,
    each with its class.
    """

    job: SurveyJob

    @property
    def tiles(self) -> list[Tile]:
        """The tiles that have points, as (x, y), in ascending order."""
        return self.job.tiles

    def batch(self, tile: Tile) -> tuple[Tensor, Tensor, Triple, Tensor]:
        """Return ``(cells, features, grid, labels)`` of the points of ``tile`` and the margin (halo) around it, as one
        example for training.

        ``labels`` (``int64 [p]``) are indices into ``model.classes``. In the halo and for points of other classes they
        are -100, which losses of torch ignore. ``model.forward(cells, features, grid)`` returns the logits of the
        points.
        """
        question = tasks.question_of(self.job, [tile], torch.device("cpu"))
        labels = torch.full((len(question.cells),), -100)  # what torch's losses ignore by default
        codes = question.own[:, 5] >> 24 & 0xFF
        for number, code in enumerate(self.job.model.classes):
            labels[question.wanted[codes == code]] = number
        return question.cells[:, 1:], question.feats, question.grid, labels


def prepare(
    source: str | Path,
    folder: str | Path,
    model: SurveyModel,
    *,
    tile: int | None = None,
    halo: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Sort the points of a classified survey into tiles, and return a :class:`Manifest`. Its method ``batch`` gives a
    training loop the points and labels of a tile.

    Call this in one process before several processes train. If ``folder`` already has the sorted points, as after
    ``survey(..., keep=True)`` with the same voxels and tiles, they are reused.

    Args:
        source: a LAS, LAZ or COPC file whose points have classes.
        folder: the folder for the sorted points, about 25 bytes for each point.
        model: the network, the size of a voxel, and the class codes.
        tile, halo: the arguments ``size`` and ``halo`` of :func:`tiling`, in voxels.
        progress: called with (points done, points in all).

    Raises:
        SurveyError: ``SL820`` and ``SL825`` for the model, ``SL821`` for the tiles, ``SL822`` for the input, and
            ``SL823`` for a folder that belongs to another survey.
        CommandError: ``SL602`` for a folder that everybody can write, or that holds links.
    """
    job = open_job(Path(source), Path(folder), model, (tile, halo))
    with job.folder.open_for_work(), contextlib.closing(SurveyEngine()) as engine:
        return Manifest(sort_points(job, engine, lambda stage, done, total, note: progress(done, total)))
