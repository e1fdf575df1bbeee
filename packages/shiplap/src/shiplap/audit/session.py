"""The part of an audit that runs the op: one check after another, with an event at the start and the end of each.

It runs in a process of its own (``shiplap.audit.engine``), so all its events are plain data: descriptions of samples,
and findings. The inputs that a check has examined are observed on the tensors that the op actually received.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shiplap.audit.check import NO_CAPTURE, AuditSubject, Check, Observation
from shiplap.audit.checks import load_check
from shiplap.audit.checks.process import process_state
from shiplap.audit.first_call import make_first_call
from shiplap.dispatch import Op
from shiplap.dispatch.check_unchanged import writes_are_audited
from shiplap.errors import LibraryError, ShiplapError, error, error_line
from shiplap.errors.base import error_parts
from shiplap.kernels.triton.interpreter_budget import LaunchTooLong, limit_launch_time
from shiplap.sampling.admitted_axes import absent_axes
from shiplap.sampling.case import SampleCase, describe_arguments, is_float8, tensors_among
from shiplap.sampling.finding import Finding
from shiplap.sampling.ledger import Ledger
from shiplap.sampling.run import needs_builder, reference_effects, suppress_warnings, why_reference_missing
from shiplap.sampling.samples import Samples, sample

INTERPRETER_SECONDS = 3.0  # for one launch in Triton's interpreter: a check calls a kernel several times for a sample

SendSessionEvent = Callable[[dict[str, Any]], None]

LOST_DEVICE_FIX = (
    "mask the tail of the last tile, and compute addresses from the sizes and strides of the arguments. The reference "
    "ran on the same inputs: if it indexes with values, exclude wrong ones with @op.samples"
)


@dataclass(frozen=True)
class AuditPlan:
    """The part of an audit that is left to do. ``checks`` are the checks without a finding. ``failed``, ``raised`` and
    ``lethal`` are results of those that ran. ``builder`` makes the arguments of samples, or is None.

    Attributes:
        lethal: a mapping from labels of samples that ended a process to the name of the check in which they did.
        tried: whether the base sample has been called already.
        described: whether an event describes each sample that was examined.
    """

    checks: tuple[str, ...]
    seed: int
    device: str
    deadline: float
    budget: float
    builder: Callable[..., tuple[Any, ...]] | None = None
    failed: frozenset[str] = frozenset()
    raised: dict[str, str] = field(default_factory=dict)
    lethal: dict[str, str] = field(default_factory=dict)
    tried: bool = False
    described: bool = True


def run_session(op: Op, plan: AuditPlan, send: SendSessionEvent) -> None:
    """Run the checks of ``plan`` on the op, usually in a child process. Call ``send`` with an event for each check,
    sample and finding, and for an error of the base sample, which ends the run.
    """
    with _audited(op, plan):
        subject = _make_subject(op, plan, send)
        lost = _LostDevice()
        # A later child continues an audit whose base sample has already been checked.
        if not plan.tried:
            lost.note("before", device_fault(plan.device))
            try:
                if not lost.where:
                    _check_base_sample(op, subject.samples, send)
            except ShiplapError as e:
                send({"kind": "error", "parts": error_parts(e)})
                return
            lost.note("first", device_fault(plan.device) if not lost.where else "")
            if not lost.where:
                send({"kind": "axes", "absent": absent_axes(subject.samples)})
        for name in plan.checks:
            send({"kind": "check", "check": name})
            finding = lost.finding(name, op) if lost.where else _run_check(load_check(name), subject, plan)
            if not lost.where and (fault := device_fault(plan.device)):
                lost.note(name, fault)
                finding = lost.finding(name, op)
            if finding.verdict == "fail":
                subject.failed.add(name)
            send(
                {
                    "kind": "finding",
                    "finding": dataclasses.asdict(finding),
                    "raised": subject.raised,
                    "cells": subject.ledger.records(),
                    "label": subject.failing,
                }
            )
            # The process that receives them adds them up, so each check sends its own cells alone.
            subject.ledger, subject.failing = Ledger(), ""


@dataclass
class _LostDevice:
    """A device that a call has left unusable. ``where`` is the name of the check of the call, ``"first"`` for the first
    call of the op, ``"before"`` for a call before this audit, or empty if the device can be used. ``fault`` is the
    error of the device. ``told`` says whether a finding has blamed the op.
    """

    where: str = ""
    fault: str = ""
    told: bool = False

    def note(self, where: str, fault: str) -> None:
        """Record that a call in ``where`` has led to the error ``fault`` of the device, unless ``fault`` is empty."""
        if fault:
            self.where, self.fault = where, fault

    def finding(self, name: str, op: Op) -> Finding:
        """Return the finding of the check ``name``. It is the failure for the lost device if the op is to blame and no
        other finding has said so. Otherwise the check was not run.
        """
        call = "the first call of the op" if self.where == "first" else f"a call in the check {self.where}"
        if self.where == "before":
            why = f"was not run: an earlier call has left the device unusable ({self.fault}): audit in a new process"
            return Finding(name, "incomplete", op.spec.name, why)
        if self.told:
            why = f"was not run: the device cannot be used since {call}"
            return Finding(name, "incomplete", op.spec.name, why)
        self.told = True
        what = f"{call.replace(f'the check {name}', 'this check')} has left the device unusable: {self.fault}"
        return Finding(name, "fail", op.spec.name, what, fix=LOST_DEVICE_FIX)


def device_fault(device: str) -> str:
    """Return the first line of the error that the CUDA device reports, if a kernel has left it unusable for this
    process, as an access outside of all memory does. Return an empty string if the device can be used, or if it is
    another kind of device.
    """
    if torch.device(device).type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as e:
        return error_line(e)
    return ""


def repeat_sample(op: Op, plan: AuditPlan, check: str, label: str, *, history: bool = False) -> Observation:
    """Return the observation that the check ``check`` makes of the sample ``label``. If ``history`` is true, the
    samples of the check before it are observed first. If it is false, only this sample is observed.
    """
    with _audited(op, plan):
        if history:
            return load_check(check).replay_history(op, label, plan.seed, plan.device)
        return load_check(check).look(op, sample(op, label, plan.seed, plan.device))


def _make_subject(op: Op, plan: AuditPlan, send: SendSessionEvent) -> AuditSubject:
    """Return the op under audit with its samples and with the results of earlier processes, which ``plan`` holds. For
    each sample that is begun or examined, it calls ``send`` with an event.
    """

    def begins(check: Check, case: SampleCase | None) -> None:
        """Send an event that says that ``check`` begins the sample ``case``, with the check's time limits. If ``case``
        is None, the event says that no sample runs.
        """
        label = case.label if case else ""
        send({"kind": "case", "check": check.name, "label": label, **check.own_limits})

    def looked(check: str, case: SampleCase) -> None:
        """Send an event that describes the sample ``case``, which the check named ``check`` has examined."""
        if plan.described:
            send({"kind": "seen", "check": check, "seen": describe_inputs(op, case)})

    subject = AuditSubject(op, Samples(op, plan.seed, plan.device))
    subject.begins, subject.looked = begins, looked
    # The plan holds the results of earlier children of this audit.
    subject.failed, subject.raised = set(plan.failed), dict(plan.raised)
    subject.lethal, subject.deadline = dict(plan.lethal), plan.deadline
    return subject


def _check_base_sample(op: Op, samples: Samples, send: SendSessionEvent) -> None:
    """Call the reference and the op on the base sample (small sizes, default scalars), and record the op's first call.
    Raise ``SL502`` if the reference raises an error, since every check would then fail in the same way.
    """
    case = samples.build(samples.base)
    send({"kind": "case", "check": "samples", "label": case.label})
    try:
        reference_effects(op, case.args)
    except Exception as e:
        if why_reference_missing(e):
            return  # each check says what it could not compare
        if needs_builder(op):
            raise error(
                "SL502",
                where=op.spec.name,
                got=f"the reference raised {error_line(e)}",
                expected="integers that mean something to the op",
            ) from e
        raise error(
            "SL502",
            where=op.spec.name,
            got=f"the reference raised {error_line(e)}",
            expected=f"a result for {describe_arguments(op, case)}",
            fix="correct the reference, or exclude the input with requires=(...)",
        ) from e
    try:
        make_first_call(op, case, process_state)
    except LibraryError:
        raise
    except (Exception, LaunchTooLong):
        return  # a finding of the checks


def _run_check(check: Check, subject: AuditSubject, plan: AuditPlan) -> Finding:
    """Run one check and return its finding. The finding is a failure if the check itself raises an exception. It is
    incomplete if the time is over or if the reference is not written yet. A check that does not apply to the op is
    skipped, also if the time is over.
    """
    if time.monotonic() > subject.deadline:
        reason = check.skips(subject.op)
        if check.name in ("cuda_graph", "cudagraph_trees") and torch.device(plan.device).type != "cuda":
            reason = NO_CAPTURE
        if reason:
            return Finding(check.name, "skip", subject.name, reason)
        return Finding(check.name, "incomplete", subject.name, f"out of budget={plan.budget:g}")
    try:
        return check.run(subject)
    except Exception as e:  # a check must not take the audit down with it
        if missing := why_reference_missing(e):
            return Finding(check.name, "incomplete", subject.name, missing)
        return Finding(
            check.name,
            "fail",
            subject.name,
            f"the check itself raised {error_line(e)}",
            input=f"seed {subject.samples.seed}",
            fix="report this: the auditor is wrong, not the op",
        )


@contextmanager
def _with_gradients() -> Iterator[None]:
    """Return a context in which gradients are recorded, as outside of a caller's ``no_grad`` or inference mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def _audited(op: Op, plan: AuditPlan) -> Iterator[None]:
    """Return a context manager in whose body checks run on the op. If the plan has a builder of samples, it replaces
    the op's own meanwhile. Launches in Triton's interpreter have a time limit.
    """
    before = op.sampler
    op.sampler = plan.builder or before
    try:
        with suppress_warnings(), writes_are_audited(), limit_launch_time(INTERPRETER_SECONDS), _with_gradients():
            yield
    finally:
        op.sampler = before


