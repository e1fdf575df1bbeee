"""What an audit of an installed package has found: an op each, as plain values that are stored as JSON lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shiplap.render.lines import Line, TextTable, line, list_first

# Findings are shown in this order, the most harmful first.
HARM = (
    "crash",
    "uninitialized",
    "mutation",
    "gradient_mutation",
    "repeat",
    "layout",
    "gradient",
    "gradient_layout",
    "gradient_alone",
    "reference",
    "precision",
    "double_backward",
    "autocast",
    "compile",
    "fake",
    "alias",
)


def device_name(device: str) -> str:
    """Return the type of a device as a sentence names it."""
    return {"cpu": "the CPU", "cuda": "CUDA"}.get(device, device)


_MOST_ROWS = 20  # of the table for a terminal; more findings are shown as one row for each check
_MOST_LETTERS = 100  # of the text of a problem in that table


@dataclass(frozen=True)
class InstalledFinding:
    """A problem of one op or function, with the call that shows it.

    ``arguments`` maps names of arguments to the Python expressions that build them. ``origin`` says where the call
    comes from, and ``note`` what was changed in it. ``script`` is the name of the file that shows the finding again, or
    is empty. ``source`` is the Python expression for a function of a package, and is empty for a registered op.
    """

    op: str
    check: str
    problem: str
    arguments: Mapping[str, str]
    origin: str
    note: str = ""
    script: str = ""
    source: str = ""

    @property
    def key(self) -> str:
        """The names of the op and the check in one string. It identifies the finding in a baseline (a file of known
        findings).
        """
        return f"{self.op} {self.check}"


@dataclass(frozen=True)
class InstalledOp:
    """The audit result of one op or function. ``calls`` is the number of calls that it accepted, and ``checks``
    the number of checks that were made on them.

    ``unreached`` says why the op accepted no call, and is empty if it accepted one. ``missing`` names registrations
    that torch needs and the op lacks. ``unreproduced`` names the checks whose findings a new process did not show
    again. ``unchecked`` is the number of checks that were left out for want of time, or behind crashes. ``complete`` is
    false while levels of checks lie ahead.
    """

    op: str
    calls: int = 0
    checks: int = 0
    unreached: str = ""
    findings: tuple[InstalledFinding, ...] = ()
    missing: tuple[str, ...] = ()
    unreproduced: tuple[str, ...] = ()
    unchecked: int = 0
    complete: bool = True


@dataclass
class InstalledReport:
    """The results of all ops of a package. ``known`` holds the keys of the findings that a baseline (a file of known
    findings) lists. ``device`` is the type of the device on which calls were searched.
    """

    package: str
    version: str
    ops: list[InstalledOp] = field(default_factory=list)
    known: frozenset[str] = frozenset()
    device: str = "cpu"

    @property
    def findings(self) -> list[InstalledFinding]:
        """The findings of all ops, the most harmful kind of check first."""
        found = [f for op in self.ops for f in op.findings]
        return sorted(found, key=lambda f: (HARM.index(f.check) if f.check in HARM else len(HARM), f.op))

    @property
    def new(self) -> list[InstalledFinding]:
        """The findings that are not in the baseline, which is a file of known findings."""
        return [f for f in self.findings if f.key not in self.known]

    @property
    def subjects(self) -> str:
        """How many ops and functions were audited, as text. Functions are left out if there are none."""
        # The address of a function has one colon, the name of an op has two.
        functions = sum("::" not in op.op for op in self.ops)
        return f"{len(self.ops) - functions} ops" + (f", {functions} functions" if functions else "")

    def summary(self) -> dict[str, Any]:
        """Return the report as a dict of values that JSON can represent, for ``--json``."""
        reached = [op for op in self.ops if op.calls]
        return {
            "package": self.package,
            "version": self.version,
            "device": self.device,
            "ops": len(self.ops),
            "reached": len(reached),
            "findings": [asdict(f) | {"new": f.key not in self.known} for f in self.findings],
            "missing": {op.op: list(op.missing) for op in self.ops if op.missing},
            "unreached": {op.op: op.unreached for op in self.ops if not op.calls},
            "unreproduced": {op.op: list(op.unreproduced) for op in self.ops if op.unreproduced},
            "unchecked": {op.op: op.unchecked for op in self.ops if op.unchecked},
        }

    def lines(self) -> Iterator[Line | TextTable]:
        """Yield the report for a terminal, as lines and a table of the findings."""
        reached = [op for op in self.ops if op.calls]
        # Ops for other devices are no failure of the search.
        absent = [op for op in self.ops if op.unreached.startswith("no kernel")]
        head = f"{self.package} {self.version}: {self.subjects}, {len(reached)} reached"
        yield line(
            head + (f", {len(absent)} without a kernel for {device_name(self.device)}" if absent else ""), "bold"
        )
        if len(self.findings) > _MOST_ROWS:
            yield TextTable(("check", "findings", "ops", "first problem"), self._check_rows(), unwrapped=("check",))
            yield line("one row for each check; the page of --html or --out and --json show every finding", "dim")
        elif rows := tuple(_finding_row(f, f.key in self.known) for f in self.findings):
            yield TextTable(("op", "check", "problem"), rows, unwrapped=("check",))
        else:
            yield line("no finding")
        if any(f.script for f in self.findings):
            yield line("the folder of --out has a script for each finding, and a page with their whole texts", "dim")
        missing = Counter(text for op in self.ops for text in op.missing)
        for text, count in missing.most_common():
            yield line(f"{count} of {len(self.ops)}: {text}", "dim")
        if unreached := [op.op for op in self.ops if not op.calls and op not in absent]:
            yield line(f"{len(unreached)} not reached: {list_first(unreached)}", "dim")
        if unchecked := sum(op.unchecked for op in self.ops):
            late = [op.op for op in self.ops if op.unchecked]
            yield line(f"{unchecked} checks left out for time, or behind crashes, of {list_first(late)}", "dim")
        if unreproduced := [op.op for op in self.ops if op.unreproduced]:
            yield line(f"a fresh process did not show findings again, left out: {list_first(unreproduced)}", "dim")

    def _check_rows(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Return one table row for each check that has findings, as ``(text, style)`` cells, so that the findings of a
        large package fit on one screen. A row shows how many findings there are, the first ops and one problem.
        """
        groups: dict[str, list[InstalledFinding]] = {}
        for f in self.findings:
            groups.setdefault(f.check, []).append(f)
        rows = []
        for check, found in groups.items():
            new = sum(f.key not in self.known for f in found)
            count = str(len(found)) if new == len(found) else f"{len(found)}, {new} new"
            names = list_first([f.op.rpartition(":")[2] for f in found])
            rows.append(
                ((check, "red" if new else "dim"), (count, ""), (names, ""), (_shortened(found[0].problem), ""))
            )
        return tuple(rows)


def _shortened(problem: str) -> str:
    """Return the text of a problem on one line, cut so that a table of twenty of them fits on a screen."""
    text = " ".join(problem.split())
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def _finding_row(f: InstalledFinding, known: bool) -> tuple[tuple[str, str], ...]:
    """Return the table row of a finding as ``(text, style)`` cells. If ``known`` is true, the baseline file lists the
    finding, and the row is dimmed and marked as known. Otherwise it is shown as new.
    """
    style = "dim" if known else "red"
    problem = f"{_shortened(f.problem)}{f' [{f.note}]' if f.note else ''}{' (in the baseline)' if known else ''}"
    return (f.op, ""), (f.check, style), (problem, "dim" if known else "")
