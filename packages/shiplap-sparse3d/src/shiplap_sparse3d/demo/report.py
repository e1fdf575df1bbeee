"""The report as one self-contained HTML file: numbers, picture, loss curve, audit verdicts."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from shiplap_sparse3d.demo.result import DemoResult

__all__ = ["html", "rows"]

_WIDTH, _HEIGHT = 640, 200


def rows(result: DemoResult) -> list[tuple[str, str, str]]:
    """Return ``(label, value, note)`` of every headline number, for the terminal and the HTML report."""
    r = result
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
        ("training step, compiled", f"{r.compiled_ms:.1f} ms", "forward and backward, same kernels, same tile"),
        ("training step, eager", f"{r.eager_ms:.1f} ms", ""),
        ("first step", f"{r.compile_s:.1f} s", "compiles everything"),
        ("training", f"{r.train_s:.1f} s", f"{len(r.losses)} steps, the first included"),
    ]


def html(result: DemoResult, image: bytes) -> str:
    """Return the report as text. ``image`` is a PNG that is embedded."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("shiplap_sparse3d.demo"), undefined=StrictUndefined, autoescape=True)
    return environment.get_template("demo.html.jinja").render(
        rows=rows(result),
        audits=result.audits,
        scan=result.scan,
        better=[rule.name for rule in result.rules if rule.iou > result.iou],
        image=base64.b64encode(image).decode(),
        curve=_curve(result.losses),
        highest=max(result.losses),
        steps=len(result.losses),
        seconds=result.train_s,
        parameters=result.parameters,
        training_points=result.training_points,
        held_out_points=result.held_out_points,
        environment=result.environment,
    )


def _curve(losses: Sequence[float]) -> str:
    """Return the losses as the points of an SVG polyline."""
    across, top = _WIDTH / max(1, len(losses) - 1), max(losses) or 1.0
    return " ".join(f"{i * across:.1f},{_HEIGHT * (1 - v / top):.1f}" for i, v in enumerate(losses))
