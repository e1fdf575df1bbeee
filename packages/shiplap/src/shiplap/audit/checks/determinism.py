"""``determinism``: the same input gives the same bits, whatever was called in between."""

from __future__ import annotations

from collections.abc import Iterable

from shiplap.audit.check import Check, Observation
from shiplap.audit.first_call import was_wrong
from shiplap.dispatch import Op
from shiplap.sampling.case import Case
from shiplap.sampling.compare import bitwise
from shiplap.sampling.run import run
from shiplap.sampling.samples import Samples, other

REPEATS = 3


def cases(samples: Samples) -> Iterable[Case]:
    """Yield samples of all kinds of values."""
    yield from samples.values()


def observe(op: Op, case: Case) -> Observation:
    """Repeat a call, and repeat it again after a call with other values."""
    if problem := was_wrong(op):
        return Observation(f"the first call in a process: {problem}", fix="initialise before the first call computes")
    first = run(op, case)
    for _ in range(REPEATS - 1):
        if problem := bitwise(run(op, case), first, "the first time"):
            return Observation(f"the same call again: {problem}")
    run(op, other(op, case))
    if problem := bitwise(run(op, case), first, "before"):
        return Observation(f"after a call with other values: {problem}", fix="keep no state between calls")
    return Observation()


CHECK = Check(
    "determinism",
    order=70,
    observes=f"{REPEATS} calls, and one more after a call with other values, agree bit for bit",
    observe=observe,
    cases=cases,
    obligations=("value", "determinism"),
    varies=("order of calls",),
    fix="fix the order of accumulation, draw random numbers outside the op, and keep no state between calls",
)
