"""Audit the ops of an installed package, each in processes of its own, without a declaration."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from shiplap import safe_io
from shiplap.audit.child_process import ChildDeath, ChildLimits, SendEvent, stream_events
from shiplap.audit.installed import checks, gradients
from shiplap.audit.installed.apart import InstalledOverload, LoadedLater, RecordedCalls
from shiplap.audit.installed.checks import Make
from shiplap.audit.installed.functions import InstalledFunction
from shiplap.audit.installed.python_function import PythonFunction
from shiplap.audit.installed.recipes import CallRecipe, TakenCall, evaluate, malformed_calls
from shiplap.audit.installed.result import InstalledFinding, InstalledOp
from shiplap.audit.installed.script import write_script
from shiplap.audit.installed.search import WANTED_CALLS, SearchState, search_calls, try_recorded, used_seconds
from shiplap.sampling.run import suppress_warnings
from shiplap.scaffold.schema import SchemaForm, UndeclarableSchema, parse_schema, schema_name
from shiplap.torch_private.dispatcher_library import Overload, dispatch_keys

# The names are part of stored results and baselines.
BY_NAME: dict[str, Callable[[Any, Make], str]] = {
    "repeat": checks.check_repeat,
    "uninitialized": checks.check_uninitialized,
    "mutation": checks.check_mutation,
    "alias": checks.check_alias,
    "layout": checks.check_layout,
    "fake": checks.check_fake,
    "precision": checks.check_precision,
    "reference": checks.check_reference,
    "gradient": gradients.check_gradient,
    "gradient_layout": gradients.check_gradient_layout,
    "gradient_mutation": gradients.check_gradient_mutation,
    "gradient_alone": gradients.check_gradient_alone,
    "double_backward": gradients.check_double_backward,
    "autocast": gradients.check_autocast,
    "compile": checks.check_compile,
    "rows": checks.check_rows,
    "crash": checks.check_crash,
}


Subject: TypeAlias = "Overload | LoadedLater"
CHECKS = tuple(name for name in BY_NAME if name not in ("crash", "rows"))  # of a call as it is
_FIRST = ("repeat", "uninitialized")  # where these fail, comparisons of the same call say nothing more
OTHER_SIZES = (0, 1, 33)  # in place of each size that a call has
_RESTARTS = 60  # of a search whose calls end the process
_STANDSTILLS = 3  # calls that reach a limit of time, which is 10 or 20 seconds, after which the search is given up
_DEATHS = 6  # after which the rest of the jobs of one op is given up
_WAITING = 10  # times as long as its processor time may be, the checks of one op also wait, as for a device
# A program that runs another one, with the folders in which this process has found the package, behind its own.
_RUN = "import sys; sys.path += sys.argv[1:]; exec(compile(sys.stdin.read(), 'finding', 'exec'))"
_MOST_VALUES = 1_000_000  # of all tensors of a call with other sizes
_LIMITS = ChildLimits(busy_s=20.0, idle_s=10.0)
# A child that uses a device imports the package itself and compiles kernels; the runtime takes gigabytes of addresses.
_DEVICE_LIMITS = ChildLimits(busy_s=120.0, idle_s=60.0, memory=16 << 30)


@dataclass(frozen=True)
class InstalledRequest:
    """The options of an audit of a package. ``seconds`` limits the processor time of the search for calls of
    one op, and ``check_seconds`` that of its checks. ``folder`` is the folder to which scripts of findings are written,
    or None for no scripts. ``device`` is the type of the device on which the calls of a search run; recorded calls run
    where they were recorded.
    """

    package: str
    version: str
    seed: int
    seconds: float = 6.0
    folder: Path | None = None
    device: str = "cpu"
    check_seconds: float = math.inf

    @property
    def limits(self) -> ChildLimits:
        """The limits of a child process that makes calls of an op."""
        return _LIMITS if self.device == "cpu" else _DEVICE_LIMITS


@dataclass(frozen=True)
class _Job:
    """A check to run on one call of an op. ``texts`` are the Python expressions of the call's arguments. ``origin``
    says where the call comes from. ``note`` says what was changed in it, and may be empty.
    """

    check: str
    texts: Mapping[str, str]
    origin: str
    note: str = ""


@dataclass(frozen=True)
class _Known:
    """What the jobs of one op have found so far. ``checks`` are the checks that have found something: one finding of
    each is enough. ``unsteady`` are the arguments of the calls whose results are not a function of the arguments.
    """

    checks: frozenset[str]
    unsteady: tuple[Mapping[str, str], ...]


def audit_installed_ops(
    ops: Mapping[str, Subject],
    recorded: RecordedCalls,
    asked: InstalledRequest,
    jobs: int = 1,
    done: Callable[[InstalledOp], None] = lambda op: None,
) -> list[InstalledOp]:
    """Return the audit results of torch ops and functions, in the order of ``ops``, which maps their names to overloads
    and addresses.

    ``recorded`` has the calls that a program made. ``jobs`` ops are audited at a time, each in
    processes of its own. ``done`` is called with each result, by a thread.
    """

    reached: dict[str, _Reached] = {}

    def audit_reached(name: str, found: _Reached) -> InstalledOp:
        """Return the audit result of the op ``name``, of which the calls ``found`` are known, and call ``done``."""
        result = audit_installed_op(name, ops[name], found, asked)
        if not result.calls and name in recorded.objects:
            names = ", ".join(recorded.objects[name])
            result = replace(result, unreached=f"a script cannot make what recorded calls pass as {names}")
        done(result)
        return result

    def audit_one(name: str) -> InstalledOp | None:
        """Return the audit result of the op ``name``, or None if a search found no call of it."""
        found = reached[name] = _find_calls(ops[name], recorded.calls.get(name, ()), asked)
        return audit_reached(name, found) if found.calls or found.absent else None

    def audit_again(name: str) -> InstalledOp:
        """Return the audit result of the op ``name``. Its arguments are searched for among those of other ops."""
        again = _find_calls(ops[name], (), asked, taken) if taken else _Reached(reason=reached[name].reason)
        return audit_reached(name, replace(again, crashes=reached[name].crashes + again.crashes))

    # Threads suffice: each op runs in processes of its own, for which a thread only waits.
    with ThreadPoolExecutor(jobs) as pool:
        results = dict(zip(ops, pool.map(audit_one, ops), strict=True))
        taken = [c for found in reached.values() for c in found.calls]
        missed = [name for name, result in results.items() if result is None]
        again = dict(zip(missed, pool.map(audit_again, missed), strict=True))
    return [results[name] or again[name] for name in ops]


@dataclass(frozen=True)
class _Reached:
    """The calls that one op takes, and the findings of calls that ended the process during the search for them.
    ``reason`` says why there are no calls, and ``absent`` whether the op has no kernel for the device.
    """

    calls: tuple[TakenCall, ...] = ()
    crashes: tuple[InstalledFinding, ...] = ()
    reason: str = ""
    absent: bool = False


def audit_installed_op(
    name: str, op: Subject, recorded: Sequence[CallRecipe] | _Reached, asked: InstalledRequest
) -> InstalledOp:
    """Return the audit result of one torch op or function. The checks run on the ``recorded`` calls that the op
    accepts. If it accepts none, they run on calls that a search has found. A caller that has searched passes the calls
    that it has found.
    """
    found = recorded if isinstance(recorded, _Reached) else _find_calls(op, recorded, asked)
    form = _form_of(op)
    if form is None:
        return InstalledOp(name, unreached=found.reason)
    jobs = [j for t in found.calls for j in _jobs_of_call(t.call)]
    # These come last, since they tend to end their process, and say least.
    jobs += [j for t in found.calls for j in _jobs_of_malformed_calls(t.call, form)]
    result = _run_jobs(name, op, jobs, asked.limits, asked.check_seconds)
    # A crash in the search is a finding, even if no call of the jobs crashes.
    if found.crashes and not any(f.check == "crash" for f in result.findings):
        result = replace(result, findings=(found.crashes[0], *result.findings))
    if not found.calls:
        result = replace(result, unreached=found.reason)
    if isinstance(op, InstalledFunction):
        result = replace(result, findings=tuple(replace(f, source=op.source) for f in result.findings))
    return _reproduced(result, asked)


def _form_of(op: Subject) -> SchemaForm | None:
    """Return the arguments of an op or function, or None for a schema that no declaration can have."""
    if isinstance(op, (InstalledFunction, InstalledOverload)):
        return op.form
    try:
        return parse_schema(op._schema)
    except UndeclarableSchema:
        return None


def _find_calls(
    op: Subject, recorded: Sequence[CallRecipe], asked: InstalledRequest, siblings: Sequence[TakenCall] = ()
) -> _Reached:
    """Return the calls that an op takes. They are those of the ``recorded`` calls that it takes, or else calls that a
    search has found, which may use ``siblings``, the calls that other ops took.
    """
    form = _form_of(op)
    if form is None:
        assert not isinstance(op, InstalledFunction)
        return _Reached(reason=_why_undeclarable(op))
    state, crashes = SearchState(siblings, asked.device), list[InstalledFinding]()
    # All recorded calls are wanted, also those behind one that ends the process.
    left, wanted, standstills = asked.seconds, max(WANTED_CALLS, len(recorded)), 0
    for attempt in range(_RESTARTS + 1):
        if (left <= 0 and not recorded) or state.absent or len(state.found) >= wanted or standstills >= _STANDSTILLS:
            break

        def search(send: SendEvent, seed: int = asked.seed + attempt, left: float = left) -> None:
            """Find calls that the op accepts, in a child process and within ``left`` seconds, and send an event for
            each to the parent process.
            """
            with suppress_warnings():
                called = callable_of(op)
                if not list(try_recorded(called, form, recorded, state, send, asked.check_seconds / 2)):
                    search_calls(called, form, seed, left, state, send, asked.device)

        tried: dict[str, Any] = {}
        died = False
        for event in stream_events(search, asked.limits):
            if isinstance(event, ChildDeath):
                died = True
                standstills += event.how.startswith(("hangs", "deadlock"))
                if tried:
                    state.avoid(tried)
                    left -= tried["used"]
                if tried and _is_crash(event):
                    note = "" if tried["by"] == "recorded" else "arguments that the schema admits, drawn by a search"
                    crash = InstalledFinding(form.name, "crash", str(event), tried["texts"], tried["by"], note)
                    crashes.append(crash)
            elif event["kind"] == "try":
                tried = event
            else:
                state.take(event)
        # A search that has ended by itself has used its time or has found enough.
        if not died:
            break
    return _Reached(tuple(state.found), tuple(crashes), state.reason, bool(state.absent))


def _why_undeclarable(op: Overload | InstalledOverload) -> str:
    """Return why no declaration can have the schema of ``op``."""
    if isinstance(op, InstalledOverload):
        return op.undeclarable
    try:
        parse_schema(op._schema)
    except UndeclarableSchema as e:
        return str(e)
    return ""


def callable_of(op: Subject) -> Overload | PythonFunction:
    """Return the op itself, or what is at its name or address, in the form in which the checks call it."""
    return op.load() if isinstance(op, (InstalledFunction, InstalledOverload)) else op


def _is_crash(death: ChildDeath) -> bool:
    """Return whether a child process ended by a crash or exited by itself. Return False if it exceeded a limit of time
    or memory or raised an exception.
    """
    return death.how.startswith(("crashed", "the process exited"))


def _jobs_of_call(call: CallRecipe) -> Iterator[_Job]:
    """Yield the jobs of a call, each of which is one check of one call. All checks of the call itself come first. Some
    checks of the call with other sizes follow.
    """
    texts = call.texts()
    for check in CHECKS:
        yield _Job(check, texts, call.origin)
    rows = next((t.shape[0] for _, t in call.tensors() if t.shape), 0)
    for size, other, resized in _resized_calls(call):
        if _reaches_beyond(call, resized, size, other):
            continue
        note = f"{other} in place of each size {size}"
        yield _Job("crash", resized.texts("guarded"), call.origin, note)
        yield _Job("fake", resized.texts(), call.origin, note)
        if size == rows and other <= 1:
            yield _Job("rows", resized.texts(), call.origin, note)
        for check in (*_FIRST, "layout") if other > 1 else ("gradient",):
            yield _Job(check, resized.texts(), call.origin, note)


def _resized_calls(call: CallRecipe) -> Iterator[tuple[int, int, CallRecipe]]:
    """Yield ``(size, other, resized)`` for each size of a dim of ``call`` and each other size. In ``resized``,
    ``other`` is in place of ``size`` wherever that occurs.
    """
    for size in sorted({n for _, t in call.tensors() for n in t.shape if n > 1}):
        for other in OTHER_SIZES:
            resized = call.with_size(size, other)
            if sum(math.prod(t.shape) for _, t in resized.tensors()) <= _MOST_VALUES:
                yield size, other, resized


def _reaches_beyond(call: CallRecipe, resized: CallRecipe, size: int, other: int) -> bool:
    """Return whether an index of ``resized``, which is ``call`` with ``other`` in place of each ``size``, may lie
    outside of a tensor that is shorter now. Results of such a call say nothing.
    """
    pairs = zip(call.tensors(), resized.tensors(), strict=True)
    highs = [high for (_, t), (_, new) in pairs if math.prod(new.shape) for high in t.largest_whole_numbers()]
    # A larger number was no index of a dim of that size before. The last offset may be equal to the size.
    return any(other <= high <= size for high in highs)


def _jobs_of_malformed_calls(call: CallRecipe, form: SchemaForm) -> Iterator[_Job]:
    """Yield the jobs of each call that is made from ``call`` and whose arguments do not fit each other, or may not.
    They check that the process survives, and the fake implementation for other sizes.
    """
    for note, malformed in malformed_calls(call, form):
        yield _Job("crash", malformed.texts("guarded"), call.origin, note)
    for size, other, resized in _resized_calls(call):
        if _reaches_beyond(call, resized, size, other):
            note = f"{other} in place of each size {size}"
            yield _Job("crash", resized.texts("guarded"), call.origin, note)
            yield _Job("fake", resized.texts(), call.origin, note)


def _run_jobs(
    name: str, op: Subject, jobs: Sequence[_Job], limits: ChildLimits, seconds: float = math.inf
) -> InstalledOp:
    """Run all jobs (checks of single calls) on an op in child processes under ``limits``, and return the result with
    the first finding of each check. If a job ends its process, a new process continues with the next job. After six
    deaths, or after ``seconds`` of processor time, the remaining jobs are not run.
    """
    found: dict[str, InstalledFinding] = {}
    unsteady: list[Mapping[str, str]] = []  # calls whose results are not a function of the arguments
    missing: dict[str, None] = {}
    looked = deaths = first = behind = 0
    used = 0.0
    while first < len(jobs) and deaths <= _DEATHS and used < seconds:
        start = at = first
        before = used
        known = _Known(frozenset(found), tuple(unsteady))
        for event in stream_events(partial(_run_in_child, op, jobs, start, seconds - used, known), limits):
            job = jobs[at] if isinstance(event, ChildDeath) else jobs[event["job"]]
            if isinstance(event, ChildDeath):
                deaths += 1
                if not _is_crash(event):  # too much memory or time: nothing is known of the call
                    continue
                problem = f"{job.check}: {event}" if job.check != "crash" else str(event)
                found.setdefault("crash", _make_finding(name, "crash", problem, job))
            elif event["kind"] == "begin":
                at, used = event["job"], before + event["used"]
            elif event["kind"] == "late":
                used = math.inf
            else:
                looked += event["kind"] == "looked"
                if text := event.get("missing"):
                    missing[text] = None
                if text := event.get("problem"):
                    # The first finding of each check is kept, as later calls tend to show the same fault.
                    found.setdefault(job.check, _make_finding(name, job.check, text, job))
                    unsteady += [job.texts] if job.check in _FIRST else []
        first = at + 1
        # Other checks of a call with other sizes that has ended the process would end it, too.
        while at < first < len(jobs) and jobs[at].note and jobs[first].note == jobs[at].note:
            first, behind = first + 1, behind + 1
    calls = sum(job.check == "repeat" and not job.note for job in jobs)
    left = len(jobs) - first + behind
    return InstalledOp(name, calls, looked, findings=tuple(found.values()), missing=tuple(missing), unchecked=left)


def _make_finding(name: str, check: str, problem: str, job: _Job) -> InstalledFinding:
    """Return the finding that ``check`` has made on the call of ``job``. ``problem`` is a message that describes it."""
    return InstalledFinding(name, check, problem, job.texts, job.origin, job.note)


def _run_in_child(
    op: Subject, jobs: Sequence[_Job], first: int, seconds: float, known: _Known, send: SendEvent
) -> None:
    """Run the jobs (checks of single calls) from index ``first`` on, in a child process, for ``seconds`` of processor
    time without the import of the package. Send an event before and after each job, so that the parent process knows
    which job a crash belongs to. ``known`` is what earlier child processes have found. A check that has found something
    is not run again, except for those that show whether a call is repeatable.
    """
    done, unsteady = set(known.checks), list(known.unsteady)
    with suppress_warnings():
        called = callable_of(op)
        since, latest = used_seconds(), time.monotonic() + _WAITING * seconds
        for number in range(first, len(jobs)):
            job, used = jobs[number], used_seconds() - since
            if number > first and (used > seconds or time.monotonic() > latest):
                send({"kind": "late", "job": number})
                return
            send({"kind": "begin", "job": number, "used": used})
            if job.check not in _FIRST and (job.check in done or job.texts in unsteady):
                continue
            event = _run_check(called, job)
            if event.get("problem"):
                done.add(job.check)
                if job.check in _FIRST:
                    unsteady.append(job.texts)
            send({**event, "job": number})


def _run_check(op: Overload | PythonFunction, job: _Job) -> dict[str, Any]:
    """Run one check on one call, and return the result as a dict for the parent process. It holds the problem (an empty
    string if there is none), or the reason why the check was skipped, or the registration that the op lacks.
    """
    check = BY_NAME[job.check]
    try:
        problem = check(op, lambda: evaluate(job.texts))
        if problem.startswith(checks.FAKE_REFUSES) and _has_no_fake(op):
            return {"kind": "skipped", "missing": "no fake implementation"}
        if problem.startswith(checks.FAKE_REFUSES) and job.note:  # it knows sizes that no program has passed better
            return {"kind": "skipped", "reason": "the fake implementation refuses this size"}
        return {"kind": "looked", "problem": problem[:400]}
    except checks.NotApplicable as e:
        return {"kind": "skipped", "reason": str(e)[:200]}
    except checks.MissingRegistration as e:
        return {"kind": "skipped", "missing": str(e)}
    except (RuntimeError, ValueError, IndexError, TypeError) as e:  # the arguments cannot be made, or the check cannot
        return {"kind": "skipped", "reason": f"{type(e).__name__}: {e}"[:200]}


def _has_no_fake(op: Overload | PythonFunction) -> bool:
    """Return whether no fake implementation is registered for an op. In a call without data its own kernel runs, which
    is made for tensors that have data.
    """
    return not isinstance(op, PythonFunction) and "Meta" not in dispatch_keys(schema_name(op._schema))


def _reproduced(result: InstalledOp, asked: InstalledRequest) -> InstalledOp:
    """Return ``result`` with only those findings that their generated script shows again in a new process. The names of
    the checks of the other findings become ``unreproduced``. The scripts that show a finding are written to
    ``asked.folder`` if it is not None.
    """
    kept, lost = [], []
    for finding in result.findings:
        text = write_script(finding, asked.package, asked.version)
        folder = asked.folder
        file = (
            None if folder is None else folder / f"{finding.op.replace('::', '.').replace(':', '.')}-{finding.check}.py"
        )
        # For a device, children have run whatever the package does, so that a fork of this process is as good.
        shown = _script_shows(text) if asked.device == "cpu" else _fork_shows(text, asked.limits)
        if shown:
            if file is not None:
                safe_io.write_text(file, text)
            kept.append(replace(finding, script=file.name if file else ""))
        else:
            lost.append(finding.check)
    return replace(result, findings=tuple(kept), unreproduced=tuple(lost))


def _script_shows(text: str) -> bool:
    """Run the script ``text`` in a new process. Return whether it shows its finding by a crash or an ``AssertionError``
    within two minutes.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _RUN, *sys.path],
            input=text,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:  # no finding is one of time
        return False
    return done.returncode < 0 or "AssertionError" in done.stderr


