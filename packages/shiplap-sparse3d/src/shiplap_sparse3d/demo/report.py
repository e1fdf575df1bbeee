"""The report as one self-contained HTML file: numbers, picture, loss curve, audit verdicts."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

from shiplap_sparse3d.demo.result import DemoResult

__all__ = ["headline_rows", "render_demo_report"]

# The plot of the losses inside of its SVG: the margins hold the numbers and the names of the axes.
_LEFT, _TOP, _WIDTH, _HEIGHT = 64, 10, 560, 190
# What two of the verdicts mean.
VERDICTS = (
    "skip: the check does not apply to the op, for example because the op has no gradient. "
    "incomplete: the demonstration had no time for all samples of the check; 'shiplap audit' has."
)


def headline_rows(result: DemoResult) -> list[tuple[str, str, str]]:
    """Return ``(label, value, note)`` as strings for each main number of ``result``, for the terminal and the HTML
    report.
    """
    r = result
    here = "" if r.backend == "inductor" else "no C++ compiler was found, so Inductor did not take part"
    return [
        ("held-out ground IoU", f"{r.iou:.3f}", f"{r.held_out_points:,} points, an area of its own"),
        ("plain baseline", f"{r.baseline_iou:.3f}", "less than 0.8 m above the lowest point of a 12 m cell"),
        *(
            (f"best rule: {rule.name}", f"{rule.iou:.3f}", f"{rule.text}; fitted on the training area")
            for rule in r.rules
        ),
        ("graphs", str(r.graphs), "forward and backward, torch.compile(fullgraph=True)"),
        ("graph breaks", str(r.graph_breaks), ""),
        ("recompiles", str(r.recompiles), f"tiles of {r.tile_voxels[0]:,} to {r.tile_voxels[1]:,} voxels"),
        ("prediction", f"{r.points_per_s:,.0f} points/s", "features, voxels, tables and network"),
        ("training step, compiled", f"{r.compiled_ms:.1f} ms", here or "forward and backward, same kernels, same tile"),
        ("training step, eager", f"{r.eager_ms:.1f} ms", ""),
        ("first step", f"{r.compile_s:.1f} s", "compiles everything"),
        ("training", f"{r.train_s:.1f} s", f"{len(r.losses)} steps, the first included"),
    ]


def render_demo_report(result: DemoResult, image: bytes) -> str:
    """Return the report of ``result`` as the source of one HTML page. ``image`` is a PNG, which the page contains."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("shiplap_sparse3d.demo"), undefined=StrictUndefined, autoescape=True)
    return environment.get_template("demo.html.jinja").render(
        rows=headline_rows(result),
        audits=result.audits,
        scan=result.scan,
        better=[rule.name for rule in result.rules if rule.iou > result.iou],
        image=base64.b64encode(image).decode(),
        chart=_chart(result.losses),
        meanings=VERDICTS,
        seconds=result.train_s,
        parameters=result.parameters,
        training_points=result.training_points,
        held_out_points=result.held_out_points,
        environment=result.environment,
    )


def _chart(losses: Sequence[float]) -> dict[str, Any]:
    """Return the values from which the template draws the curve of ``losses``, one for each training step. ``points``
    is the string for an SVG polyline, and ``box`` is the plot's left, top, width and height. ``loss`` and ``step`` hold
    a label and its position for each mark of the two axes.
    """
    # A single step has no distance to the next one.
    top, last = _round_up(max(losses)), max(1, len(losses) - 1)
    points = [(_LEFT + i * _WIDTH / last, _TOP + _HEIGHT * (1 - loss / top)) for i, loss in enumerate(losses)]
    steps = dict.fromkeys((0, last // 2, len(losses) - 1))
    return {
        "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points),
        "box": (_LEFT, _TOP, _WIDTH, _HEIGHT),
        "loss": [(f"{top * part:g}", _TOP + _HEIGHT * (1 - part)) for part in (0, 0.5, 1)],
        "step": [(str(i + 1), _LEFT + i * _WIDTH / last) for i in steps],
    }


def _round_up(value: float) -> float:
    """Return the smallest number that is at least ``value`` and is 1, 2 or 5 times a power of ten. Return 1 if
    ``value`` is not positive.
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return float(f"{next(factor for factor in (1, 2, 5, 10) if factor * power >= value) * power:g}")
