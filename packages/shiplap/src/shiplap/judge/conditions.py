"""Calls of a candidate under other conditions of its caller: in another thread and inference mode, or in autocast."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from shiplap.judge.checks import JudgeSession
from shiplap.judge.options import StepDeadline
from shiplap.judge.variants import InputForm
from shiplap.sampling.compare import Difference
from shiplap.sandbox.candidate import CandidateError, ExpectedEffects, MachineLack, TargetProcess
from shiplap.sandbox.machine_lack import is_lack

COMPILES_S = 2.0  # seconds of the first call from which on autocast, which may compile once more, is left out
COMPILED_AGAIN = 2.0  # of the time of the first call, which a call under other conditions may take
GROSS, SPREAD = 0.5, 4.0  # of the size of a result, and of the reference's own change: what no rounding explains
OTHER_THREAD = "another thread, inference mode, deterministic algorithms and another number of threads"


def call_elsewhere(case: JudgeSession, witness: TargetProcess, form: InputForm) -> None:
    """Compare one call of the candidate on inputs of ``form`` in another thread, in inference mode, with deterministic
    algorithms and another number of threads, as a server may call it. Then compare one call under autocast, unless the
    candidate seems to compile. A fault is recorded in ``case``.
    """
    with case.record_faults(f"{form.label} in {OTHER_THREAD}"), _unless_late(case, OTHER_THREAD, "raised") as is_time:
        if is_time:
            args = case.problem.draw(form)
            _call_once(case, witness, args, case.problem.expect_effects(form, args), "thread")
    if case.reasons:
        return
    if case.first_call > COMPILES_S:
        case.unchecked.append("autocast: the first call took so long that the candidate seems to compile for each way")
        return
    # A candidate may have results in another dtype than its reference there.
    with (
        case.record_faults(f"{form.label} under autocast"),
        _unless_late(case, "autocast", "raised", "results") as is_time,
    ):
        args = case.problem.draw(form) if is_time else ()
        if is_time and (expected := _effects_under_autocast(case, form, args)) is not None:
            _call_once(case, witness, args, expected, "autocast")


@contextmanager
def _unless_late(case: JudgeSession, what: str, *waived: str) -> Iterator[bool]:
    """Return a context manager for a call under the conditions ``what``. Its value is whether there is time for it.

    Code that ``torch.compile`` has compiled is compiled once more. So there is none if twice the time of the first call
    is no longer left, which is recorded in ``case``. Errors of the candidate whose checks are ``waived``, such as an
    exception that it raises, are recorded there as well, since no caller gets a wrong result then.
    """
    is_time = time.monotonic() + COMPILED_AGAIN * case.first_call <= case.budget.ends
    if not is_time:
        case.unchecked.append(f"{what}: there was no time")
    try:
        yield is_time
    except MachineLack:
        raise
    except CandidateError as e:
        if e.check not in waived:
            raise
        how = "raises there" if e.check == "raised" else "has other results there"
        case.unchecked.append(f"{what}: the candidate {how}: {e.evidence}"[:200])


def _call_once(
    case: JudgeSession, witness: TargetProcess, args: Sequence[object], expected: ExpectedEffects, conditions: str
) -> None:
    """Call the candidate on ``args`` under ``conditions`` (see ``protocol.CallTarget``), and compare its effects with
    ``expected``. Raise the errors of ``TargetProcess.call``.
    """
    with StepDeadline(case.budget.last).step(witness.prisoner):
        witness.call(args, expected, conditions=conditions)
    case.calls += 1


def _effects_under_autocast(case: JudgeSession, form: InputForm, args: tuple[object, ...]) -> ExpectedEffects | None:
    """Return the effects of the reference on ``args`` under autocast to bfloat16. They are compared by gross deviations
    alone, since autocast rounds other operators of a candidate than of its reference. Return None if the reference
    refuses autocast, or has results of other shapes there.
    """
    usual = case.problem.expect_effects(form, args).own
    try:
        with torch.autocast(torch.device(case.options.device).type, torch.bfloat16):
            expected = case.problem.expect_effects(form, args)
    except Exception as e:
        if is_lack(e):
            raise
        return None
    if [o.shape for o in expected.own] != [o.shape for o in usual]:
        return None

    def against(got: Sequence[Tensor]) -> Difference:
        """Return a difference if a result in ``got`` is grossly off the reference in its usual precision."""
        for number, (g, rounded, exact) in enumerate(zip(got, expected.own, usual, strict=True)):
            if not (g.is_floating_point() and exact.is_floating_point() and g.shape == exact.shape and g.numel()):
                continue
            g, rounded, exact = g.double(), rounded.double(), exact.double()
            size = exact.abs() + exact.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()
            known = exact.isfinite() & rounded.isfinite()
            spread = (rounded - exact)[known].abs().amax() if bool(known.any()) else 0.0
            # A NaN is never as near as what is allowed.
            near = (g - exact).abs() <= GROSS * size + SPREAD * spread
            if bool((known & ~near).any()):
                return Difference(f"result {number} is off by more than half of its size under autocast")
        return Difference()

    return replace(expected, against=against)
