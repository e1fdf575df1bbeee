"""The settings of the demonstration and its result."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["AuditVerdicts", "DemoResult", "DemoSettings", "FittedRule"]


@dataclass(frozen=True)
class DemoSettings:
    """The settings of the demonstration that a caller can choose.

    Attributes:
        quick: whether to use a smaller network and fewer training steps. A run then takes a minute.
        device: where everything runs, ``"cpu"`` or ``"cuda"``.
        out: folder for the report and the picture, created if absent.
        seed: the seed of weights and tiles.
        audit: whether to audit the ops that the network uses.
        input: a classified scan for training and evaluation, or None for the packaged one.
        classes: the class codes of the scan that count as ground.
        unit: the length in metres of one unit of the scan's coordinates.
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
    """The result of the audit of one op. ``ok``, ``fail``, ``skip`` and ``incomplete`` are the numbers of checks with
    this verdict. ``failed`` holds the names of the checks that failed.
    """

    ok: int
    fail: int
    skip: int
    failed: tuple[str, ...]
    incomplete: int = 0


@dataclass(frozen=True)
class FittedRule:
    """The best rule of one family of rules with two numbers. ``name`` is the family, and ``text`` describes the rule
    with its numbers. ``fitted`` is its IoU (intersection over union) on the training area, and ``iou`` that on the
    held-out area.
    """

    name: str
    text: str
    fitted: float
    iou: float


@dataclass(frozen=True)
class DemoResult:
    """All measurements of a demonstration, and the paths of its files. Times are in seconds (``_s``) or milliseconds
    (``_ms``). ``iou`` is the intersection over union of ground on the held-out area. ``scan`` is the file that was
    read, or None for the packaged scan. ``backend`` is that of ``torch.compile``. ``tile_points`` and
    ``tile_voxels`` are the smallest and the largest number in a tile.
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
        """Return the result as a dictionary by field name, with dataclasses inside it converted to dictionaries, for
        JSON.
        """
        return asdict(self)