def _fork_shows(text: str, limits: ChildLimits) -> bool:
    """Run the script ``text`` in a fork of this process under ``limits``. Return whether it shows its finding as
    ``_script_shows`` does. A fork does not import the package anew, which takes many seconds for a package for GPUs.
    """

    def work(send: SendEvent) -> None:
        """Run the script."""
        exec(compile(text, "finding", "exec"), {"__name__": "__main__"})

    ends = [event for event in stream_events(work, limits) if isinstance(event, ChildDeath)]
    return any(end.how.startswith(("crashed", "raised AssertionError")) for end in ends)


def prepare_process() -> None:
    """Import torch's compiler in this process, so that processes forked from it need not do so. The import takes
    seconds.
    """
    import torch

    torch.compile(torch.sin, backend="aot_eager")(torch.ones(1))


def stored_results(file: Path, version: str | None = None) -> dict[str, InstalledOp]:
    """Return the results of an interrupted run as a dict by name of the op, read from its file of JSON lines. A line
    that was cut off is left out. If ``version`` is not None, results of other versions of the package are left out,
    too. The dict is empty if there is no file.
    """
    results: dict[str, InstalledOp] = {}
    if file.is_file():
        for text in file.read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                result = msgspec.json.decode(text, type=InstalledOp)
                if version is None or msgspec.json.decode(text).get("version") == version:
                    results[result.op] = result
    return results
