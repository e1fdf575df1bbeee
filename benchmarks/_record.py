"""What every recorded result carries: where, with what and when it was measured, and a digest of what was measured.

``tests/test_results.py`` holds ``benchmarks/results/NAME.json`` to this, and ``benchmarks/NAME.py --json`` writes it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["FIELDS", "ROOT", "cpu_model", "digest", "record", "write"]

ROOT = Path(__file__).resolve().parents[1]
FIELDS = "device", "versions", "date", "sources", "digest"


def cpu_model() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def digest(patterns: Sequence[str]) -> str:
    """sha256 over names and contents of the files that ``patterns`` match, relative to the repository."""
    files = sorted({path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()})
    if not files:
        raise FileNotFoundError(f"nothing matches {', '.join(patterns)}")
    result = hashlib.sha256()
    for path in files:
        result.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return result.hexdigest()


def record(sources: Sequence[str], packages: Sequence[str], device: str = "", **measured: Any) -> dict[str, Any]:
    """``measured`` with its provenance.

    Args:
        sources: patterns of the files whose change makes the result stale; never of built files.
        packages: distributions whose versions matter, besides torch and numpy.
        device: what it ran on, by default this CPU.
    """
    versions = {"python": platform.python_version()}
    for name in ("torch", "numpy", *packages):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "device": device or f"{cpu_model()}, {os.cpu_count()} cores",
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "sources": list(sources),
        "digest": digest(sources),
        **measured,
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """``result`` as JSON; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
