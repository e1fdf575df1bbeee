"""Calls of a candidate under other conditions of its caller, such as another thread or autocast."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from shiplap.judge.checks import JudgeSession
from shiplap.judge.options import StepDeadline
from shiplap.judge.variants import InputForm
from shiplap.sampling.case import tensors_among
from shiplap.sampling.compare import Difference, is_finite, part_length
from shiplap.sandbox.candidate import CandidateError, ExpectedEffects, MachineLack, TargetProcess
from shiplap.sandbox.machine_lack import is_lack
from shiplap.sandbox.source_scan import gather_sources, read_source

COMPILES_S = 2.0  # seconds of the first call from which on autocast, which may compile once more, is left out
COMPILED_AGAIN = 2.0  # of the time of the first call, which a call under other conditions may take
GROSS, SPREAD = 0.5, 4.0  # of the size of a result, and of the reference's own change: what no rounding explains
CANCELLED = 0.1  # of the mean size of a result: what rounding leaves of its elements near zero, and five times more
ROUNDED = 1e-2  # of the largest argument: what is left of a difference of equal numbers
NAMES = {
    "thread": "in another thread, inference mode, deterministic algorithms and another number of threads",
    "stream": "on another stream than the default one",
    "gradient mode": "where gradients are recorded and no argument requires one",
    "parameters": "on parameters",
    "one tensor": "on one tensor for two arguments",
    "autocast": "under autocast",
}
"""The conditions of a call (see ``call_conditions.CONDITIONS``), as a verdict names them."""


def call_elsewhere(case: JudgeSession, witness: TargetProcess, form: InputForm) -> None:
    """Compare one call of the candidate on inputs of ``form`` in another thread, in inference mode, with deterministic
    algorithms and another number of threads, as a server may call it. Then compare calls on another stream of a GPU,
    where gradients are recorded, on parameters, on one tensor in the place of two arguments, and under autocast, unless
    the candidate seems to compile for each way of a call. A fault is recorded in ``case``.
    """
    usual: dict[str, Callable[[tuple[object, ...]], ExpectedEffects | None]] = {
        "thread": lambda args: case.problem.expect_effects(form, args),
        "stream": lambda args: _effects_on_copies(case, form, args),
        "gradient mode": lambda args: case.problem.expect_effects(form, args),
        "parameters": lambda args: case.problem.expect_effects(form, args),
        "one tensor": lambda args: _effects_of_equal_arguments(case, form, args),
        "autocast": lambda args: _effects_under_autocast(case, form, args),
    }
    if case.options.device == "cpu":
        del usual["stream"]
    for conditions, expect in usual.items():
        named = NAMES[conditions]
        if case.first_call > COMPILES_S and conditions != "thread":
            why = "the first call took so long that the candidate seems to compile for each way"
            case.unchecked.append(f"{named}: {why}")
            continue
        waived = ("raised", "results") if conditions == "autocast" else ("raised",)
        with case.record_faults(f"{form.label}, {named}"), _unless_late(case, named, *waived) as is_time:
            args = case.problem.draw(form) if is_time else ()
            args = _with_equal_tensors(args) if conditions == "one tensor" else args
            if args and (expected := expect(args)) is not None:
                _call_once(case, witness, args, expected, conditions)
        if conditions == "autocast" and case.reasons and _reads_addresses(case.candidate.file):
            # It may take what an operator of torch returns for float32, which is right everywhere else.
            evidence, advice = case.reasons.pop().evidence, "switch autocast off in it, or convert what it reads"
            case.missing[conditions] = f"{evidence}; it reads memory by addresses: {advice}"
        # What was compared before was right, on the default stream. What a call leaves behind has other causes.
        if conditions == "stream" and case.reasons and case.reasons[-1].check not in ("state", "threads"):
            evidence = case.reasons.pop().evidence
            case.missing[conditions] = f"{named}: {evidence}; launch its kernels on torch's current stream"
            return
        if case.reasons:
            return


def _effects_on_copies(case: JudgeSession, form: InputForm, args: tuple[object, ...]) -> ExpectedEffects | None:
    """Return the effects of the reference on ``args``, of which the candidate gets copies, or None if the reference
    changes one of them.
    """
    expected = case.problem.expect_effects(form, args)
    return expected if not expected.changed else None


def _reads_addresses(file: str) -> bool:
    """Return whether a candidate, or a source beside it, reads memory of tensors by their addresses, which have no
    dtype.
    """
    return any(b"data_ptr" in read_source(source) for source in gather_sources(file)) if file else False


def _with_equal_tensors(args: tuple[object, ...]) -> tuple[object, ...]:
    """Return ``args`` with the second of two tensors that look alike, but for their values, replaced by the first one.
    Return an empty tuple if no two tensors of floating-point numbers among the arguments look alike. Other tensors may
    be indices, and on a GPU an index out of range ends all use of the device in this process.
    """
    for second, b in enumerate(args):
        for a in args[:second]:
            if _is_floating(a) and _is_floating(b) and _fit(a) == _fit(b):
                return (*args[:second], a, *args[second + 1 :])
    return ()


def _is_floating(value: object) -> TypeGuard[Tensor]:
    """Return whether ``value`` is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _fit(t: Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common that can stand for one another."""
    return t.dtype, t.device, t.shape, t.stride()


def _effects_of_equal_arguments(
    case: JudgeSession, form: InputForm, args: tuple[object, ...]
) -> ExpectedEffects | None:
    """Return the effects of the reference on ``args``, of which two are equal. Only gross deviations from them count,
    since a difference of equal numbers is all rounding. Return None if the reference refuses these arguments, changes
    one of them, or gives no finite numbers.
    """
    try:
        expected = case.problem.expect_effects(replace(form, label=f"{form.label}, {NAMES['one tensor']}"), args)
        usable = not expected.changed and all(
            is_finite(o) for o in expected.own if o.is_floating_point() or o.is_complex()
        )
    except Exception as e:
        if is_lack(e):
            raise
        return None
    if not usable:
        return None
    numbers = [t for t in tensors_among(args) if t.is_floating_point() and t.numel()]
    scale = max((float(part.abs().amax()) for t in numbers for (part,) in _wide_parts(t)), default=0.0)

    def against(got: Sequence[Tensor]) -> Difference:
        """Return a difference if a result in ``got`` is grossly off that of the reference. An index may be another
        one, where numbers are equal.
        """
        for number, (g, exact) in enumerate(zip(got, expected.own, strict=True)):
            if not (g.is_floating_point() and exact.is_floating_point()):
                continue
            # Elements near zero are off by the rounding of larger numbers that cancel out.
            if not _is_near(g, exact, exact, CANCELLED * _root_mean_square(exact) + ROUNDED * scale):
                return Difference(f"result {number} is off by more than half of its size")
        return Difference()

    return replace(expected, against=against)


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
            spread = max(float((r - e).nan_to_num(0.0, 0.0, 0.0).abs().amax()) for r, e in _wide_parts(rounded, exact))
            if not _is_near(g, exact, rounded, GROSS * _root_mean_square(exact) + SPREAD * spread):
                return Difference(f"result {number} is off by more than half of its size under autocast")
        return Difference()

    return replace(expected, against=against)


def _wide_parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the elements of ``tensors``, which have one shape, in float64 and in parts. A GPU whose memory holds a
    large result may have no room for several copies of it.
    """
    parts = (t.reshape(-1).split(part_length(t)) for t in tensors)
    for each in zip(*parts, strict=True):
        yield tuple(part.double() for part in each)


def _root_mean_square(t: Tensor) -> float:
    """Return the root mean square of the elements of ``t``. NaN and infinity count as 0."""
    squares = sum(float(part.nan_to_num(0.0, 0.0, 0.0).square().sum()) for (part,) in _wide_parts(t))
    return math.sqrt(squares / max(1, t.numel()))


def _is_near(got: Tensor, exact: Tensor, rounded: Tensor, common: float) -> bool:
    """Return whether each element of ``got`` is off ``exact`` by at most half of its size and ``common``. Elements at
    which ``exact`` or ``rounded`` is not finite are left out.
    """
    for g, e, r in _wide_parts(got, exact, rounded):
        # A NaN is never as near as what is allowed.
        near = (g - e).abs() <= GROSS * e.abs() + common
        if bool((e.isfinite() & r.isfinite() & ~near).any()):
            return False
    return True
