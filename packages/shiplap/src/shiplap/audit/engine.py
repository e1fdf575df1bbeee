"""``audit(op)``: run the checks in a process of its own, each to a finding, within a time budget.

The samples run in a child (``shiplap.audit.child_process``). When the child dies, that is a finding of the check that
was running, and another child continues with the next one, so no earlier finding is lost.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from typing import Any

from shiplap.audit.causes import STATE_FIX
from shiplap.audit.checks import CHECKS, load_check
from shiplap.audit.child_process import (
    NOT_STARTED,
    STOPPED,
    ChildDeath,
    ChildLimits,
    SendEvent,
    can_isolate,
    run_isolated,
    stream_events,
)
from shiplap.audit.cost import CostCard
from shiplap.audit.report import Report, device_without_kernel, make_report
from shiplap.audit.session import AuditPlan, repeat_sample, run_session
from shiplap.audit.target import write_reproducer
from shiplap.declare.keyword_values import with_checked_arguments
from shiplap.dispatch import Op
from shiplap.dispatch.registry import require_op
from shiplap.errors import error, error_line
from shiplap.kernels.triton.kernel import LaunchedKernel
from shiplap.sampling.device import require_device
from shiplap.sampling.finding import Finding
from shiplap.sampling.ledger import Ledger
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.run import CallMarks, use_marks
from shiplap.sampling.work_estimate import parse_budget
from shiplap.torch_private import dynamo

# The default keeps an audit short enough to be run before a commit.
DEFAULT_BUDGET_SECONDS = 300.0
MOST_DEATHS = 4  # of one op, after which the rest of its checks is left
RETRY_LIMITS = ChildLimits(busy_s=5.0, idle_s=3.0)  # for a sample that has ended one process already
# Each try may end another process, so the time is limited.
SHRINK_SECONDS = 8.0
_features_lock = threading.Lock()  # so that several audits at once find out once

# Held by an audit, or by a measurement of costs, whose calls run in this process, as on a GPU. Dynamo and the profiler
# serve one audit at a time, a capture of a CUDA graph forbids calls of the CUDA runtime to all threads of the process,
# and a check of open files or of synchronisation counts what other threads do. Audits in other processes need not wait.
_in_this_process = threading.RLock()

# Called with the name of a check and the description of a sample.
ExaminedCallback = Callable[[str, dict[str, Any]], None]


@with_checked_arguments
def audit(
    op: Op,
    *,
    checks: Iterable[str] | None = None,
    seed: int | None = None,
    device: str | None = None,
    samples: Callable[..., tuple[Any, ...]] | None = None,
    budget: float | str = DEFAULT_BUDGET_SECONDS,
    progress: Callable[[Finding], None] | None = None,
    examined: ExaminedCallback | None = None,
    isolate: bool | None = None,
    limits: ChildLimits | None = None,
) -> Report:
    """Compare ``op`` with its declaration and its reference on generated samples. Return a report with all findings.

    Dynamo's caches are reset during the audit.

    Args:
        op: an op from ``sl.op`` or ``sl.adopt``.
        checks: the names of the checks to run, or one name, from ``shiplap.audit.CHECKS`` or ``ON_REQUEST``. The
            default is all of ``CHECKS``.
        seed: the seed of all random values. By default it is random. Each finding contains it.
        device: the device to run on, ``"cpu"`` by default.
        samples: a builder as for ``@op.samples``, used for this audit only.
        budget: the time, in seconds or as text such as ``"5m"``. Checks that are not finished by then are
            *incomplete*.
        progress: called with each finding as soon as it is there.
        examined: called with the name of a check and the description of a sample, for each sample that was examined.
        isolate: whether the samples run in a separate process. By default they do if this process can be forked.
        limits: the limits of that process, which are the seconds for one sample and the memory.

    Raises:
        AuditError: ``SL501`` if ``op`` is not a declared op, ``SL502`` if no samples can be generated, ``SL503`` for an
            unknown check.
        LibraryError: an error such as ``SL401`` if the library of a kernel cannot be used.

    Example:
        >>> assert audit(axpy).proven  # doctest: +SKIP
    """
    require_op(op, "audit()")
    # Names are checked before any sample runs.
    checks = (checks,) if isinstance(checks, str) else checks
    names = tuple(load_check(name).name if ":" not in name else name for name in (CHECKS if checks is None else checks))
    device = device or "cpu"
    require_device(device, f"audit(device={device!r})")
    seed = secrets.randbelow(2**31) if seed is None else seed
    seconds = parse_budget(budget)
    isolates = can_isolate(device) if isolate is None else isolate
    with nullcontext() if isolates else _in_this_process:
        # The time begins when it is the turn of this audit.
        deadline, described = time.monotonic() + seconds, examined is not None
        plan = AuditPlan(names, seed, device, deadline, seconds, samples, described=described)
        run = _AuditRun(op, plan, progress, examined, limits or ChildLimits())
        if isolates:
            run.run_in_children()
        else:
            run_session(op, plan, run.handle_event)
    run.note_absent_kernels()
    required, absent = tuple(name.partition(":")[0] for name in names), device_without_kernel(op, device)
    return make_report(op.spec.name, run.findings, required, run.ledger, absent)


class _AuditRun:
    """An audit in progress. It holds the findings so far, the plan of the remaining checks, and the check and sample
    that run now.
    """

    def __init__(
        self,
        op: Op,
        plan: AuditPlan,
        progress: Callable[[Finding], None] | None,
        examined: ExaminedCallback | None,
        limits: ChildLimits,
    ) -> None:
        """Prepare a run of the checks in ``plan`` on the op. ``progress`` is called with each finding and ``examined``
        with each examined sample, unless they are None. ``limits`` are those of a child process.
        """
        self.op, self.plan, self.limits = op, plan, limits
        self.progress, self.examined = progress, examined
        self.findings: list[Finding] = []
        self.ledger = Ledger()
        self.check, self.label = "samples", ""
        self.deaths = 0
        self.marks = CallMarks(shared=True)
        self.isolates = False  # whether samples run in processes of their own

    def run_in_children(self) -> None:
        """Run the checks in child processes until every check has a finding. If a child dies, another one continues."""
        self.isolates = True
        if "compile" in self.plan.checks and self.plan.device.partition(":")[0] == "cpu":
            _learn_processor_features()
        while self.plan.checks:
            death = None
            self.marks.clear()

            def work(send: SendEvent) -> None:
                """Run the checks that are left, in the child process."""
                use_marks(self.marks)
                run_session(self.op, self.plan, send)

            for event in stream_events(work, self.limits, self.marks.ended):
                if isinstance(event, ChildDeath):
                    death = event
                else:
                    self.handle_event(event)
            if death is None:
                return
            self._record_death(death)

    def handle_event(self, event: dict[str, Any]) -> None:
        """Handle one event of the process that runs the checks. Depending on its kind, store which check and sample
        run, store the counts of samples, pass on an examined sample, add a finding, or raise the error that it holds.
        """
        kind = event["kind"]
        if kind == "error":
            raise error(**event["parts"])
        if kind == "check":
            self.check, self.label = event["check"], ""
        elif kind == "case":
            self.label = event["label"]
        elif kind == "axes":
            self.ledger.absent.update(event["absent"])
        elif kind == "seen" and self.examined is not None:
            self.examined(event["check"], event["seen"])
        elif kind == "finding":
            # The next child must not report an error again that this one has reported.
            self.plan = replace(self.plan, raised=dict(event["raised"]))
            self.ledger.load(event["cells"])
            self._add(self._with_reproducer(Finding(**event["finding"]), event["label"]))

    def note_absent_kernels(self) -> None:
        """Add an incomplete finding if an adopted op has no kernel on the device. An adopted op belongs to another
        library and is only declared here. Without a kernel, only its reference ran.
        """
        kind = self.plan.device.partition(":")[0]
        if self.op.adoption is not None and not self.op.kernels.get(kind):
            others = f", but on {', '.join(self.op.kernels)}" if self.op.kernels else ""
            text = f"what was adopted has no kernel on {kind}{others}: only the reference ran"
            self._add(Finding("samples", "incomplete", self.op.spec.name, text))

    def _add(self, finding: Finding) -> None:
        """Add a finding, pass it to ``progress``, and remove its check from the plan if that check was next."""
        self.findings.append(finding)
        failed = self.plan.failed | ({self.plan.checks[0]} if finding.verdict == "fail" else set())
        # A check with several tools, such as sanitizer:memcheck, has findings under the name before the colon.
        if self.plan.checks and finding.check == self.plan.checks[0].partition(":")[0]:
            self.plan = replace(self.plan, checks=self.plan.checks[1:], failed=failed, tried=True)
        if self.progress is not None:
            self.progress(finding)

    def _with_reproducer(self, finding: Finding, label: str | None) -> Finding:
        """Return a failed finding with a script that shows the fault in a new process. Other findings are returned
        unchanged.

        ``label`` is that of the finding's sample, or None for a series of samples. If the sample alone does not show
        the fault, the script repeats the samples before it. If the fault does not show then either, the evidence of the
        finding says so.
        """
        # A process of its own is needed to show that the sample alone suffices.
        if finding.verdict != "fail" or not label or not self.isolates or self.plan.checks[0] != finding.check:
            return finding
        if time.monotonic() > self.plan.deadline or self._sample_shows_fault(finding.check, label, history=False):
            return finding
        if self._sample_shows_fault(finding.check, label, history=True):
            script = write_reproducer(self.op, finding.check, label, self.plan.seed, self.plan.device, history=True)
            what = f"{finding.evidence}; the sample alone shows nothing: it depends on the calls before"
            return replace(finding, evidence=what, fix=STATE_FIX, reproducer=script)
        what = f"{finding.evidence}; not reproduced in a process of its own: it depends on calls of other checks"
        return replace(finding, evidence=what)

    def _sample_shows_fault(self, check: str, label: str, *, history: bool) -> bool:
        """Return whether the sample ``label`` shows a fault in a new process. If ``history`` is true, the samples of
        the check before it are repeated first.
        """

        def work(send: SendEvent) -> str:
            """Return the problem of the sample ``label`` in this process as text, or an empty string if it has none."""
            use_marks(self.marks)
            send({"kind": "case", **load_check(check).own_limits})
            return repeat_sample(self.op, self.plan, check, label, history=history).problem

        return bool(run_isolated(work, self.limits, self.marks.ended))

    def _record_death(self, death: ChildDeath) -> None:
        """Add a finding for the check whose child process died. The sample that ran is repeated alone, and the finding
        shows the smallest sample that ends a process. A sample that was merely slow makes the finding incomplete, and
        otherwise it is a failure.
        """
        self.deaths += 1
        if death.how.startswith((NOT_STARTED, STOPPED)):
            self._leave_rest(death.machine_fault)
            return
        seed, device = self.plan.seed, self.plan.device
        name = self.check if self.check != "samples" else self.plan.checks[0].partition(":")[0]
        label, how = self.label, str(death)
        hangs, fills = death.how.startswith("hangs"), death.how.startswith("memory")
        waiting = (hangs or fills) and self.marks.reference_runs
        slow = waiting or death.is_slow or (hangs and _has_interpreted_kernel(self.op))
        killed = death.machine_fault
        if label:
            # Later children skip this sample, so that one crash costs one process.
            self.plan = replace(self.plan, lethal={**self.plan.lethal, label: name})
            smaller = "" if slow else self._smallest(name, label)
            how += "" if smaller else "; this sample alone does not do it: what came before has a part in it"
            label = smaller or label
            killed = "" if smaller else killed
        where = f"{label}; seed {seed}" if label else f"seed {seed}"
        text = write_reproducer(self.op, name, label, seed, device) if label else ""
        if killed:
            self._add(Finding(name, "incomplete", self.op.spec.name, killed, where))
        elif slow:  # a loop without an end and a slow interpreter look alike
            how = _describe_slow_end(death, waiting=waiting)
            self._add(Finding(name, "incomplete", self.op.spec.name, how, where))
        else:
            self._add(Finding(name, "fail", self.op.spec.name, how, where, _fix_for_death(death), text))
        # An op that crashes everywhere would otherwise take a process for each sample.
        if self.deaths >= MOST_DEATHS:
            self._leave_rest(f"not looked at: {self.deaths} processes have died")

    def _leave_rest(self, reason: str) -> None:
        """Add an incomplete finding with ``reason`` for each check that has no finding yet."""
        for rest in self.plan.checks:
            self._add(Finding(rest.partition(":")[0], "incomplete", self.op.spec.name, reason))

    def _smallest(self, check: str, label: str) -> str:
        """Return the label of the smallest sample that was found to end a process when it runs alone. The search starts
        from ``label``. Return an empty string if that sample itself does not end a process.
        """
        if not self._sample_ends_process(check, label):
            return ""
        recipe = SampleRecipe.parse(label)
        smallest = recipe.shrunk(
            lambda r: self._sample_ends_process(check, str(r)), lambda n: (n // 2,) if n > 1 else (), SHRINK_SECONDS
        )
        return str(smallest)

    def _sample_ends_process(self, check: str, label: str) -> bool:
        """Return whether a process that runs the sample ``label`` alone crashes or exceeds a limit."""

        def work(send: SendEvent) -> str:
            """Return the problem of the sample, in a process of its own."""
            use_marks(self.marks)
            return repeat_sample(self.op, self.plan, check, label).problem

        end = run_isolated(work, RETRY_LIMITS, self.marks.ended)
        return isinstance(end, ChildDeath) and not (end.how.startswith(("raised", NOT_STARTED, STOPPED)) or end.is_slow)


def _learn_processor_features() -> None:
    """Make Inductor find out in this process which vector instructions of the processor it may use. Each child process
    of an audit would find that out again, which takes seconds, since Inductor compiles and loads a library for each
    set of instructions. Processes that are forked from this one have the answer.
    """
    with _features_lock, suppress(Exception):  # the check `compile` says what is wrong with the compiler
        dynamo.processor_features()


def _has_interpreted_kernel(op: Op) -> bool:
    """Return whether Triton's interpreter runs a kernel of the op. The interpreter is slow."""
    kernels = [k for each in op.kernels.values() for k in each]
    return any(isinstance(k, LaunchedKernel) and k.interpreted for k in kernels)


