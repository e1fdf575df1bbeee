"""What a run of the demonstration measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DemoResult", "Verdicts"]


@dataclass(frozen=True)
class Verdicts:
    """Of the audit of one op: how many checks said what, and the names of those that failed."""

    ok: int
    fail: int
    skip: int
    failed: tuple[str, ...]


@dataclass(frozen=True)
class DemoResult:
    """What was measured. Times in seconds (``_s``) or milliseconds (``_ms``); IoU of the class ground, held out."""

    graphs: int
    graph_breaks: int
    recompiles: int
    iou: float
    baseline_iou: float
    points_per_s: float
    compiled_ms: float
    eager_ms: float
    audits: dict[str, Verdicts]
    compile_s: float
    train_s: float
    total_s: float
    training_points: int
    held_out_points: int
    tile_points: tuple[int, int]
    tile_voxels: tuple[int, int]
    parameters: int
    losses: tuple[float, ...]
    environment: str
    html: str
    png: str

    def json(self) -> dict[str, Any]:
        """One object of plain values."""
        return asdict(self)
