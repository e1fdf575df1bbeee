"""What every recorded result carries: where, with what and when it was measured, and a digest of what was measured.

``tests/test_results.py`` holds ``benchmarks/results/NAME.json`` to this, and ``benchmarks/NAME.py --json`` writes it.
"""

from __future__ import annotations

import ast
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
    """sha256 over names and contents of what ``patterns`` name, relative to the repository.

    A pattern is one of files, or ``FILE::NAME`` or ``FILE::CLASS.NAME``: that definition in a Python file alone.
    """
    parts: dict[str, bytes] = {}
    for pattern in patterns:
        if "::" in pattern:
            parts[pattern] = _definition(*pattern.split("::")).encode()
            continue
        parts |= {p.relative_to(ROOT).as_posix(): p.read_bytes() for p in ROOT.glob(pattern) if p.is_file()}
    if not parts:
        raise FileNotFoundError(f"nothing matches {', '.join(patterns)}")
    result = hashlib.sha256()
    for name in sorted(parts, key=lambda name: name.split("/")):
        result.update(name.encode() + b"\0" + parts[name] + b"\0")
    return result.hexdigest()


def _definition(file: str, name: str) -> str:
    """Source of a function, class or assigned name; a method as ``CLASS.NAME``."""
    source = (ROOT / file).read_text(encoding="utf-8")
    nodes: list[ast.stmt] = ast.parse(source).body
    for part in name.split("."):
        found = next((n for n in nodes if part in _names(n)), None)
        if found is None:
            raise FileNotFoundError(f"{file} defines no {name}")
        nodes = getattr(found, "body", [])
    return ast.get_source_segment(source, found) or ""


def _names(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [getattr(node, "name", ""), *(t.id for t in targets if isinstance(t, ast.Name))]


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
