"""Findings as text, JSON and HTML. Anything with the fields of a finding will do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shiplap.report.html import render_html

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["exit_code", "findings_html", "findings_json", "print_findings"]

FIELDS = ("check", "verdict", "subject", "evidence", "input", "fix", "reproducer")
STYLES = {"ok": "green", "fail": "bold red", "skip": "dim"}


class Finding(Protocol):
    """What is shown of a finding."""

    @property
    def check(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def subject(self) -> str: ...
    @property
    def evidence(self) -> str: ...
    @property
    def input(self) -> str: ...
    @property
    def fix(self) -> str: ...
    @property
    def reproducer(self) -> str: ...


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when nothing failed, 1 otherwise; a skipped check is no failure."""
    return int(any(f.verdict == "fail" for f in findings))


def _groups(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.subject, []).append(finding)
    return groups


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter(f.verdict for f in findings)
    return ", ".join(f"{counts[v]} {word}" for v, word in (("fail", "failed"), ("ok", "ok"), ("skip", "skipped")))


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """A table per op, then each failure with its input, fix and reproducer."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    for subject, group in _groups(findings).items():
        table = Table(title=Text(subject), title_justify="left", box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for f in group:
            table.add_row(Text(f.check), Text(f.verdict, STYLES.get(f.verdict, "")), Text(f.evidence))
        console.print(table, "")
    for f in findings:
        if f.verdict == "fail":
            _print_failure(f, console)
    console.print(Text(_summary(findings)))


def _print_failure(f: Finding, console: Console) -> None:
    from rich.text import Text

    console.print(Text(f"{f.subject}: {f.check}", STYLES["fail"]))
    for name in ("evidence", "input", "fix"):
        if value := getattr(f, name):
            console.print(Text(f"  {name:<9}{value}"), soft_wrap=True)
    if f.reproducer:  # flush left: it is there to be copied
        console.print("", Text(f.reproducer), sep="\n", soft_wrap=True)
    console.print()


def findings_json(findings: Sequence[Finding], facts: Mapping[str, str]) -> str:
    """``{"facts": ..., "findings": [...]}``, two spaces deep, with a final newline."""
    rows = [{name: getattr(f, name) for name in FIELDS} for f in findings]
    value: dict[str, Any] = {"facts": dict(facts), "findings": rows}
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def findings_html(findings: Sequence[Finding], facts: Mapping[str, str], title: str = "shiplap audit") -> str:
    """One page that needs nothing else."""
    return render_html(
        "findings.html.jinja", title=title, facts=facts, groups=_groups(findings), summary=_summary(findings),
        failed=exit_code(findings),
    )  # fmt: skip
