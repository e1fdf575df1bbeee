"""``sizes``: beyond one tile, around every threshold in the code, and with enough elements for several threads.

The sizes come from constants in the kernels, their configs, ``supports`` and the reference, and from powers of two up
to 4,096. Sums of 4,096 positive terms show the dtype of the accumulator.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain

from torch import Tensor

from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.sampling.case import Case
from shiplap.sampling.compare import bitwise
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.run import last_line, reference, run, unwritten
from shiplap.sampling.samples import Samples
from shiplap.sampling.work_estimate import on_one_thread

SHARED, TIMES, AGAIN_S = 1 << 20, 8, 0.1  # elements from which on a call is repeated, how often, and for how long


def cases(samples: Samples) -> Iterable[Case]:
    """Yield samples with long dims and with sizes around tiles."""
    yield from chain(samples.long(), samples.tiles())


def observe(op: Op, case: Case) -> Observation:
    """Compare one sample with the reference, and repeat the call."""
    try:
        with on_one_thread():
            own = reference(op, case.args)
    except Exception as e:  # sizes that the declaration admits and a builder or the reference does not
        if unwritten(e):
            raise
        return Observation(skip=f"the reference refuses it: {last_line(e)}")
    # The op runs with all threads, the reference on one: its order of sums must not vary.
    got = run(op, case)
    with on_one_thread():
        difference = against_reference(op, case, got, own)
    if not difference.problem and (problem := _repeated(op, case, got)):
        return Observation(f"the same call again: {problem}", fix="fix the order of accumulation")
    return Observation(difference.problem, error=difference.error)


def _repeated(op: Op, case: Case, got: tuple[Tensor, ...]) -> str:
    """Return the difference of a repeated call. Calls on several threads are repeated several times while they are
    quick, since a race does not show each time.
    """
    end = time.process_time() + AGAIN_S
    for _ in range(TIMES if case.numel > SHARED else 1):
        if problem := bitwise(run(op, case), got, "the first time"):
            return problem
        if time.process_time() > end:
            break
    return ""


CHECK = Check(
    "sizes",
    order=50,
    observes="equals the reference, twice with the same bits, at sizes around tiles, thresholds and powers of two",
    observe=observe,
    cases=cases,
    obligations=("value", "determinism"),
    fix="loop over all tiles, mask the last one, and take no path that only small sizes have tested",
    patience=30.0,
)
