"""``shiplap audit --installed PACKAGE``: audit ops and functions without a declaration, in own processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shiplap import safe_io
from shiplap.cli import console
from shiplap.cli.pytest_share import share_arguments
from shiplap.cli.recording import run_recorded
from shiplap.cli.target import find_in_current_folder, import_home
from shiplap.errors import ShiplapError, error

if TYPE_CHECKING:
    from shiplap.audit.installed.apart import RecordedCalls
    from shiplap.audit.installed.engine import Subject
    from shiplap.audit.installed.functions import FoundFunctions
    from shiplap.audit.installed.recipes import CallRecipe
    from shiplap.audit.installed.result import InstalledOp
    from shiplap.torch_private.dispatcher_library import Overload

RESULTS = "results.jsonl"  # in the folder of --out: one line an op, from which an interrupted run goes on
PAGE = "index.html"
_SEARCH_SECONDS = 6.0  # of processor time, the most that one search for calls of an op takes


@dataclass(frozen=True)
class InstalledOptions:
    """The options of ``--installed``. ``package`` is the audited package. If ``namespaces`` is not empty, the ops of
    these namespaces are audited in place of the package's. ``arguments`` are those of the script ``record``, whose
    calls are recorded. ``baseline`` is the file of known findings, which is written anew if ``update_baseline`` is
    true. ``folder`` is that of the results. ``seed`` determines the samples. ``seconds`` limits each search for
    calls of one op, or is None for 6 seconds. ``jobs`` is the number of ops
    that are audited at once. If ``functions`` is true, the package's ``autograd.Function`` classes and the functions
    that call them are audited as well. ``device`` is the type of the device on which calls are searched; recorded calls
    run where they were recorded. The ops divide ``minutes``, which are those of the audit without the recorded program.
    """

    package: str
    namespaces: Sequence[str]
    record: Path | None
    arguments: Sequence[str]
    baseline: Path | None
    update_baseline: bool
    folder: Path | None
    seed: int
    seconds: float | None
    jobs: int
    functions: bool = False
    device: str = "cpu"
    minutes: float = 20.0


def audit_package(options: InstalledOptions, *, as_json: bool, html: Path | None) -> int:
    """Audit the torch ops of an installed package, print a report, and return the exit status. The report is JSON if
    ``as_json`` is true, and otherwise text. If ``html`` is not None, write an HTML report to this file as well. The
    status is not 0 if a finding is missing in the baseline, a file of known findings.

    Raises:
        ShiplapError: ``SL501`` if there is no such package or no op in it, ``SL601`` if it cannot be imported,
            ``SL602`` for a baseline that is not readable, ``SL605`` for a device that this machine does not have.
    """
    from shiplap.audit.installed.result import InstalledReport
    from shiplap.render.facts import facts
    from shiplap.scaffold.package import installed_version

    known = _read_baseline(options)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with console.own_stdout():
        ops = _audit_ops(options, quiet=as_json)
    report = InstalledReport(options.package, installed_version(options.package), ops, known, options.device)
    # The new baseline lists all findings of this run, those of the old one included.
    if options.update_baseline and options.baseline is not None:
        keys = sorted({f.key for f in report.findings})
        console.write_text(options.baseline, json.dumps({"package": options.package, "known": keys}, indent=1) + "\n")
        console.note(f"wrote {options.baseline}: {len(keys)} findings")
    for page in filter(None, (html, options.folder and options.folder / PAGE)):
        title = f"{report.package} {report.version}"
        about = facts(target=title, seed=options.seed, device=options.device)
        console.write_page(page, "installed.html.jinja", title, about, report=report, summary=report.summary())
    console.show(report.summary(), report.lines(), as_json=as_json)
    # With --update-baseline the new findings are known from now on.
    return console.FAILED if report.new and not options.update_baseline else 0


def _audit_ops(options: InstalledOptions, *, quiet: bool) -> list[InstalledOp]:
    """Return the audit results of all ops of the package, in order. Results that an earlier run has stored in the
    folder of ``--out`` are used, and their ops are not audited again. If ``quiet`` is true, no progress is shown.
    """
    from shiplap.audit.installed.engine import InstalledRequest
    from shiplap.audit.installed.schedule import audit_installed_ops, prepare_process, stored_results
    from shiplap.scaffold.package import installed_version
    from shiplap.tuning.engine import tuning_progress

    ops, recorded = _find_and_record(options)
    if recorded.failed:
        console.note(f"{options.record} ended early: {recorded.failed}; its calls until then are used")
    version = installed_version(options.package)
    file = None if options.folder is None else options.folder / RESULTS
    stored = {} if file is None else stored_results(file, version)
    if stored:
        console.note(f"{len(stored)} ops are taken from {file}; remove it to audit them again")
    if options.device == "cpu":  # before the ops are audited in forks, which inherit the imported compiler
        prepare_process()
    open_ops = {name: op for name, op in ops.items() if name not in stored}
    seconds = _SEARCH_SECONDS if options.seconds is None else options.seconds
    request = InstalledRequest(options.package, version, options.seed, seconds, options.folder, options.device)

    def keep(result: InstalledOp) -> None:
        """Append ``result``, what is known of one op, to the results file of the enclosing function at once, so that an
        interrupted run loses none.
        """
        if file is not None:
            safe_io.append_text(file, json.dumps(asdict(result) | {"version": version}) + "\n")

    with tuning_progress(False if quiet else None) as advance:
        results = audit_installed_ops(open_ops, recorded, request, options.jobs, keep, options.minutes, advance)
    # In the order of the ops, whether they were audited now or before.
    every = {**stored, **{r.op: r for r in results}}
    return [every[name] for name in ops]


def _find_and_record(options: InstalledOptions) -> tuple[dict[str, Subject], RecordedCalls]:
    """Return the ops and functions of the package by name, and their recorded calls. The package is imported, and the
    program runs, in child processes, so that neither can end this process, and so that it does not use the device: a
    fork of one that has used CUDA cannot use it.

    Raises:
        ShiplapError: ``SL605`` if the machine does not have the device, ``SL601`` if a child process ends while it
            imports the package, and as ``_find_subjects``.
    """
    from shiplap.audit.child_process import ChildDeath, run_isolated
    from shiplap.audit.installed.apart import RecordedCalls, find_apart, import_before_forks, record_apart
    from shiplap.scaffold.calls import MOST_CALLS

    device = options.device
    # Whether there is a GPU is asked of the library that manages them, since a process that has counted devices by the
    # driver cannot fork one that uses them.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if isinstance(refused := run_isolated(lambda send: console.require_device(device)), ChildDeath):
        raise error("SL605", where=f"--device {device}", got=str(refused), expected="a device of this machine")
    find_in_current_folder(options.package)
    found = find_apart(options.package, lambda: _find_subjects(options))
    if isinstance(found, ChildDeath):
        raise error(
            "SL601",
            where=options.package,
            what="the package cannot be imported in a process of its own",
            got=str(found),
            expected="a package with ops or, with --functions, with functions",
        )
    subjects = found.subjects
    _note_failed(found.failed)
    import_before_forks(options.package, found.modules)
    record = options.record
    if record is None:
        return {**subjects}, RecordedCalls()
    groups = _split_arguments(record, options.arguments, options.jobs)
    with ThreadPoolExecutor(len(groups)) as pool:  # each thread waits for a process of its own
        made = list(
            pool.map(
                lambda arguments: record_apart(subjects, options.seed, lambda m: run_recorded(record, arguments, m)),
                groups,
            )
        )
    calls: dict[str, list[CallRecipe]] = {}
    for each in made:
        for name, found_calls in each.calls.items():
            known = calls.setdefault(name, [])
            known += [c for c in found_calls if c not in known][: MOST_CALLS - len(known)]
    objects = {name: names for each in made for name, names in each.objects.items()}
    return {**subjects}, RecordedCalls(calls, next((each.failed for each in made if each.failed), ""), objects)


def _split_arguments(record: Path, arguments: Sequence[str], jobs: int) -> list[list[str]]:
    """Return the arguments of the recorded program for each of the processes in which it runs.

    There is one process, but for pytest: the files of tests that it collects are divided among as many processes as
    ``jobs``, and not more than there are files.
    """
    paths = [Path(a) for a in arguments] if str(record) == "pytest" else []
    files = sum(len(list(p.rglob("*.py"))) if p.is_dir() else p.is_file() for p in paths)
    shares = min(jobs, files)
    if shares < 2:
        return [list(arguments)]
    return [[*share_arguments(at, shares), *arguments] for at in range(shares)]


def _note_failed(modules: Mapping[str, str]) -> None:
    """Print a note for each of the ``modules`` that could not be imported, with the reason."""
    for module, reason in modules.items():
        console.note(f"{module} is left out: {reason}")


def _find_subjects(options: InstalledOptions) -> tuple[dict[str, Overload], FoundFunctions]:
    """Return the ops of the package by name, and with ``--functions`` its functions by address, with the reason of each
    module that could not be imported.

    Raises:
        ShiplapError: ``SL501`` if there is neither an op nor a function.
    """
    from shiplap.audit.installed.functions import FoundFunctions, find_functions
    from shiplap.scaffold.package import find_package_ops

    ops: dict[str, Overload] = {}
    refusal = None
    try:
        ops = find_package_ops(options.package, import_home, options.namespaces)
    except ShiplapError as e:
        if e.id != "SL501" or options.package not in sys.modules:
            raise
        refusal = e
    found = find_functions(options.package) if options.functions else FoundFunctions()
    if refusal is not None and not found.functions:
        raise refusal
    return ops, found


def _read_baseline(options: InstalledOptions) -> frozenset[str]:
    """Return the strings that identify the findings in the baseline, which is a file of known findings. Return an empty
    set if the options name no such file, or if it is missing and will be written. Raise ``SL602`` if the file cannot be
    read.
    """
    # The first run with --update-baseline creates the file.
    if options.baseline is None or (options.update_baseline and not options.baseline.exists()):
        return frozenset()
    try:
        known: Any = safe_io.parse_json(safe_io.read_file(options.baseline, safe_io.ParseLimits().size, safe_io.NAMED))
        return frozenset(map(str, known["known"]))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise error(
            "SL602",
            where=str(options.baseline),
            what="the baseline cannot be read",
            got=f"{type(e).__name__}: {e}",
            expected="a file that --update-baseline has written",
            fix="write it with --update-baseline",
        ) from e
