"""The settings of the demonstration and its result."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["AuditVerdicts", "DemoResult", "DemoSettings", "FittedRule"]


@dataclass(frozen=True)
class DemoSettings:
    """The settings that a caller may choose.

    Attributes:
        quick: a smaller network and fewer steps; finishes in a minute.
        device: where everything runs, ``"cpu"`` or ``"cuda"``.
        out: folder for the report and the picture, created if absent.
        seed: of weights and tiles.
        audit: whether to audit the ops that were used.
        input: a classified scan to train and to be judged on; None for the packaged one.
        classes: codes of its classification that count as ground.
        unit: metres in one unit of its coordinates.
    """

    quick: bool = False
    device: str = "cpu"
    out: Path = Path("shiplap-report")
    seed: int = 0
    audit: bool = True
    input: Path | None = None
    classes: tuple[int, ...] = (2,)
    unit: float = 1.0


@dataclass(frozen=True)
class AuditVerdicts:
    """The result of the audit of one op: the number of checks by outcome, and the names of those that failed."""

    ok: int
    fail: int
    skip: int
    failed: tuple[str, ...]
    incomplete: int = 0


@dataclass(frozen=True)
class FittedRule:
    """The best of one family of rules with two numbers: the rule, its IoU on the training area, and held out."""

    name: str
    text: str
    fitted: float
    iou: float


@dataclass(frozen=True)
class DemoResult:
    """All measurements of a demonstration, times in seconds (``_s``) or milliseconds (``_ms``), and the paths of its
    files. ``iou`` is that of the class ground on the held-out area, ``scan`` the file that was read (None: the packaged
    one), and ``backend`` that of torch.compile.
    """

    graphs: int
    graph_breaks: int
    recompiles: int
    iou: float
    baseline_iou: float
    points_per_s: float
    compiled_ms: float
    eager_ms: float
    audits: dict[str, AuditVerdicts]
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
    rules: tuple[FittedRule, ...] = ()
    scan: str | None = None
    backend: str = "inductor"

    def json(self) -> dict[str, Any]:
        """Return the result as a dictionary of plain values for JSON."""
        return asdict(self)
