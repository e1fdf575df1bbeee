"""``threads``: the op works on other threads, concurrently, and with any number of intra-op threads."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import FrameType

import torch
from torch import Tensor

from shiplap.audit.check import Check, Observation, why_random
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare import derive_reduction
from shiplap.sampling.compare_to_reference import against_reference, against_run
from shiplap.sampling.run import run_op
from shiplap.sampling.samples import Samples, with_other_values

# Several callers and several rounds, so that calls overlap in different ways.
CALLERS, ROUNDS = 4, 8
INTERPRETER_MODULE = "triton.runtime.interpreter"


def threads_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``threads`` calls the op. They are the base sample, larger ones, and some
    that are large enough for several threads.
    """
    yield from samples.plain()
    yield from samples.grown(1)
    yield from islice(samples.wide(), 1)
    yield from islice(samples.grains(), 2)


def _runs_in_interpreter(op: Op, case: SampleCase) -> bool:
    """Return whether Triton's interpreter runs a part of the call. A profile function looks for frames of the
    interpreter during one call.
    """
    if INTERPRETER_MODULE not in sys.modules:
        return False
    seen = False

    def look(frame: FrameType, event: str, argument: object) -> None:
        """Set ``seen`` to True if ``frame`` belongs to Triton's interpreter."""
        nonlocal seen
        seen = seen or frame.f_globals.get("__name__") == INTERPRETER_MODULE

    before = sys.getprofile()
    # A profile function sees every Python frame, also those of libraries.
    sys.setprofile(look)
    try:
        run_op(op, case)
    finally:
        sys.setprofile(before)
    return seen


def observe_threads(op: Op, case: SampleCase) -> Observation:
    """Call the op on another thread, on several threads at once, and with several numbers of intra-op threads. The
    returned observation has a problem if results differ.
    """
    if _runs_in_interpreter(op, case):
        return Observation(skip="Triton's interpreter, which runs the kernel here, is made for one thread")
    # Different values, because callers with equal ones could share a buffer unnoticed.
    pair = [case, with_other_values(op, case)]
    expected = [run_op(op, c) for c in pair]

    for c, own in zip(pair, expected, strict=True):  # an audit's samples run on a thread of their own already
        if problem := against_reference(op, c, own, measured=False).problem:
            return Observation(f"on another thread: {problem}")

    def agrees(which: int, got: tuple[Tensor, ...]) -> str:
        """Return a message that says how the results ``got`` differ from those of an undisturbed call on the sample
        ``pair[which]``, or an empty string if they agree.
        """
        sums = derive_reduction(op.spec, case.env)
        return against_run(op, got, expected[which], sums, lambda body: body(op, pair[which].args)).problem

    def caller(which: int) -> str:
        """Call the op several times on the sample ``pair[which]``. Return a message with the first difference from the
        results of an undisturbed call, or an empty string if there is none.
        """
        rounds = ROUNDS if case.numel < 1 << 14 else 2
        return next((p for _ in range(rounds) if (p := agrees(which, run_op(op, pair[which])))), "")

    with ThreadPoolExecutor(1) as pool:
        if problem := pool.submit(caller, 0).result():
            return Observation(f"on another thread: {problem}")
    with ThreadPoolExecutor(CALLERS) as pool:
        problems = list(pool.map(caller, [i % 2 for i in range(CALLERS)]))
    if problem := next(filter(None, problems), ""):
        return Observation(
            f"{CALLERS} concurrent callers with different values: {problem}",
            fix="keep no state between calls: pass scratch memory in as workspace",
        )
    return _observe_intra_op_threads(op, case, agrees)


def _observe_intra_op_threads(op: Op, case: SampleCase, agrees: object) -> Observation:
    """Call the op with several settings of ``torch.set_num_threads``. The returned observation has a problem if
    ``agrees(0, results)`` returns a message that describes a difference.
    """
    assert callable(agrees)
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 4, 7):
            torch.set_num_threads(count)
            if problem := agrees(0, run_op(op, case)):
                return Observation(f"with torch.set_num_threads({count}): {problem}")
    finally:
        torch.set_num_threads(before)
    return Observation()


CHECK = Check(
    "threads",
    order=160,
    observes=f"another thread, {CALLERS} concurrent callers, and 1, 2, 3, 4 and 7 intra-op threads "
    "give the same values",
    observe=observe_threads,
    cases=threads_cases,
    obligations=("value", "determinism"),
    varies=("thread",),
    needs=("determinism",),
    skips=why_random,
    fix="use no thread-local state and no fixed thread count",
)
