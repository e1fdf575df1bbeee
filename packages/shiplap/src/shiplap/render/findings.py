"""Findings as text, JSON and HTML. Any object with the fields of a finding can be printed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shiplap.render.console import make_console
from shiplap.render.html import render_html
from shiplap.render.result import STYLES

if TYPE_CHECKING:
    from rich.console import Console

# The fields that the JSON report has of a cost card, and below those of a finding.
COSTS = ("subject", "device", "input", "binding", "raw_ns", "eager_ns", "compiled_ns", "captured_ns", "notes")
FIELDS = ("check", "verdict", "subject", "evidence", "input", "fix", "reproducer", "varied", "example")
HEADING, NONE = "ns per call, smallest sample", "no op has samples"
WORDS = (("fail", "failed"), ("incomplete", "incomplete"), ("ok", "ok"), ("skip", "do not apply"))


class CostCardFields(Protocol):
    """The fields of a cost card that a report reads."""

    @property
    def subject(self) -> str:
        """The name of the op that was timed."""

    @property
    def device(self) -> str:
        """The device on which the op was timed."""

    @property
    def input(self) -> str:
        """The label of the sample on which the op was timed."""

    @property
    def binding(self) -> str:
        """The implementation that ran an eager call. It is ``"native"`` for a compiled binding, ``"python"``, or the
        name of the kernel.
        """

    @property
    def raw_ns(self) -> float | None:
        """The nanoseconds per call of the kernel alone, or None if they were not measured."""

    @property
    def eager_ns(self) -> float:
        """The nanoseconds of one eager call."""

    @property
    def compiled_ns(self) -> float | None:
        """The nanoseconds of one call in code that ``torch.compile`` compiled, or None if they were not measured."""

    @property
    def captured_ns(self) -> float | None:
        """The nanoseconds of one call in the replay of a CUDA graph, or None if they were not measured."""

    @property
    def notes(self) -> Sequence[str]:
        """The reasons why times were not measured, each a sentence. The sequence is empty if all were measured."""


class FindingFields(Protocol):
    """The fields of a finding that a report reads."""

    @property
    def check(self) -> str:
        """The name of the check that made the finding."""

    @property
    def verdict(self) -> str:
        """The outcome of the check, which is ``ok``, ``fail``, ``skip`` or ``incomplete``."""

    @property
    def subject(self) -> str:
        """The name of the op or other object that was checked."""

    @property
    def evidence(self) -> str:
        """A text that describes what the check observed."""

    @property
    def input(self) -> str:
        """The label of the sample that shows the finding, or an empty string if there is none."""

    @property
    def fix(self) -> str:
        """The action that would correct a failure, or an empty string if there is none."""

    @property
    def example(self) -> str:
        """A small input with its wrong result in one line, or an empty string if there is none."""

    @property
    def reproducer(self) -> str:
        """The Python source code that shows the failure again, or an empty string if there is none."""

    @property
    def varied(self) -> str:
        """The properties of samples (such as ``layout``) in which every failing sample differs from the simplest
        sample, joined in one string. It is empty if the simplest sample fails, too.
        """


class CellFields(Protocol):
    """The fields that a page reads of one cell of a ledger. A ledger is a table that counts the checked samples for
    each property of samples and each requirement of the op.
    """

    @property
    def axis(self) -> str:
        """The property of samples that the cell's row stands for, such as ``size``."""

    @property
    def obligation(self) -> str:
        """The requirement that the cell's column stands for, such as ``value`` or ``gradient``."""

    @property
    def looked_by(self) -> str:
        """The name of the check that must examine the samples of the cell. It is an empty string if no check has to."""

    @property
    def state(self) -> str:
        """The state of the cell, such as ``ok``, ``untouched`` (no sample was checked) or ``does not apply``."""

    @property
    def samples(self) -> int:
        """The number of samples that were checked for this cell."""

    @property
    def reason(self) -> str:
        """The reason why the cell does not apply, or an empty string if it does."""


class Report(Protocol):
    """The fields of the report on one op that a page reads."""

    @property
    def subject(self) -> str:
        """The name of the op."""

    @property
    def verdict(self) -> str:
        """The verdict on the op, which is ``proven``, ``failed`` or ``incomplete``."""

    @property
    def headline(self) -> str:
        """One line of text with the name of the op, the verdict and the reason for the verdict."""

    @property
    def required(self) -> Sequence[str]:
        """The names of the checks that must have run completely for the verdict ``proven``."""

    @property
    def failed(self) -> Sequence[str]:
        """The names of the checks of the op that failed."""

    @property
    def missing(self) -> Sequence[tuple[str, str]]:
        """The required checks that were not made completely, as pairs of the check's name and the reason."""

    @property
    def causes(self) -> Sequence[Sequence[FindingFields]]:
        """The failed findings in groups, where the findings of a group have one cause. The finding that shows the cause
        most directly comes first in its group.
        """

    @property
    def ledger(self) -> Sequence[CellFields]:
        """The cells of the report's ledger. A ledger is a table that counts the checked samples for each property of
        samples and each requirement of the op.
        """


