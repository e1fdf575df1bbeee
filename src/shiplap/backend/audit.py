"""The OpInfo sweep of a built project: processes that may crash, and one verdict for each operator and dtype."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shiplap.backend.project import Project
from shiplap.errors import error

__all__ = ["Verdict", "audit", "operators", "table"]

State = Literal["native", "mixed", "fallback", "composite", "fail", "crash", "empty"]
_GRANULE = 24  # operators a process: an import costs 4 s, a crash costs the rest of its process


@dataclass(frozen=True)
class Verdict:
    """One operator and dtype: where it ran, and what was wrong. ``mixed`` is native with help of the CPU."""

    op: str
    dtype: str
    state: State
    samples: int
    native: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    failure: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def operators(project: Project) -> list[str]:
    """Names of the OpInfo database."""
    found: list[str] = json.loads(_lines(project, ["--list"])[0][0])
    return found


def _command(project: Project, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "shiplap.backend.sweep", str(project.package.resolve()), *arguments]


def _lines(project: Project, arguments: Sequence[str], timeout: float = 900) -> tuple[list[str], str]:
    """Output lines of one process, and how it ended if it did not end well."""
    try:
        run = subprocess.run(_command(project, arguments), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as e:
        text = e.stdout.decode() if isinstance(e.stdout, bytes) else e.stdout or ""
        return text.splitlines(), f"no answer within {timeout:.0f} s"
    if run.returncode == 0:
        return run.stdout.splitlines(), ""
    return run.stdout.splitlines(), f"exit status {run.returncode}: {run.stderr.strip()[-300:]}"


def audit(
    project: Project,
    names: Sequence[str],
    dtypes: Sequence[str],
    *,
    samples: int = 8,
    tell: Callable[[str], object] = str,
) -> Iterator[Verdict]:
    """Yield a verdict for each of ``names`` in each dtype. SL906 if the device cannot be loaded at all."""
    waiting = list(names)
    while waiting:
        batch, waiting = waiting[:_GRANULE], waiting[_GRANULE:]
        tell(f"{len(names) - len(waiting)}/{len(names)} operators")
        lines, end = _lines(
            project, ["--ops", ",".join(batch), "--dtypes", ",".join(dtypes), "--samples", str(samples)]
        )
        started: tuple[str, str] | None = None
        for row in map(json.loads, lines):
            if "start" in row:
                started = row["start"], row["dtype"]
                continue
            started = None
            yield _verdict(row)
        if end and started is None:
            raise error("SL906", where=str(project.package), what="backend cannot be swept", got=end,
                        expected="a device that loads", fix="run 'shiplap backend build' first")  # fmt: skip
        if started is not None:
            yield Verdict(*started, "crash", 0, failure=end)
            rest = batch[batch.index(started[0]) + 1 :]
            waiting = rest + waiting


def _verdict(row: dict[str, Any]) -> Verdict:
    fallback = tuple(f"{op}: {why}" for op, reasons in sorted(row["fallback"].items()) for why in reasons)
    state: State = "composite"
    if row["failure"]:
        state = "fail"
    elif not row["samples"]:
        state = "empty"
    elif row["native"]:
        state = "mixed" if fallback else "native"
    elif fallback:
        state = "fallback"
    return Verdict(row["op"], row["dtype"], state, row["samples"], tuple(row["native"]), fallback, row["failure"])


def table(verdicts: Sequence[Verdict]) -> dict[str, dict[str, int]]:
    """Counts by dtype and state."""
    counts: dict[str, Counter[str]] = {}
    for v in verdicts:
        counts.setdefault(v.dtype, Counter())[v.state] += 1
    return {dtype: dict(sorted(c.items())) for dtype, c in counts.items()}
