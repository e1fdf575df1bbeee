"""Audit one op of an installed package without a declaration, in child processes and stage by stage."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from shiplap import safe_io
from shiplap.audit.child_process import ChildDeath, ChildEvent, ChildLimits, SendEvent, stream_events
from shiplap.audit.installed import checks
from shiplap.audit.installed.apart import InstalledOverload, LoadedLater
from shiplap.audit.installed.functions import InstalledFunction
from shiplap.audit.installed.jobs import BY_NAME, FIRST, Job, Level, jobs_of
from shiplap.audit.installed.python_function import PythonFunction
from shiplap.audit.installed.recipes import CallRecipe, TakenCall, evaluate
from shiplap.audit.installed.result import InstalledFinding, InstalledOp
from shiplap.audit.installed.script import write_script
from shiplap.audit.installed.search import WANTED_CALLS, SearchState, search_calls, try_recorded, used_seconds
from shiplap.sampling.run import suppress_warnings
from shiplap.scaffold.schema import SchemaForm, UndeclarableSchema, parse_schema, schema_name
from shiplap.torch_private.dispatcher_library import Overload, dispatch_keys

Subject: TypeAlias = "Overload | LoadedLater"
_RESTARTS = 150  # of a search whose calls end the process
_STANDSTILLS = 3  # calls that reach a limit of time, after which the search is given up
_DEATHS = 6  # after which the rest of the jobs of one level of an op is given up
_WAITING = 10  # times as long as its processor time may be, the checks of one op also wait, as for a device
_LIMITS = ChildLimits(busy_s=20.0, idle_s=10.0)
# A child that uses a device imports the package itself and compiles kernels; the runtime takes gigabytes of addresses.
_DEVICE_LIMITS = ChildLimits(busy_s=60.0, idle_s=30.0, memory=16 << 30)


@dataclass(frozen=True)
class InstalledRequest:
    """The options of an audit of a package. ``seconds`` is the most processor time that one search for calls of an op
    takes. ``folder`` is the folder to which scripts of findings are written, or None for no scripts. ``device`` is the
    type of the device on which the calls of a search run; recorded calls run where they were recorded.
    """

    package: str
    version: str
    seed: int
    seconds: float = 6.0
    folder: Path | None = None
    device: str = "cpu"

    @property
    def limits(self) -> ChildLimits:
        """The limits of a child process that makes calls of an op."""
        return _LIMITS if self.device == "cpu" else _DEVICE_LIMITS


@dataclass(frozen=True)
class _Known:
    """What the jobs of one op have found so far. ``checks`` are the checks that have found something: one finding of
    each is enough. ``unsteady`` are the arguments of the calls whose results are not a function of the arguments.
    """

    checks: frozenset[str] = frozenset()
    unsteady: tuple[Mapping[str, str], ...] = ()


def audit_installed_op(
    name: str, op: Subject, recorded: Sequence[CallRecipe], asked: InstalledRequest, check_seconds: float = math.inf
) -> InstalledOp:
    """Return the audit result of one torch op or function. The checks run on the ``recorded`` calls that the op
    accepts. If it accepts none, they run on calls that a search has found. The checks of each level take at most
    ``check_seconds`` of processor time.
    """
    audit = OpAudit(name, op, recorded, asked)
    audit.reach(asked.seconds, check_seconds)
    for level in (Level.DEAR, Level.MALFORMED):
        audit.check(level, check_seconds)
    return audit.result()


class OpAudit:
    """The audit of one torch op or function, which a caller takes through its stages: searches for calls, each
    with the cheap checks of those that it finds, and the checks of each other level. ``result`` returns what is known
    after any of them.
    """

    def __init__(self, name: str, op: Subject, recorded: Sequence[CallRecipe], asked: InstalledRequest) -> None:
        """Prepare to audit ``op``, which has this ``name``. ``recorded`` are calls that a program has made."""
        self.name, self.op, self.recorded, self.asked = name, op, recorded, asked
        self.form = _form_of(op)
        self.state = SearchState(device=asked.device)
        self._attempts = self._standstills = 0
        self._jobs: dict[Level, list[Job]] = {}
        self._left: dict[Level, int] = {}  # jobs of each level that were not run
        self._found: dict[str, InstalledFinding] = {}  # by the name of the check
        self._crash: InstalledFinding | None = None  # in a search, which says less than one of a job
        self._shown: dict[str, InstalledFinding | None] = {}  # by the text of a finding, what its script showed again
        self._unsteady: list[Mapping[str, str]] = []  # calls whose results are not a function of the arguments
        self._steady: list[Mapping[str, str]] = []  # calls whose results are, as the checks of ``FIRST`` have shown
        self._offered: tuple[tuple[int, int], list[TakenCall]] = ((0, 0), [])
        self._missing: dict[str, None] = {}
        self._looked = 0

    @property
    def calls(self) -> Sequence[TakenCall]:
        """The calls that the op has taken."""
        return self.state.found

    def calls_for_others(self) -> list[TakenCall]:
        """Return the calls that the op has taken, for searches of other ops. The checks of a call have shown whether
        its results are steady, which an argument has to be.
        """
        counts = len(self.state.found), len(self._steady)
        if counts != self._offered[0]:  # searches of all other ops read them
            self._offered = counts, [replace(t, steady=t.call.texts() in self._steady) for t in self.state.found]
        return self._offered[1]

    @property
    def is_searched(self) -> bool:
        """Whether a further search would be in vain: a call was found, the op has no kernel for the device or
        refuses every call, no declaration can have its schema, or calls do not end.
        """
        done = self.form is None or self.state.absent or self.state.found
        return bool(done) or self._standstills >= _STANDSTILLS or self._attempts > _RESTARTS

    def reach(self, seconds: float, check_seconds: float = math.inf, siblings: Sequence[TakenCall] = ()) -> None:
        """Search for calls that the op takes, for ``seconds`` of processor time, and run the cheap checks on them, for
        ``check_seconds`` of it. The calls are those of the recorded ones that the op takes, or else drawn ones, which
        may use ``siblings``, the calls that other ops took.

        The checks run in the child process of the search, as the start of a process takes seconds on a GPU.
        """
        form = self.form
        if form is None:
            return
        self.state.siblings, self.state.begun = siblings, 0
        left, wanted = seconds, max(WANTED_CALLS, len(self.recorded))
        latest = time.monotonic() + max(_WAITING * seconds, self.asked.limits.idle_s)
        events: Iterator[ChildEvent | ChildDeath] | None = None
        while not (self.state.absent or self._standstills >= _STANDSTILLS or self._attempts > _RESTARTS):
            if (left <= 0 and not self.recorded) or len(self.state.found) >= wanted:
                break
            seed = self.asked.seed + self._attempts
            self._attempts += 1
            times, device = (left, check_seconds), self.asked.device
            work = partial(_reach_in_child, self.op, form, self.recorded, self.state, seed, times, device)
            events = stream_events(work, self.asked.limits)
            spent = self._follow_search(events, form)
            # A search that has ended by itself has used its time or has found enough.
            if spent is None:
                break
            # Each process also takes time to start. In those after the latest time only recorded calls are made.
            left, events = left - spent if time.monotonic() < latest else 0.0, None
        self.check(Level.CHEAP, check_seconds, events)

    def _follow_search(self, events: Iterator[ChildEvent | ChildDeath], form: SchemaForm) -> float | None:
        """Store what a search in a child process finds, which has sent ``events``: calls that ``form`` admits. Return
        the processor time that it took until a call ended the process, or None if the search ended by itself. The
        events of the checks that follow it are left in ``events``.
        """
        tried: dict[str, Any] = {}
        for event in events:
            if isinstance(event, ChildDeath):
                limits = replace(self.asked.limits, busy_s=tried.get("patience", self.asked.limits.busy_s))
                spent = float(tried.get("used", 0.0)) + _seconds_of_limit(event, limits)
                self._standstills += event.how.startswith(("hangs", "deadlock"))
                if tried:
                    self.state.avoid(tried)
                if tried and _is_crash(event):
                    note = "" if tried["by"] == "recorded" else "arguments that the schema admits, drawn by a search"
                    crash = InstalledFinding(form.name, "crash", str(event), tried["texts"], tried["by"], note)
                    self._crash = self._crash or crash
                return spent
            if event["kind"] == "searched":
                break
            if event["kind"] == "try":
                tried = event
            else:
                self.state.take(event)
        return None

    def check(
        self,
        level: Level,
        seconds: float = math.inf,
        events: Iterator[ChildEvent | ChildDeath] | None = None,
    ) -> None:
        """Run the jobs of ``level``, which are checks of single calls, in child processes, and keep the first finding
        of each check. If a job ends its process, a new process continues with the next job. After six deaths, or after
        ``seconds`` of processor time, the remaining jobs are not run. If ``events`` is not None, they are those of a
        child process that already runs the jobs.
        """
        if self.form is None or not self.state.found:
            return
        self._jobs = self._jobs or jobs_of([t.call for t in self.state.found], self.form)
        jobs, limits = self._jobs[level], self.asked.limits
        deaths = first = behind = 0
        used, latest = 0.0, time.monotonic() + _WAITING * seconds
        while first < len(jobs) and deaths <= _DEATHS and used < seconds and time.monotonic() <= latest:
            at, before = first, used
            if events is None:
                known = _Known(frozenset(self._found), tuple(self._unsteady))
                work = partial(_run_in_child, self.op, jobs, first, seconds - used, known, self.asked.device)
                events = stream_events(work, limits)
            for event in events:
                if isinstance(event, ChildDeath):
                    deaths, used = deaths + 1, used + _seconds_of_limit(event, limits)
                    self._keep_death(event, jobs[at])
                elif event["kind"] == "begin":
                    at, used = event["job"], before + event["used"]
                elif event["kind"] == "late":
                    used = math.inf
                else:
                    self._keep_event(event, jobs[event["job"]])
            first, events = at + 1, None
            # Other checks of a call with other sizes that has ended the process would end it, too.
            while at < first < len(jobs) and jobs[at].note and jobs[first].note == jobs[at].note:
                first, behind = first + 1, behind + 1
        self._left[level] = len(jobs) - first + behind

    def _keep_death(self, death: ChildDeath, job: Job) -> None:
        """Store that ``job`` ended its process. Nothing is known of a call that took too much memory or time."""
        if _is_crash(death):
            problem = f"{job.check}: {death}" if job.check != "crash" else str(death)
            self._found.setdefault("crash", _make_finding(self.name, "crash", problem, job))

    def _keep_event(self, event: dict[str, Any], job: Job) -> None:
        """Store the ``event`` that a child process has sent after ``job``."""
        self._looked += event["kind"] == "looked"
        if text := event.get("missing"):
            self._missing[text] = None
        if text := event.get("problem"):
            # The first finding of each check is kept, as later calls tend to show the same fault.
            self._found.setdefault(job.check, _make_finding(self.name, job.check, text, job))
            self._unsteady += [job.texts] if job.check in FIRST else []
        elif event["kind"] == "looked" and job.check == FIRST[-1] and job.texts not in self._unsteady:
            self._steady.append(job.texts)

    def result(self, unreached: str = "") -> InstalledOp:
        """Return what is known of the op. Its findings are those that their generated script shows again in a fork of
        this process, which has imported the package and called none of its ops. Their scripts are written to the folder
        of the request if there is one. If there is no call, ``unreached`` says why, unless it is empty.
        """
        found = [f for f in self._found.values() if not self._is_repeated(f)]
        found += [self._crash] if self._crash and "crash" not in self._found else []
        for finding in (f for f in found if repr(f) not in self._shown):
            self._shown[repr(finding)] = self._show_again(finding)
        shown = {f.check: self._shown[repr(f)] for f in found}
        kept = tuple(f for f in shown.values() if f is not None)
        lost = tuple(check for check, f in shown.items() if f is None)
        reason = (
            "" if self.state.found else unreached or (self.state.reason if self.form else _why_undeclarable(self.op))
        )
        left = sum(self._left.get(level, len(jobs)) for level, jobs in self._jobs.items())
        return InstalledOp(
            self.name,
            len(self.state.found),
            self._looked,
            "" if self.state.found else unreached or reason,
            kept,
            tuple(self._missing),
            lost,
            left,
            complete=len(self._left) == len(Level) or not self.state.found,
        )

    def _is_repeated(self, finding: InstalledFinding) -> bool:
        """Return whether another finding says more about the cause of this one: memory that was never written holds
        something else in each call.
        """
        return finding.check == "repeat" and "uninitialized" in self._found

    def _show_again(self, finding: InstalledFinding) -> InstalledFinding | None:
        """Return ``finding`` if its script shows it again, and write the script. Return None if it does not."""
        if isinstance(self.op, InstalledFunction):
            finding = replace(finding, source=self.op.source)
        text = write_script(finding, self.asked.package, self.asked.version)
        if not script_shows(text, self.asked.limits):
            return None
        if self.asked.folder is None:
            return finding
        name = finding.op.replace("::", ".").replace(":", ".")
        file = self.asked.folder / f"{name}-{finding.check}.py"
        safe_io.write_text(file, text)
        return replace(finding, script=file.name)


def _seconds_of_limit(death: ChildDeath, limits: ChildLimits) -> float:
    """Return the seconds that a call took before it reached a limit of time, or 0.0 if another cause ended it."""
    reached = {"hangs": limits.busy_s, "slow": limits.busy_s, "deadlock": limits.idle_s}
    return next((seconds for how, seconds in reached.items() if death.how.startswith(how)), 0.0)


def _reach_in_child(
    op: Subject,
    form: SchemaForm,
    recorded: Sequence[CallRecipe],
    state: SearchState,
    seed: int,
    seconds: tuple[float, float],
    device: str,
    send: SendEvent,
) -> None:
    """Find calls that the op accepts, in a child process, and run the cheap checks on them. The two ``seconds`` of
    processor time are those of the search and of the checks. Send an event to the parent process for each call that was
    found, at the end of the search, and for each check. ``state`` is that of the search so far.
    """

    def store(event: ChildEvent) -> None:
        """Send ``event``, and store the call that it has found, if it has, as the parent process does."""
        if event["kind"] == "found":
            state.take(event)
        send(event)

    with suppress_warnings():
        called = _begin_in_child(op, device)
        if not list(try_recorded(called, form, recorded, state, store, seconds[0])):
            search_calls(called, form, seed, seconds[0], state, store, device)
        send({"kind": "searched"})
        if state.found:
            jobs = jobs_of([t.call for t in state.found], form)[Level.CHEAP]
            _run_jobs(called, jobs, 0, seconds[1], _Known(), send)


def _form_of(op: Subject) -> SchemaForm | None:
    """Return the arguments of an op or function, or None for a schema that no declaration can have."""
    if isinstance(op, (InstalledFunction, InstalledOverload)):
        return op.form
    try:
        return parse_schema(op._schema)
    except UndeclarableSchema:
        return None


def _why_undeclarable(op: Subject) -> str:
    """Return why no declaration can have the schema of ``op``."""
    if isinstance(op, InstalledOverload):
        return op.undeclarable
    if isinstance(op, InstalledFunction):
        return ""
    try:
        parse_schema(op._schema)
    except UndeclarableSchema as e:
        return str(e)
    return ""


def _begin_in_child(op: Subject, device: str) -> Overload | PythonFunction:
    """Return ``op`` in the form in which the checks call it, after ``device`` was started in this child process. Its
    start takes seconds for a GPU, which count for no op.
    """
    called = callable_of(op)
    torch.zeros(1, device=device)
    return called


def callable_of(op: Subject) -> Overload | PythonFunction:
    """Return the op itself, or what is at its name or address, in the form in which the checks call it."""
    return op.load() if isinstance(op, (InstalledFunction, InstalledOverload)) else op


def _is_crash(death: ChildDeath) -> bool:
    """Return whether a child process ended by a crash or exited by itself. Return False if it exceeded a limit of time
    or memory or raised an exception.
    """
    return death.how.startswith(("crashed", "the process exited"))


def _make_finding(name: str, check: str, problem: str, job: Job) -> InstalledFinding:
    """Return the finding that ``check`` has made on the call of ``job``. ``problem`` is a message that describes it."""
    return InstalledFinding(name, check, problem, job.texts, job.origin, job.note)


def _run_in_child(
    op: Subject, jobs: Sequence[Job], first: int, seconds: float, known: _Known, device: str, send: SendEvent
) -> None:
    """Run the jobs from index ``first`` on, in a child process, for ``seconds`` of processor time without the import of
    the package and the start of ``device``. The rest is as in ``_run_jobs``.
    """
    with suppress_warnings():
        _run_jobs(_begin_in_child(op, device), jobs, first, seconds, known, send)


def _run_jobs(
    op: Overload | PythonFunction, jobs: Sequence[Job], first: int, seconds: float, known: _Known, send: SendEvent
) -> None:
    """Run the jobs (checks of single calls) from index ``first`` on for ``seconds`` of processor time. Send an event
    before and after each job, so that the parent process knows which job a crash belongs to. ``known`` is what earlier
    child processes have found. A check that has found something is not run again, except for those that show whether a
    call is repeatable.
    """
    done, unsteady = set(known.checks), list(known.unsteady)
    since, latest = used_seconds(), time.monotonic() + _WAITING * seconds
    for number in range(first, len(jobs)):
        job, used = jobs[number], used_seconds() - since
        if number > first and (used > seconds or time.monotonic() > latest):
            send({"kind": "late", "job": number})
            return
        send({"kind": "begin", "job": number, "used": used})
        if job.check not in FIRST and (job.check in done or job.texts in unsteady):
            continue
        event = _run_check(op, job)
        if event.get("problem"):
            done.add(job.check)
            if job.check in FIRST:
                unsteady.append(job.texts)
        send({**event, "job": number})


def _run_check(op: Overload | PythonFunction, job: Job) -> dict[str, Any]:
    """Run one check on one call, and return the result as a dict for the parent process. It holds the problem (an empty
    string if there is none), or the reason why the check was skipped, or the registration that the op lacks.
    """
    check = BY_NAME[job.check]
    if job.check == "alias" and _is_decomposed(op):
        return {"kind": "skipped", "reason": "torch takes the op apart before it relies on the schema"}
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


def _is_decomposed(op: Overload | PythonFunction) -> bool:
    """Return whether each call of an op becomes calls of other ops in eager mode and in a trace."""
    keys = frozenset() if isinstance(op, PythonFunction) else dispatch_keys(schema_name(op._schema))
    return keys == {"CompositeImplicitAutograd"}


def _has_no_fake(op: Overload | PythonFunction) -> bool:
    """Return whether no fake implementation is registered for an op. In a call without data its own kernel runs, which
    is made for tensors that have data.
    """
    return not isinstance(op, PythonFunction) and "Meta" not in dispatch_keys(schema_name(op._schema))


def script_shows(text: str, limits: ChildLimits) -> bool:
    """Run the script ``text`` in a fork of this process under ``limits``. Return whether it shows its finding by a
    crash or an ``AssertionError``. A fork need not import the package anew, which takes seconds for each finding.
    """

    def work(send: SendEvent) -> None:
        """Run the script."""
        exec(compile(text, "finding", "exec"), {"__name__": "__main__"})

    ends = [event for event in stream_events(work, limits) if isinstance(event, ChildDeath)]
    return any(end.how.startswith(("crashed", "raised AssertionError", "the process exited")) for end in ends)
