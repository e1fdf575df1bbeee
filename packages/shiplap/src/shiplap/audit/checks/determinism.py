"""``determinism``: the same input gives the same bits, whatever was called in between."""

from __future__ import annotations

from collections.abc import Iterable

from shiplap.audit.check import Check, Observation
from shiplap.audit.first_call import why_first_call_was_wrong
from shiplap.dispatch import Op
from shiplap.sampling.builder import why_values_repeat
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.run import run_op
from shiplap.sampling.samples import Samples, with_other_values

REPEATED_CALLS = 3
VARYING_FIX = "fix the order of accumulation, draw random numbers outside the op, and keep no state between calls"


def determinism_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``determinism`` calls the op. There is one for each kind of random values,
    such as normal, positive or constant, at the base sizes. The same kinds of values at larger sizes follow.
    """
    yield from samples.values()


def observe_determinism(op: Op, case: SampleCase) -> Observation:
    """Repeat a call, the last time after a call with other values. The returned observation has a problem if the bits
    of the results change.
    """
    if problem := why_first_call_was_wrong(op):
        return Observation(f"the first call in a process: {problem}", fix="initialise before the first call computes")
    first = run_op(op, case)
    for _ in range(REPEATED_CALLS - 1):
        if problem := bitwise_difference(run_op(op, case), first, "the first time"):
            return Observation(f"the same call again: {problem}", fix=VARYING_FIX)  # whatever sizes vary beside it
    # A result that an op keeps from the call before is right until the values change.
    other = with_other_values(op, case)
    run_op(op, other)
    if problem := bitwise_difference(run_op(op, case), first, "before"):
        return Observation(f"after a call with other values: {problem}", fix="keep no state between calls")
    # Where the values do not change, a result of the call before would be right.
    return Observation(skip=why_values_repeat(op, case, other), limited=True)


CHECK = Check(
    "determinism",
    order=70,
    observes=f"{REPEATED_CALLS} calls, and one more after a call with other values, agree bit for bit",
    observe=observe_determinism,
    cases=determinism_cases,
    obligations=("value", "determinism"),
    varies=("order of calls",),
    fix=VARYING_FIX,
)
