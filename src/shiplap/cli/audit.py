"""``shiplap audit``: run the checks, print the findings, leave an exit status that CI can use."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shiplap.cli import console
from shiplap.cli.target import resolve
from shiplap.errors import ShiplapError

if TYPE_CHECKING:
    from shiplap.audit import CostCard, Finding
    from shiplap.op import Op

__all__ = ["command"]

EPILOG = """\b
Examples:
  shiplap audit mylib.ops                        every op that the module declares
  shiplap audit mylib/ops.py:rms_norm --seed 7   one op of a file, the samples of seed 7
  shiplap audit sparse3d::conv --check gradient --check fake
  shiplap audit mylib.ops --json > findings.json
  shiplap audit mylib.ops --html audit.html      one self-contained file

\b
Exit status:
  0  no check failed (a skipped check is listed with its reason)
  1  at least one check failed
  2  no such target, no such check, or the report cannot be written"""


def command(
    targets: Annotated[
        list[str], typer.Argument(metavar="TARGET...", help="module[:op], path/to/file.py[:op] or namespace::name.")
    ],
    check: Annotated[
        list[str] | None, typer.Option("--check", metavar="ID", help="Run only this check; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the samples; by default a fresh one.")] = None,
    device: Annotated[str, typer.Option("--device", help="Device to run on.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON value: all findings.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML report as well.")] = None,
    cost: Annotated[bool, typer.Option("--cost", help="Measure a call, too: raw, eager, compiled, captured.")] = False,
) -> None:
    """Hold declared ops to their declarations: values, gradients, strides, aliasing, bounds, compilation.

    Samples are generated from the declaration: empty and odd sizes, strides, dtypes, adversarial values. A finding
    names the sample that shows it, and one fix.
    """
    console.require_device(device)
    with console.own_stdout():
        ops = resolve(targets)
        if html is not None:
            console.write_text(html, "")  # before the work: an unwritable path is not worth a minute
        findings = _audit(ops, check, seed, device, quiet=json)
        costs = _costs(ops, device) if cost else []
    from shiplap.report import exit_code, facts

    _show(findings, costs, json, html, facts(target=" ".join(targets), seed=seed, device=device))
    if status := exit_code(findings):
        raise typer.Exit(status)


def _audit(ops: Sequence[Op], checks: list[str] | None, seed: int | None, device: str, *, quiet: bool) -> list[Finding]:
    """Findings of all ops, in the order of ``ops`` and checks."""
    from shiplap.audit import CHECKS, audit
    from shiplap.audit.checks import load

    for name in checks or ():
        load(name)  # an unknown name fails before the first op is run
    total = len(ops) * len(checks or CHECKS)
    findings: list[Finding] = []
    with _progress(total, quiet) as advance:
        for op in ops:
            try:
                findings += audit(op, checks=checks, seed=seed, device=device, progress=advance)
            except ShiplapError as e:
                if e.id != "SL502":
                    raise
                findings.append(_unsampled(op, e))  # the other ops are audited all the same
    return findings


def _costs(ops: Sequence[Op], device: str) -> list[CostCard]:
    """One card per op that has samples; the others are among the findings already."""
    from shiplap.audit import cost

    cards = []
    for op in ops:
        with contextlib.suppress(ShiplapError):
            cards.append(cost(op, device=device))
    return cards


def _unsampled(op: Op, e: ShiplapError) -> Finding:
    from shiplap.audit import Finding

    return Finding("samples", "fail", op.spec.name, f"{e.id}: {e.what}: {e.got}", fix=e.fix)


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[Finding], None]]:
    """A bar on stderr while someone is watching; nothing stays of it."""
    if quiet or not sys.stderr.isatty():
        yield lambda finding: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console.err(), transient=True) as bar:
        task = bar.add_task("audit", total=total)
        yield lambda finding: bar.update(task, advance=1, description=f"{finding.subject} {finding.check}")


def _show(
    findings: Sequence[Finding], costs: Sequence[CostCard], json: bool, html: Path | None, about: dict[str, str]
) -> None:
    from shiplap.report import findings_html, findings_json, print_costs, print_findings

    if html is not None:
        console.write_text(html, findings_html(findings, about, costs=costs))
    if json:
        typer.echo(findings_json(findings, about, costs), nl=False)
        return
    from rich.console import Console

    if costs:
        print_costs(costs, Console(highlight=False))
    print_findings(findings, Console(highlight=False))
    if html is not None:
        console.note(f"wrote {html}")