def _describe_slow_end(death: ChildDeath, *, waiting: bool) -> str:
    """Return the evidence for the end of a child process that was slow, or whose reference was large. ``waiting`` says
    whether the reference of the op ran at the end.
    """
    if waiting:
        large = death.how.startswith("memory")
        what = "needs too much memory" if large else "takes too long"
        return (
            f"the reference {what} for this sample ({death.how.removeprefix('hangs: ')}): "
            f"bound its sizes with requires=, or write it in fewer operations{' of smaller tensors' if large else ''}"
        )
    if death.is_slow:
        return f"{death}: each call has ended, and is too slow for this check; bound the sizes with requires="
    return f"{death}: Triton's interpreter runs the kernel, and is slow; audit on a GPU for this sample"


def _fix_for_death(death: ChildDeath) -> str:
    """Return the advice for an op that ended a child process. It depends on how the process ended."""
    if death.how.startswith("memory"):
        return "free what a call has allocated, and allocate no more than the sizes of the arguments ask for"
    if death.how.startswith("hangs"):
        return (
            "let every loop end for every size that the declaration admits. If the call ends, and only takes longer "
            'than the audit waits, bound the sizes, as in requires="n <= 1024"'
        )
    if death.how.startswith("deadlock"):
        return "let every lock be released, and wait for nothing that another thread may never do"
    if "exit" in death.how:
        return "raise an error instead of ending the process"
    return "mask the tail of the last tile, and compute addresses from the sizes and strides of the arguments"


def measure_cost_isolated(op: Op, device: str, measure: Callable[..., CostCard]) -> CostCard | str:
    """Return the costs of one call of the op, measured by ``measure(op, device=...)`` in a process of its own if
    possible.

    If this process cannot be forked for ``device``, the costs are measured in this process. If they cannot be measured,
    return the reason as a string.
    """
    if not can_isolate(device):
        try:
            with _in_this_process:
                return measure(op, device=device)
        except Exception as e:
            return error_line(e)

    def work(send: SendEvent) -> dict[str, Any]:
        """Return the measured costs of the op as a dict, in the child process."""
        # A compilation takes longer than the usual limit for a sample.
        send({"kind": "case", "patience": 300})
        return asdict(measure(op, device=device))

    card = run_isolated(work)
    if isinstance(card, ChildDeath):
        return card.how.removeprefix("raised ")
    return CostCard(**{**card, "notes": tuple(card["notes"])})
