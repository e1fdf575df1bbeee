"""What every recorded result carries: where, when, with what and at which commit it was measured, and what of.

``benchmarks/NAME.py --json`` writes ``benchmarks/results/NAME.json``. ``make records`` (``tools/records.py``) says
for which of them a source has changed since.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from records import changed_files, clean_commit, files_of

__all__ = ["ROOT", "changed_files", "cpu_model", "describe_machine", "record", "write"]

ROOT = Path(__file__).resolve().parents[1]


def cpu_model() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def describe_machine(packages: Sequence[str]) -> dict[str, Any]:
    """Return the ``device`` that this machine is, and the ``versions`` of Python, torch, numpy and ``packages``."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "numpy", *packages):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"device": f"{cpu_model()}, {os.cpu_count()} cores", "versions": versions}


def record(
    sources: Sequence[str],
    packages: Sequence[str],
    device: str = "",
    machines: Sequence[Mapping[str, Any]] = (),
    **measured: Any,
) -> dict[str, Any]:
    """``measured`` with its provenance.

    Args:
        sources: patterns of the files whose change makes the result stale, relative to the repository; never of built
            files. ``FILE::NAME`` says which definition of a Python file was measured.
        packages: distributions whose versions matter, besides torch and numpy.
        device: what it ran on, by default this CPU.
        machines: where the parts were measured, as :func:`describe_machine` says, if that may be another machine.
    """
    here = {**describe_machine(packages), **({"device": device} if device else {})}
    found = list({json.dumps(each): dict(each) for each in machines}.values()) or [here]
    for pattern in sources:
        files_of(pattern, ROOT)  # FileNotFoundError for a pattern that names nothing
    return {
        **found[0],
        **({"machines": found} if len(found) > 1 else {}),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": clean_commit(sources, ROOT),
        "sources": list(sources),
        **measured,
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """``result`` as JSON; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
