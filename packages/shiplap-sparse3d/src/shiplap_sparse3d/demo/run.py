"""The demonstration from scan to report. ``shiplap demo`` only shows what this returns."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import shiplap_sparse3d as sparse3d
from shiplap import compat
from shiplap_sparse3d.demo import evaluate, picture, report
from shiplap_sparse3d.demo.result import DemoResult, Verdicts
from shiplap_sparse3d.demo.scan import Scan, load, split
from shiplap_sparse3d.demo.tiles import random_tiles
from shiplap_sparse3d.demo.train import Fit, Progress, Recipe, fit, parameters

__all__ = ["DemoSettings", "run"]

FULL = Recipe()
QUICK = Recipe(steps=100, levels=3)
QUICK_CHECKS = ("schema", "fake", "numerics", "fresh", "gradient")  # a second or less each
OPS = (
    sparse3d.conv,
    sparse3d.conv_weight_grad,
    sparse3d.subm_table,
    sparse3d.out_coords,
    sparse3d.conv_table,
    sparse3d.transpose_table,
    sparse3d.unique_coords,
    sparse3d.segment_mean,
)


@dataclass(frozen=True)
class DemoSettings:
    """What the caller may choose.

    Attributes:
        quick: a smaller network and fewer steps; finishes in a minute.
        device: where everything runs, ``"cpu"`` or ``"cuda"``.
        out: folder for the report and the picture, created if absent.
        seed: of weights and tiles.
        audit: whether to audit the ops that were used.
    """

    quick: bool = False
    device: str = "cpu"
    out: Path = Path("shiplap-report")
    seed: int = 0
    audit: bool = True


def run(settings: DemoSettings, progress: Progress = lambda stage, done, total, note: None) -> DemoResult:
    """Read, train, judge, measure, audit, report."""
    # A tile is a few thousand voxels: work for one core. With two, every small loop ends in a wait for the slower one,
    # and on a busy machine a step of 40 ms takes 1,600 (2 cores, load 7, 2026-11-21).
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(settings, progress)
    finally:
        torch.set_num_threads(threads)


def _run(settings: DemoSettings, progress: Progress) -> DemoResult:
    start = time.perf_counter()
    compat.reset_compiler()
    recipe, device = QUICK if settings.quick else FULL, torch.device(settings.device)
    progress("read", 0, 1, "")
    here = load()
    progress("read", 1, 1, "")
    held_out = split(here)
    scan, held = Scan(here.xyz.to(device), here.ground.to(device)), held_out.to(device)
    training = scan.take(~held)  # tiles, features and weights come from these points and no others
    trained = fit([training], recipe, settings.seed, progress)
    progress("evaluate", 0, 1, "")
    judged = _judge(scan, held, trained, recipe)
    tile = next(random_tiles([training], recipe.levels, settings.seed + 1))
    speed = evaluate.speed(trained.net, trained.forward, tile, 5 if settings.quick else 20)
    progress("evaluate", 1, 1, "")
    counts = compat.compile_counts()  # before the audit, which compiles graphs of its own
    audits = _audits(settings.quick, progress) if settings.audit else {}
    progress("report", 0, 1, "")
    png = picture.picture(here, held_out, judged.predicted)
    measured = _Measured(trained, judged, speed, counts, audits, len(training), int(held_out.sum()))
    page, image = settings.out / "demo.html", settings.out / "demo.png"
    result = _result(measured, device, time.perf_counter() - start, html=str(page), png=str(image))
    _write({image: png, page: report.html(result, png).encode()})
    progress("report", 1, 1, "")
    return result


@dataclass(frozen=True)
class _Measured:
    trained: Fit
    judged: _Judged
    speed: evaluate.Speed
    counts: compat.CompileCounts
    audits: dict[str, Verdicts]
    training_points: int
    held_out_points: int


def _result(found: _Measured, device: torch.device, seconds: float, html: str, png: str) -> DemoResult:
    return DemoResult(
        graphs=found.counts.graphs,
        graph_breaks=found.counts.graph_breaks,
        recompiles=found.counts.recompiles,
        iou=found.judged.iou,
        baseline_iou=found.judged.baseline,
        points_per_s=found.judged.points_per_s,
        compiled_ms=found.speed.compiled_ms,
        eager_ms=found.speed.eager_ms,
        audits=found.audits,
        compile_s=found.trained.first_step,
        train_s=found.trained.seconds,
        total_s=seconds,
        training_points=found.training_points,
        held_out_points=found.held_out_points,
        tile_points=found.trained.points,
        tile_voxels=found.trained.voxels,
        parameters=parameters(found.trained.net),
        losses=found.trained.losses,
        environment=_environment(device),
        html=html,
        png=png,
    )


def _write(files: dict[Path, bytes]) -> None:
    """Each file is old or new, never half: an interrupt may come at any time."""
    drafts = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in files}
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            drafts[path].write_bytes(content)
        for path, draft in drafts.items():
            draft.replace(path)
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Judged:
    iou: float
    baseline: float
    points_per_s: float
    predicted: Tensor


def _judge(scan: Scan, held: Tensor, trained: Fit, recipe: Recipe) -> _Judged:
    """The one look at the held-out labels; the training area is predicted for the picture only."""
    predicted = torch.empty_like(scan.ground)
    for wanted in (~held, held):
        start = time.perf_counter()
        predicted[wanted] = evaluate.predict(trained.forward, scan, wanted, recipe.levels) > 0
        seconds = time.perf_counter() - start
    truth, plain = scan.ground[held], evaluate.baseline(scan)[held]
    return _Judged(
        evaluate.iou(predicted[held], truth), evaluate.iou(plain, truth), int(held.sum()) / seconds, predicted.cpu()
    )


def _audits(quick: bool, progress: Progress) -> dict[str, Verdicts]:
    """What ``shiplap audit`` says of each op of the network, on the CPU; name of the op → verdicts."""
    from shiplap import audit

    found = {}
    for done, op in enumerate(OPS):
        progress("audit", done, len(OPS), op.spec.name)
        findings = audit(op, checks=QUICK_CHECKS if quick else None, seed=0, budget_s=2 if quick else 20)
        count = [f.verdict for f in findings].count
        failed = tuple(f.check for f in findings if f.verdict == "fail")
        found[op.spec.name] = Verdicts(count("ok"), count("fail"), count("skip"), failed)
    progress("audit", len(OPS), len(OPS), "")
    return found


def _environment(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread"
    return f"{name}; torch {torch.__version__}; Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}"