def _findings_by_subject(findings: Sequence[FindingFields]) -> dict[str, list[FindingFields]]:
    """Return a dict from each subject, such as the name of an op, to the list of its findings. The order of
    ``findings`` is kept.
    """
    groups: dict[str, list[FindingFields]] = {}
    for finding in findings:
        groups.setdefault(finding.subject, []).append(finding)
    return groups


def _count_verdicts(findings: Sequence[FindingFields]) -> str:
    """Return the number of findings with each verdict in one line of text, such as ``1 failed, 0 incomplete, 8 ok, 2 do
    not apply``.
    """
    counts = Counter(f.verdict for f in findings)
    return ", ".join(f"{counts[v]} {word}" for v, word in WORDS)


def print_findings(
    findings: Sequence[FindingFields], console: Console | None = None, reports: Sequence[Report] = ()
) -> None:
    """Print the findings, the failures and the reports on ``console``, or on stdout if it is None.

    A table of the findings of each subject comes first. Each failure follows with its input, fix and reproducer. The
    ledgers (tables that count the checked samples) and verdicts of ``reports`` come last.
    """
    from rich.table import Table
    from rich.text import Text

    console = console or make_console()
    for subject, group in _findings_by_subject(findings).items():
        table = Table(title=Text(subject), title_justify="left", box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        # Evidence is folded and never cut: the end of a long line is often the part that matters.
        table.add_column(overflow="fold")
        for f in group:
            table.add_row(Text(f.check), Text(f.verdict, STYLES[f.verdict][0]), Text(f.evidence))
        console.print(table, "")
    grouped = {id(f) for report in reports for cause in report.causes for f in cause}
    causes = [cause for report in reports for cause in report.causes]
    # A failure that no report groups is a cause of its own.
    causes += [(f,) for f in findings if f.verdict == "fail" and id(f) not in grouped]
    for first, *symptoms in causes:
        _print_failure(first, console, symptoms)
    console.print(Text(_count_verdicts(findings)))
    for report in reports:
        if report.ledger:
            _print_ledger(report, console)
    for report in reports:
        # The verdict is the last line, where a terminal shows it.
        console.print(Text(report.headline, STYLES[report.verdict][0]), soft_wrap=True)


def ledger_table(ledger: Sequence[CellFields]) -> tuple[list[str], list[tuple[str, list[tuple[str, str]]]]]:
    """Return the headings and rows of a table that shows a ledger, the counts of checked samples.

    The headings are the requirements of the op, such as ``gradient``. Each row is a pair of a property of samples and
    the row's cells. A cell is a pair of text and the name of its style in ``STYLES``. The text is the number of
    samples, or ``-`` if the requirement does not apply. Without samples it is ``?`` for a required cell, and empty for
    an optional one.
    """
    obligations = list(dict.fromkeys(c.obligation for c in ledger))
    rows: dict[str, list[tuple[str, str]]] = {}
    for cell in ledger:
        style = "skip" if cell.state == "does not apply" else "fail" if cell.looked_by and not cell.samples else "ok"
        mark = {"skip": "-", "fail": "?"}.get(style, str(cell.samples or ""))
        rows.setdefault(cell.axis, []).append((mark, style if cell.looked_by else "skip"))
    return obligations, list(rows.items())


def _print_ledger(report: Report, console: Console) -> None:
    """Print on ``console`` how many samples the checks of ``report`` have examined. The printed table has a row for
    each property of samples, such as ``size``, and a column for each requirement of the op, such as ``gradient``.
    """
    from rich.table import Table
    from rich.text import Text

    obligations, rows = ledger_table(report.ledger)
    title = Text(f"{report.subject}: samples looked at (- does not apply, ? required and untouched, dim: optional)")
    # One blank between columns: the table of all obligations then fits into 80 columns.
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for obligation in obligations:
        table.add_column(
            # Short headings keep the table narrow.
            obligation.replace("second gradient", "second").replace("determinism", "determ."),
            justify="right",
            overflow="fold",
        )
    for axis, marks in rows:
        table.add_row(Text(axis, "dim"), *(Text(mark, STYLES[style][0]) for mark, style in marks))
    console.print(table, "")


def _print_failure(f: FindingFields, console: Console, symptoms: Sequence[FindingFields] = ()) -> None:
    """Print on ``console`` the finding ``f``, which shows the cause of a failure, with its input, fix and reproducer.
    Print one line for each finding of ``symptoms``, which fails for the same reason.
    """
    from rich.text import Text

    console.print(Text(f"{f.subject}: {f.check}", STYLES["fail"][0]))
    shown = {"evidence": f.evidence, "input": f.input, "e.g.": f.example, "fix": f.fix}
    for name, value in shown.items():
        if value:
            console.print(Text(f"  {name:<9}{value}"), soft_wrap=True)
    for other in symptoms:
        console.print(Text(f"  {'also':<9}{other.check}: {other.evidence}", "dim"), soft_wrap=True)
    if f.reproducer:  # flush left: it is there to be copied
        console.print("", Text(f.reproducer), sep="\n", soft_wrap=True)
    console.print()


def print_costs(costs: Sequence[CostCardFields], console: Console | None = None, no_costs: str = "") -> None:
    """Print a table of the nanoseconds per call of each op on ``console``, or on stdout if it is None. The reasons for
    times that were not measured follow. Without costs, print one line with ``no_costs``, the reason, or with a default
    reason if it is empty.
    """
    from rich.table import Table
    from rich.text import Text

    console = console or make_console()
    if not costs:
        console.print(Text(f"{HEADING}: {no_costs or NONE}", "dim"), "", sep="\n", soft_wrap=True)
        return
    table = Table(title=Text(HEADING), title_justify="left", box=None, pad_edge=False)
    for heading in ("", "bound by"):
        table.add_column(heading, overflow="fold")
    for heading in ("raw", "eager", "compiled", "captured"):
        table.add_column(heading, justify="right", no_wrap=True)
    for c in costs:
        times = [in_ns(t) for t in (c.raw_ns, c.eager_ns, c.compiled_ns, c.captured_ns)]
        table.add_row(Text(c.subject), Text(c.binding), *times)
    console.print(table)
    # Many ops share the reason for an empty column, which is printed once.
    for note in dict.fromkeys(n for c in costs for n in c.notes):
        console.print(Text(f"  {note}", "dim"), soft_wrap=True)
    console.print()


def in_ns(time: float | None) -> str:
    """Return ``time``, in nanoseconds, as a whole number with thousands separators. Return ``-`` for None, which stands
    for a time that was not measured.
    """
    return "-" if time is None else f"{time:,.0f}"


def findings_json(
    findings: Sequence[FindingFields],
    facts: Mapping[str, str],
    costs: Sequence[CostCardFields] = (),
    no_costs: str = "",
    reports: Sequence[Report] = (),
) -> str:
    """Return the findings as indented JSON text with a final newline.

    The JSON object has the keys ``facts``, ``verdicts``, ``findings`` and ``costs``. ``verdicts`` maps the subject of
    each report to its verdict, checks and ledger. If ``costs`` is empty, the object also has ``no_costs``, the reason.
    An empty ``no_costs`` stands for a default reason.
    """
    rows = [{name: getattr(f, name) for name in FIELDS} for f in findings]
    cards = [{name: getattr(c, name) for name in COSTS} for c in costs]
    judged = {
        report.subject: {
            "verdict": report.verdict,
            "required": list(report.required),
            "failed": list(report.failed),
            "missing": dict(report.missing),
            "ledger": [
                {
                    name: getattr(cell, name)
                    for name in ("axis", "obligation", "looked_by", "state", "samples", "reason")
                }
                for cell in report.ledger
            ],
        }
        for report in reports
    }
    value: dict[str, Any] = {"facts": dict(facts), "verdicts": judged, "findings": rows, "costs": cards}
    if not costs:
        value["no_costs"] = no_costs or NONE
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def findings_html(
    findings: Sequence[FindingFields],
    facts: Mapping[str, str],
    title: str = "shiplap audit",
    costs: Sequence[CostCardFields] = (),
    no_costs: str = "",
    reports: Sequence[Report] = (),
) -> str:
    """Return one HTML page, without external files, with the findings, verdicts, ledgers and costs.

    The page shows ``facts`` in its header under the heading ``title``. If ``costs`` is empty, it shows ``no_costs``
    instead, or a default reason if that is empty, too.
    """
    return render_html(
        "findings.html.jinja",
        title=title,
        facts=facts,
        groups=_findings_by_subject(findings),
        summary=_count_verdicts(findings),
        failed=any(f.verdict == "fail" for f in findings),
        verdicts=[(report.verdict, report.headline) for report in reports],
        ledgers={report.subject: ledger_table(report.ledger) for report in reports if report.ledger},
        costs=costs,
        no_costs=no_costs or NONE,
        heading=HEADING,
        ns=in_ns,
    )
