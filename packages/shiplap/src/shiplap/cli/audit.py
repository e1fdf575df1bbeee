"""``shiplap audit``: run the checks, print the findings, return an exit status for CI."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shiplap.cli import console
from shiplap.cli.target import resolve_targets
from shiplap.errors import ShiplapError
from shiplap.render.console import escape_json

if TYPE_CHECKING:
    from shiplap.audit import CostCard, Finding, Report
    from shiplap.audit.statement import SampleCollector
    from shiplap.dispatch import Op
    from shiplap.sampling.ledger import Cell

EPILOG = """\b
Examples:
  shiplap audit mylib.ops                        every op that the module declares
  shiplap audit mylib/ops.py:rms_norm --seed 7   one op of a file, the samples of seed 7
  shiplap audit mylib::rms_norm --check fake     an op of an installed family needs no module
  shiplap audit mylib.ops --json > findings.json
  shiplap audit mylib.ops --html audit.html      one self-contained file
  shiplap audit mylib.ops --statement audit.json digests and findings, for others to sign
  shiplap audit mylib.ops --device cuda --sanitizer memcheck
  shiplap audit mylib.ops --budget 300 --jobs 4
  shiplap audit --installed torchvision --out findings
                                                 ops that have no declaration
  shiplap audit --installed mylib --record pytest tests --baseline known.json

