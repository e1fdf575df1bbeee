"""The demonstration from scan to report. ``shiplap demo`` only prints the result."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shiplap.plugin_api.compiling import CompileCounts, compile_counts, reset_compiler
from shiplap_sparse3d.demo import evaluate, picture, report
from shiplap_sparse3d.demo.audits import audit_network_ops
from shiplap_sparse3d.demo.read import load_shipped_scan, read_scan
from shiplap_sparse3d.demo.result import AuditVerdicts, DemoResult, DemoSettings, FittedRule
from shiplap_sparse3d.demo.rules import best_rules
from shiplap_sparse3d.demo.scan import Scan, held_out_mask
from shiplap_sparse3d.demo.score import iou
from shiplap_sparse3d.demo.tiles import random_tiles
from shiplap_sparse3d.demo.train import (
    Progress,
    TrainedNetwork,
    TrainingRecipe,
    choose_backend,
    count_parameters,
    train_network,
)

__all__ = ["run_demo"]

FULL = TrainingRecipe()
QUICK = TrainingRecipe(steps=100, levels=3)


def run_demo(settings: DemoSettings, progress: Progress = lambda stage, done, total, note: None) -> DemoResult:
    """Run the demonstration with ``settings`` and return all its measurements.

    The run reads the scan, trains, measures on the held-out area, audits the ops, and writes the picture and the HTML
    report. Torch uses one thread during the run, and as many as before afterwards. ``progress`` is called with the
    stage, the steps done, the steps in all and a note. The default does nothing.
    """
    # A tile is a few thousand voxels: work for one core. With two, every small loop ends in a wait for the slower one,
    # and on a busy machine a step of 40 ms takes 1,600 (2 cores, load 7, 2026-11-21).
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run_demo_stages(settings, progress)
    finally:
        torch.set_num_threads(threads)


def _run_demo_stages(settings: DemoSettings, progress: Progress) -> DemoResult:
    """Read the scan, train, evaluate, audit the ops, and write the picture and the report. Return all measurements.
    ``progress`` is called with the stage, the steps done, the steps in all and a note.
    """
    start = time.perf_counter()
    # The counts of graphs and recompiles are those of this run alone.
    reset_compiler()
    recipe, device = QUICK if settings.quick else FULL, torch.device(settings.device)
    progress("read", 0, 1, "")
    here = load_shipped_scan() if settings.input is None else read_scan(settings.input, settings.classes, settings.unit)
    progress("read", 1, 1, "")
    held_out = held_out_mask(here)
    scan, held = Scan(here.xyz.to(device), here.ground.to(device)), held_out.to(device)
    training = scan.take(~held)  # tiles, features and weights come from these points and no others
    trained = train_network([training], recipe, settings.seed, progress)
    progress("evaluate", 0, 1, "")
    judged = _judge_held_out(scan, held, trained, recipe)
    tile = next(random_tiles([trained.look.describe_area(training)], recipe.levels, settings.seed + 1))
    speed = evaluate.measure_step_times(trained.net, trained.forward, tile, 5 if settings.quick else 20)
    progress("evaluate", 1, 1, "")
    counts = compile_counts()  # before the audit, which compiles graphs of its own
    verdicts = audit_network_ops(settings.quick, progress) if settings.audit else {}
    progress("report", 0, 1, "")
    truth = "classes of the survey" if settings.input is None else "classes of the file"
    png = picture.draw_picture(here, held_out, judged.predicted, truth)
    points = (len(training), int(held_out.sum()))
    result = _collect_result(settings, points, time.perf_counter() - start, trained, judged, speed, counts, verdicts)
    _write_files({Path(result.png): png, Path(result.html): report.render_demo_report(result, png).encode()})
    progress("report", 1, 1, "")
    return result


def _collect_result(
    settings: DemoSettings,
    points: tuple[int, int],
    seconds: float,
    trained: TrainedNetwork,
    judged: _HeldOutScores,
    speed: evaluate.StepTimes,
    counts: CompileCounts,
    verdicts: dict[str, AuditVerdicts],
) -> DemoResult:
    """Return the result of the demonstration, put together from the measurements of its stages. ``points`` holds the
    numbers of points in the training area and in the held-out area. ``seconds`` is the time of the whole run.
    """
    return DemoResult(
        graphs=counts.graphs,
        graph_breaks=counts.graph_breaks,
        recompiles=counts.recompiles,
        iou=judged.iou,
        baseline_iou=judged.baseline,
        points_per_s=judged.points_per_s,
        compiled_ms=speed.compiled_ms,
        eager_ms=speed.eager_ms,
        audits=verdicts,
        compile_s=trained.first_step,
        train_s=trained.seconds,
        total_s=seconds,
        training_points=points[0],
        held_out_points=points[1],
        tile_points=trained.points,
        tile_voxels=trained.voxels,
        parameters=count_parameters(trained.net),
        losses=trained.losses,
        environment=_describe_environment(torch.device(settings.device)),
        html=str(settings.out / "demo.html"),
        png=str(settings.out / "demo.png"),
        rules=judged.rules,
        scan=None if settings.input is None else str(settings.input),
        backend=choose_backend(torch.device(settings.device)),
    )


def _write_files(files: dict[Path, bytes]) -> None:
    """Write each of ``files`` (a mapping from path to content), and create its folder. After an interrupt at any time,
    each file has either its old or its new content.
    """
    drafts = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in files}
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            drafts[path].write_bytes(content)
        # All drafts are complete before the first one replaces a file.
        for path, draft in drafts.items():
            draft.replace(path)
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


@dataclass(frozen=True)
class _HeldOutScores:
    """The results on the held-out area. ``iou`` is the intersection over union of the network, and ``baseline`` that of
    the rule in ``predict_by_height``. ``points_per_s`` is the speed of the network. ``predicted`` is its prediction for
    all points, also those of the training area. ``rules`` are the best rules with two numbers.
    """

    iou: float
    baseline: float
    points_per_s: float
    predicted: Tensor
    rules: tuple[FittedRule, ...]


def _judge_held_out(scan: Scan, held: Tensor, trained: TrainedNetwork, recipe: TrainingRecipe) -> _HeldOutScores:
    """Return the scores on the points that the mask ``held`` selects, and the prediction for all points. The scores are
    those of the trained network, of the rule in ``predict_by_height`` and of the best rules with two numbers. The
    training area is predicted only for the picture.
    """
    predicted = torch.empty_like(scan.ground)
    # The held-out strip comes last, so its time remains in ``seconds``.
    for wanted in (~held, held):
        start = time.perf_counter()
        logits = evaluate.predict_logits(trained.forward, trained.look, scan, wanted, recipe.levels)
        predicted[wanted] = logits > trained.threshold
        seconds = time.perf_counter() - start
    truth, plain = scan.ground[held], evaluate.predict_by_height(scan)[held]
    return _HeldOutScores(
        iou(predicted[held], truth),
        iou(plain, truth),
        int(held.sum()) / seconds,
        predicted.cpu(),
        best_rules(scan, held),
    )


def _describe_environment(device: torch.device) -> str:
    """Return one line of text for the report, with the name of the GPU or the number of CPU threads, the versions of
    torch and Python, and the date.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread"
    return f"{name}; torch {torch.__version__}; Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}"
