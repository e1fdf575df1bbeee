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
from shiplap.audit.reference_errors import observe_reference_error
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.run import reference_effects, run_op
from shiplap.sampling.samples import Samples
from shiplap.sampling.work_estimate import exceeds_work_limit, on_one_thread

SHARED, TIMES, AGAIN_S = 1 << 20, 8, 0.1  # elements from which on a call is repeated, how often, and for how long


def sizes_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``sizes`` calls the op. They have one long dim, or sizes near those of the
    blocks into which kernels divide their work.
    """
    # A reference of all pairs of 8,193 elements would take more memory than a child process may use.
    crowded = (c for c in samples.crowded() if not exceeds_work_limit(samples.op, c))
    yield from chain(samples.long(), crowded, samples.tiles())


def observe_sizes(op: Op, case: SampleCase) -> Observation:
    """Compare the op's results on one sample with the reference's, and repeat the call. The returned observation has a
    problem if the results differ from the reference's or from those of the repeated call.
    """
    try:
        with on_one_thread():
            own = reference_effects(op, case.args)
    except Exception as e:
        return observe_reference_error(op, case, e)
    # The op runs with all threads, the reference on one: its order of sums must not vary.
    got = run_op(op, case)
    with on_one_thread():
        difference = against_reference(op, case, got, own, measured=False)
    if not difference.problem and (problem := _why_repetition_differs(op, case, got)):
        return Observation(f"the same call again: {problem}", fix="fix the order of accumulation")
    return Observation(difference.problem, error=difference.error)


def _why_repetition_differs(op: Op, case: SampleCase, got: tuple[Tensor, ...]) -> str:
    """Return a message that says how the results of a repeated call differ in bits from ``got``, or an empty string if
    they do not differ. A sample of more than 2^20 elements is repeated several times, since a race does not always
    show.
    """
    end = time.process_time() + AGAIN_S
    for _ in range(TIMES if case.numel > SHARED else 1):
        if problem := bitwise_difference(run_op(op, case), got, "the first time"):
            return problem
        if time.process_time() > end:
            break
    return ""


CHECK = Check(
    "sizes",
    order=50,
    observes="equals the reference, twice with the same bits, at sizes around tiles, thresholds and powers of two",
    observe=observe_sizes,
    cases=sizes_cases,
    obligations=("value", "determinism"),
    fix="loop over all tiles, mask the last one, and take no path that only small sizes have tested",
    patience=30.0,
)