MOST_EXAMINED_ELEMENTS = 1 << 20  # elements beyond which values are not looked at


def describe_inputs(op: Op, case: SampleCase) -> dict[str, Any]:
    """Return a description of a sample of ``op`` as a dict of values that JSON can represent. It has the label, sizes,
    dtypes, kinds of values and layouts, and the optional arguments that are absent.
    """
    values = tensors_among(case.args)
    return {
        "label": case.label,
        "sizes": {k: str(v) for k, v in case.recipe.sizes},
        "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in values}),
        "values": sorted({fact for t in values for fact in _facts_of_values(t)}),
        "layouts": sorted({_layout_name(t) for t in values}),
        "absent": [a.name for a, v in zip(op.spec.args, case.args, strict=True) if a.tensor and v is None],
    }


def _facts_of_values(t: Tensor) -> list[str]:
    """Return facts about the values of a tensor on which a kernel may depend, such as ``NaN`` or ``negative``. The list
    is empty for complex, float8 and bool tensors and for more than 2^20 elements. It is ``["none"]`` for no elements.
    """
    if t.numel() == 0:
        return ["none"]
    if t.numel() > MOST_EXAMINED_ELEMENTS or t.is_complex() or is_float8(t) or t.dtype == torch.bool:
        return []
    if not t.is_floating_point():
        # Not each integer dtype has the operators below.
        wide = t.to(torch.int64)
        facts = {"negative integers": wide.min() < 0, "integers from 0": wide.min() >= 0}
        facts["repeated integers"] = wide.unique().numel() < wide.numel()
        return [name for name, holds in facts.items() if bool(holds)]
    wide = t.double()
    size = wide[torch.isfinite(wide)].abs()
    top = float(size.max()) if size.numel() else 0.0
    facts = {
        "NaN": torch.isnan(wide).any(),
        "infinity": torch.isinf(wide).any(),
        "-0.0": ((wide == 0) & torch.signbit(wide)).any(),
        "zeros": (wide == 0).any(),
        "subnormal": ((wide != 0) & (wide.abs() < torch.finfo(t.dtype).tiny)).any(),
        "negative": (wide < 0).any(),
    }
    # 65504 is the largest finite number of float16.
    sizes = {"beyond float16": top > 65504, "around 1": 0.1 < top < 50, "above 50": top >= 50}
    return [name for name, holds in {**facts, **sizes}.items() if bool(holds)]


def _layout_name(t: Tensor) -> str:
    """Return the name of a tensor's memory layout, which is ``contiguous``, ``offset``, ``expanded``, ``padded rows``,
    ``strided`` or ``permuted``.
    """
    if t.is_contiguous():
        return "offset" if t.storage_offset() else "contiguous"
    if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)):
        return "expanded"
    if t.dim() and t.stride(-1) == 1:
        return "padded rows"
    order = sorted(t.stride(), reverse=True)
    return "strided" if list(t.stride()) == order else "permuted"