\b
Exit status:
  0  every op is proven: all required checks passed
  1  at least one check failed
  2  the target or the check does not exist, or the report cannot be written
  3  no check failed, and at least one required check could not examine everything"""


Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARGET...",
        help="module[:op], path/to/file.py[:op] or namespace::name; with --installed, the arguments of --record.",
    ),
]
Installed = Annotated[
    str,
    typer.Option(
        "--installed",
        metavar="PACKAGE",
        help="Audit every op that importing this package registers, without declarations: fakes, layouts, dtypes, "
        "gradients, sizes, malformed arguments.",
    ),
]
Functions = Annotated[
    bool,
    typer.Option(
        "--functions",
        help="With --installed: audit the package's autograd.Function classes as well, and the functions that call "
        "them.",
    ),
]
Namespaces = Annotated[
    list[str] | None,
    typer.Option("--namespace", help="With --installed: the ops of this namespace; repeatable."),
]
Record = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="SCRIPT",
        help="With --installed: run this script, or a module such as pytest, and audit the calls that it makes.",
    ),
]
Baseline = Annotated[
    Path | None,
    typer.Option(
        "--baseline", metavar="FILE", help="With --installed: findings that are known; only others set the exit status."
    ),
]
UpdateBaseline = Annotated[
    bool, typer.Option("--update-baseline", help="Write the findings to the file of --baseline.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FOLDER",
        help="With --installed: write a script of each finding, a page and the results here; a run that was "
        "interrupted goes on from them.",
    ),
]
Search = Annotated[
    float | None,
    typer.Option(
        "--search",
        metavar="SECONDS",
        help="With --installed: the most seconds of processor time of a search for calls of one op. By default 6. The "
        "search for a large package takes less.",
    ),
]
Minutes = Annotated[
    float,
    typer.Option(
        "--minutes",
        min=0.1,
        help="With --installed: the audit divides this time among the ops, and leaves out checks for which none is "
        "left. The program of --record takes its own time.",
    ),
]
Costs = Annotated[
    bool | None,
    typer.Option(
        "--cost/--no-cost",
        show_default=False,
        help="Measure a call: raw, eager, compiled, captured. By default unless --check is given.",
    ),
]
Tools = Annotated[
    list[str] | None,
    typer.Option(
        "--sanitizer",
        metavar="TOOL",
        help="Run the samples under this tool of compute-sanitizer, too: "
        "memcheck, racecheck, initcheck or synccheck; repeatable.",
    ),
]
Statement = Annotated[
    Path | None,
    typer.Option("--statement", metavar="FILE", help="Write the findings as an in-toto statement, with digests."),
]


Required = Annotated[
    str | None,
    typer.Option(
        "--require",
        metavar="SET",
        help="What a verdict rests on: 'full' for every check, 'asked' for those of --check. By default what was run.",
    ),
]


@dataclass
class _AuditResults:
    """The results of an audit of some ops. ``costs`` are the measured costs of calls, and ``unmeasured`` the reasons
    why costs of other ops are missing. ``samples`` has the examined samples by the name of the op. ``ledgers`` has the
    table of what was examined by the name of the op. ``reports`` has one report on each op.
    """

    findings: list[Finding] = field(default_factory=list)
    costs: list[CostCard] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)
    samples: dict[str, SampleCollector] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    ledgers: dict[str, tuple[Cell, ...]] = field(default_factory=dict)

    def add(self, part: _AuditResults) -> None:
        """Append the findings, costs, samples and ledgers in ``part``, the results of one more op, to these results."""
        self.findings += part.findings
        self.costs += part.costs
        self.unmeasured += part.unmeasured
        self.samples |= part.samples
        self.ledgers |= part.ledgers

    def make_reports(self, ops: Sequence[Op], required: Sequence[str], device: str) -> None:
        """Append one report on each of ``ops`` to ``reports``. It is made from the findings of all runs on the op on
        ``device`` and the names of the ``required`` checks.
        """
        from shiplap.audit import Report
        from shiplap.audit.report import device_without_kernel

        for op in ops:
            name = op.spec.name
            findings = tuple(f for f in self.findings if f.subject == name)
            cells, absent = self.ledgers.get(name, ()), device_without_kernel(op, device)
            self.reports.append(Report(name, findings, tuple(required), cells, absent))


def command(
    targets: Targets = None,
    check: Annotated[
        list[str] | None, typer.Option("--check", metavar="ID", help="Run only this check; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the samples; by default a fresh one.")] = None,
    device: Annotated[str, typer.Option("--device", help="Device to run on.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON value: all findings.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML report as well.")] = None,
    cost: Costs = None,
    sanitizer: Tools = None,
    statement: Statement = None,
    require: Required = None,
    budget: Annotated[float, typer.Option("--budget", metavar="SECONDS", help="Seconds for one op.")] = 300.0,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Ops audited at once.")] = 1,
    installed: Installed = "",
    functions: Functions = False,
    namespace: Namespaces = None,
    record: Record = None,
    baseline: Baseline = None,
    update_baseline: UpdateBaseline = False,
    out: Out = None,
    search: Search = None,
    minutes: Minutes = 20.0,
) -> None:
    """Run every check on declared ops, and report what each check found.

    Samples are generated from the declaration. They have empty and odd sizes, various strides and dtypes, and
    adversarial values. A finding names the sample that shows it, and one fix.
    """
    if update_baseline and (baseline is None or not installed):
        raise typer.BadParameter("it needs --installed and --baseline", param_hint="--update-baseline")
    if installed:
        if installed.endswith(".py"):  # a script of a finding imports the package by name
            raise typer.BadParameter("name a module, as in mylib.ops", param_hint="--installed")
        if check or sanitizer or statement or require or cost:
            raise typer.BadParameter("--check, --cost, --sanitizer, --statement and --require are for declared ops")
        from shiplap.cli.audit_installed import InstalledOptions, audit_package

        seed = secrets.randbelow(2**31) if seed is None else seed
        given = InstalledOptions(
            installed,
            namespace or [],
            record,
            targets or [],
            baseline,
            update_baseline,
            out,
            seed,
            search,
            jobs,
            functions,
            device,
            minutes,
        )
        if status := audit_package(given, as_json=json, html=html):
            raise typer.Exit(status)
        return
    console.require_device(device)
    if functions:
        raise typer.BadParameter("it needs --installed", param_hint="--functions")
    if not targets:
        raise typer.BadParameter("name a TARGET, or a package with --installed")
    with console.own_stdout():
        ops = resolve_targets(targets)
    # A new seed in each run finds more than a fixed one, and the findings name the seed for a repetition.
    seed = secrets.randbelow(2**31) if seed is None else seed
    if require not in (None, "full", "asked"):
        raise typer.BadParameter("'full' or 'asked'", param_hint="--require")
    # With --check the user wants the answer of some checks, and a measurement takes time of its own.
    measured = not check if cost is None else cost
    with console.own_stdout():
        for file in (html, statement):
            if file is not None:
                console.require_file(file)  # before the work: an unwritable path is not worth a minute
        asked = _AuditRequest(check, sanitizer or [], seed, device, budget, measured=measured, recorded=bool(statement))
        results = _audit_ops(ops, asked, jobs, quiet=json)
    from shiplap.audit import CHECKS
    from shiplap.render.facts import facts
    from shiplap.render.result import exit_status

    # A verdict on checks that were not run would always be incomplete, so those of --check suffice by default.
    required = CHECKS if require == "full" or not check else tuple(check)
    results.make_reports(ops, required, device)
    if statement is not None:
        from shiplap.audit.statement import write_audit_statement

        about = {"seed": seed, "device": device}
        write_audit_statement(
            statement, ops, results.findings, results.samples, results.costs, results.reports, **about
        )
        console.note(f"wrote {statement}")
    _show_results(results, json, html, facts(target=" ".join(targets), seed=seed, device=device), measured=measured)
    if status := exit_status(r.verdict for r in results.reports):
        raise typer.Exit(status)


@dataclass(frozen=True)
class _AuditRequest:
    """The options of an audit, which are the same for each op. ``checks`` are the names of the checks, or None for all.
    ``tools`` are those of compute-sanitizer to run. ``seed`` determines the samples, and ``device`` is where they lie.
    ``budget`` is the seconds for one op. If ``measured`` is true, costs are measured, and if ``recorded`` is true, the
    examined samples are recorded.
    """

    checks: list[str] | None
    tools: list[str]
    seed: int
    device: str
    budget: float
    measured: bool
    recorded: bool

    @property
    def runs(self) -> Iterator[tuple[list[str] | None, float]]:
        """The ``(checks, budget in seconds)`` of each run on one op, in order. The first run is that of the chosen
        checks, with None for ``checks`` if all of them are chosen.

        A run of each tool of compute-sanitizer follows. Each tool has its own budget, since it takes minutes.
        """
        yield self.checks, self.budget
        for tool in self.tools:
            yield [f"sanitizer:{tool}"], 600.0


def _audit_ops(ops: Sequence[Op], asked: _AuditRequest, jobs: int, *, quiet: bool) -> _AuditResults:
    """Return the results of all ops, in the order of ``ops``, audited by ``jobs`` threads. They are findings, records
    of the examined samples, and measured costs if requested. If ``quiet`` is true, no progress bar is shown. Where
    samples run in this process, as on a GPU, the ops are audited one after the other.

    If SIGINT or SIGTERM ends the work, the findings until then are returned, and the ops that were not done are
    incomplete.
    """
    from shiplap.audit import CHECKS, Finding
    from shiplap.audit.checks import load_check
    from shiplap.audit.child_process import STOPPED, can_isolate
    from shiplap.tuning.engine import tuning_progress

    extra = [f"sanitizer:{tool}" for tool in asked.tools]
    for name in (*(asked.checks or ()), *extra):
        load_check(name)  # an unknown name fails before the first op is run
    # Each check reports one finding, so the number of steps is known before the audit.
    total = len(ops) * (len(asked.checks or CHECKS) + len(extra))
    results = _AuditResults()
    until_now: list[Finding] = []
    # Threads suffice: each op is checked in processes of its own, for which a thread only waits. Where it is not,
    # threads would trace and capture at the same time, which Dynamo and a CUDA graph do not allow.
    isolates = can_isolate(asked.device)
    jobs, signals = jobs if isolates else 1, _Signals(raises=not isolates)
    # The threads end before children may begin again: otherwise a thread would audit its op to the end.
    with tuning_progress(False if quiet else None) as report, signals.handled(), ThreadPoolExecutor(jobs) as pool:
        done = count(1)

        def advance(finding: Finding) -> None:
            """Report to the progress bar that the check with the result ``finding`` is finished. ``report``, ``done``
            and ``total`` are those of the enclosing function.
            """
            until_now.append(finding)
            report(f"{finding.subject} {finding.check}", next(done), total)

        def audit_one(op: Op) -> _AuditResults:
            """Return the results of one op. If a signal has come meanwhile or before, they are incomplete."""
            part = _audit_op(op, asked, advance)
            if signals.came:  # what was left out is never right
                part.findings.append(Finding("samples", "incomplete", op.spec.name, STOPPED))
            return part

        try:
            if jobs > 1:
                for part in pool.map(audit_one, ops):
                    results.add(part)
            for op in ops if jobs == 1 else ():
                results.add(audit_one(op))
        except KeyboardInterrupt:
            ended = {finding.subject for finding in results.findings}
            results.findings += [finding for finding in until_now if finding.subject not in ended]
            names = [op.spec.name for op in ops if op.spec.name not in ended]
            results.findings += [Finding("samples", "incomplete", name, STOPPED) for name in names]
        if signals.came:
            console.note("ended by a signal: the report shows the checks until then")
    return results


class _Signals:
    """The signals SIGTERM and SIGINT of this process while ops are audited. ``came`` says whether one of them came."""

    def __init__(self, *, raises: bool) -> None:
        """Prepare to handle the signals. Audits in processes of their own are ended, and report which checks had ended
        before. If ``raises`` is true, audits run in this process, and ``KeyboardInterrupt`` ends them.
        """
        self.came, self._raises, self._owner = False, raises, os.getpid()

    def _handle(self, number: int, frame: object) -> None:
        """Handle the signal ``number``. A process that was forked meanwhile ends by it. The second signal ends this
        process as well, by ``KeyboardInterrupt``.
        """
        from shiplap.audit.child_process import stop_children

        if os.getpid() != self._owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        again, self.came = self.came, True
        stop_children()
        if self._raises or again:
            raise KeyboardInterrupt

    @contextmanager
    def handled(self) -> Iterator[_Signals]:
        """Return a context manager in whose body the signals are handled here. Its value is this object. Outside of the
        main thread nothing is handled.
        """
        from shiplap.audit.child_process import allow_children

        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        allow_children()
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        allow_children()  # not after a third signal, at which threads still run


def _audit_op(op: Op, asked: _AuditRequest, advance: Callable[[Finding], None]) -> _AuditResults:
    """Return all results of one op. They are the findings of its runs and, if requested, its measured costs.
    ``advance`` is called with each finding.

    If no sample arguments can be made (``SL502``), that error becomes a finding.
    """
    from shiplap.audit import audit
    from shiplap.audit.statement import SampleCollector

    results = _AuditResults()
    examined = results.samples.setdefault(op.spec.name, SampleCollector())
    for chosen, budget in asked.runs:
        try:
            report = audit(
                op,
                checks=chosen,
                seed=asked.seed,
                device=asked.device,
                progress=advance,
                budget=budget,
                examined=examined if asked.recorded else None,
            )
            results.findings += report
            results.ledgers.setdefault(op.spec.name, report.ledger)  # a sanitizer looks at no cell
        except ShiplapError as e:
            # SL502 concerns the declaration of this op alone. Any other error would stop the audit of every op.
            if e.id != "SL502":
                raise
            results.findings.append(_unsampled_finding(op, e))  # the other ops are audited all the same
            return results
    if asked.measured:
        _measure_cost(op, asked.device, results)
    return results


def _measure_cost(op: Op, device: str, results: _AuditResults) -> None:
    """Measure the time of a call of the op (its cost card) on ``device``, and append it to the costs in ``results``. If
    it cannot be measured, append the reason to ``results.unmeasured``.
    """
    from shiplap.audit import measure_cost, measure_cost_isolated

    card = measure_cost_isolated(op, device, measure_cost)
    if isinstance(card, str):
        results.unmeasured.append(f"{op.spec.name}: {card}")
    else:
        results.costs.append(card)


def _unsampled_finding(op: Op, e: ShiplapError) -> Finding:
    """Return the failed finding of an op for which no sample arguments could be made, from the error ``e``."""
    from shiplap.audit import Finding

    return Finding("samples", "fail", op.spec.name, f"{e.id}: {e.what}: {e.got}", fix=e.fix)


def _show_results(
    results: _AuditResults, json: bool, html: Path | None, about: dict[str, str], *, measured: bool
) -> None:
    """Print findings and costs, as text or, if ``json`` is true, as JSON. If ``html`` is not None, also write an HTML
    page with the facts ``about`` the run to that file. ``measured`` says whether costs were requested.
    """
    from shiplap.render.findings import findings_html, findings_json, print_costs, print_findings

    findings, costs = results.findings, results.costs
    for reason in results.unmeasured:
        console.note(f"no cost of {reason}")
    # An empty table of costs would look like a defect, so its reason is always printed.
    why = "; ".join(results.unmeasured) if measured else "not measured: only some checks were asked for, or --no-cost"
    if html is not None:
        console.write_text(html, findings_html(findings, about, costs=costs, no_costs=why, reports=results.reports))
    if json:
        text = findings_json(findings, about, costs, no_costs=why, reports=results.reports)
        console.echo(escape_json(text), end="")
        return
    print_costs(costs, no_costs=why)
    print_findings(findings, reports=results.reports)
    if html is not None:
        console.note(f"wrote {html}")
