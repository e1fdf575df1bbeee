"""The circumstances of a result: versions, machine and date."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def facts(**more: object) -> dict[str, str]:
    """Return the circumstances of a result as a dict of strings by name, for the header of a report. The values in
    ``more``, such as ``seed`` and ``device``, come first, without those that are None. The versions of packages, the
    processor, the system and the date in UTC follow.
    """
    # A result without its circumstances cannot be compared with another one, so every report has this header.
    known = {
        "shiplap": _package_release("shiplap"),
        "torch": _package_release("torch"),
        "triton": _package_release("triton"),
        "python": platform.python_version(),
        "machine": f"{_processor_model()}, {_usable_cores()} cores",
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    # The facts of the report itself come first in the header.
    return {k: str(v) for k, v in more.items() if v is not None} | known


def nvidia_driver() -> str:
    """Return the version of NVIDIA's kernel driver, or ``unknown`` if the operating system does not report it."""
    try:
        # The file names the module and its build as well. The first number with a point is the version.
        match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        match = None
    return match[1] if match else "unknown"


def _package_release(package: str) -> str:
    """Return the installed version of ``package``, or the string ``not installed``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _usable_cores() -> int | None:
    """Return the number of processor cores that this process may use, or None if the operating system does not report
    it.
    """
    # A container may allow fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _processor_model() -> str:
    """Return the name of the processor from ``/proc/cpuinfo``. If it is not found there, return the name that Python's
    module ``platform`` gives, or ``unknown processor`` if that is empty.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"
