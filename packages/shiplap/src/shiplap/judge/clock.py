"""Timing of a candidate on values that are new in each call, with a comparison of every result.

The time of a call runs from the moment before the candidate's process is continued until the process is stopped again,
which happens as soon as its reply has arrived. The results are then read from its memory. A candidate is therefore paid
for right results within that time, and for nothing else. The time of the exchange of messages is measured on a process
that computes nothing, and is subtracted. On a GPU, the time is that of CUDA events, bounded by the clock of the process
that judges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from random import SystemRandom
from statistics import median

import torch

from shiplap.judge.options import StepDeadline
from shiplap.judge.problem import JudgeProblem
from shiplap.judge.result import Timed
from shiplap.judge.variants import InputForm
from shiplap.sampling.case import tree_map
from shiplap.sampling.run import tensors_among
from shiplap.sandbox.candidate import CallOutcome, CandidateError, TargetProcess

# Fewer rounds say too little about the least time of a call.
MIN_ROUNDS = 5
FLUSH_BYTES = 32 << 20  # bytes, more than the last-level cache of a CPU
BUSY_SHARE = 0.2  # share of waiting for a processor from which load may explain a time
DISTRUST, SLACK = 0.5, 500e-6  # the greatest difference of the two clocks: share of the time, and seconds


class ImplausibleTiming(CandidateError):
    """Raised for times that are not plausible.

    ``busy`` is the share of the time in which the timed processes waited for a processor. Calls of the candidate are
    left out of this share, since a candidate can make itself wait.
    """

    def __init__(self, check: str, evidence: str, calls: Mapping[str, Sequence[CallOutcome]]) -> None:
        super().__init__(check, evidence)
        made = [c for name, each in calls.items() if name != "candidate" for c in each]
        self.busy = 1.0 - sum(c.quiet for c in made) / max(sum(c.wall for c in made), 1e-9)

    @property
    def proven(self) -> bool:
        """Whether load on the machine is too small to explain the times."""
        return self.busy < BUSY_SHARE


@cache
def measure_peak_rates(device: str = "cpu") -> tuple[float, float]:
    """Return the highest measured rates of a device: bytes moved in a second, and operations of a
    product in a second.
    """
    size, edge, dtype = (
        (FLUSH_BYTES, 768, torch.float32) if device == "cpu" else (16 * FLUSH_BYTES, 4096, torch.float16)
    )
    room = torch.ones(size // 4, device=device)
    copy, a = torch.empty_like(room), torch.randn(edge, edge, device=device).to(dtype)
    moved, done = [], []
    for _ in range(4):
        moved.append(2 * size / _time_once(device, lambda: copy.copy_(room)))
        done.append(2 * edge**3 / _time_once(device, lambda: torch.mm(a, a)))
    return max(moved), max(done)


def _time_once(device: str, work: Callable[[], object]) -> float:
    """Return the seconds of one call of ``work``, the work on the device included."""
    settle = torch.get_device_module(device).synchronize
    settle()
    # Work that was queued before must not count.
    started = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - started


def measure_form(
    problem: JudgeProblem,
    form: InputForm,
    judged: Mapping[str, TargetProcess],
    rounds: int,
    ends: float,
    pace: StepDeadline,
) -> Timed:
    """Time each of the processes ``judged`` in turn and return the times of this form.

    The keys are ``"candidate"``, ``"reference"``, ``"nothing"`` and perhaps ``"compiled"``. The least time of each
    process counts, since load on the machine can only add to a time. No further allowance is made for load, because a
    process can make itself wait. Raises Wrong for a fault of the candidate in a timed call, and Doubt for implausible
    times.
    """
    # Caches are emptied before each call, since this process has just written the arguments.
    flush, order = torch.empty(FLUSH_BYTES, dtype=torch.uint8), list(judged)
    calls: dict[str, list[CallOutcome]] = {name: [] for name in order}
    repeated: list[CallOutcome] = []
    for number in range(rounds):
        with pace.step():
            args = problem.draw(form)
            expected = problem.expect_effects(form, args)
        # A secret order, so that no process can prepare for the one that is timed next.
        SystemRandom().shuffle(order)
        for name in order:
            with pace.step(judged[name].prisoner):
                flush.fill_(number % 251)
                call = judged[name].call(args, expected if name == "candidate" else None)
                calls[name].append(call)
                if name == "candidate":
                    # The same values again: a candidate that stores results is faster now.
                    repeated.append(judged[name].call(args, expected))
        if number + 1 >= MIN_ROUNDS and time.monotonic() > ends:
            break
    # Only after all rounds: the least times are the most reliable then.
    _check_memoization(calls, repeated)
    return _summarize_timing(problem, form, args, calls)


def remeasure_without_candidate(
    problem: JudgeProblem, form: InputForm, judged: Mapping[str, TargetProcess], timed: Timed, pace: StepDeadline
) -> Timed:
    """Return ``timed`` with the reference timed again after the candidate has ended, where that time is less.

    The candidate is stopped while others are timed, but work that it left to a device or to the system may go on.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8)
    calls: dict[str, list[CallOutcome]] = {name: [] for name in judged}
    for number in range(MIN_ROUNDS):
        args = problem.draw(form)
        for name, witness in judged.items():
            with pace.step(witness.prisoner):
                flush.fill_(number)
                calls[name].append(witness.call(args))
    device = next((t.device.type for t in tensors_among(args)), "cpu")
    times = _net_times(calls, device)
    compiled = None if timed.compiled is None else min(timed.compiled, times["compiled"])
    return replace(timed, reference=min(timed.reference, times["reference"]), compiled=compiled)


def _net_times(calls: Mapping[str, Sequence[CallOutcome]], device: str) -> dict[str, float]:
    """Return the net seconds of each process except ``"nothing"``.

    On a CPU, the time of the exchange is subtracted from the wall time. On a GPU, the exchange copies to and from the
    device, which takes far longer than the kernels, so the times of CUDA events count. ``_compare_clocks`` compares
    those with the wall time, and work on other streams is checked separately.
    """
    usual = min if device == "cpu" else median  # events of a GPU are not disturbed by load on its host
    own = {name: usual([min(c.spent, c.wall) for c in made[1:]]) for name, made in calls.items()}
    nothing = min(c.wall for c in calls["nothing"])
    net = {name: min(c.wall for c in made) - nothing for name, made in calls.items()}
    return {n: own[n] if device != "cpu" else max(net[n], own[n]) for n in calls if n != "nothing"}


def _check_memoization(calls: Mapping[str, list[CallOutcome]], repeated: list[CallOutcome]) -> None:
    """Raise Doubt where a second call on the same values takes much less time than the first."""
    empty = median([c.quiet for c in calls["nothing"]])
    least = min(c.quiet for c in calls["candidate"]) - empty  # load on the machine delays single calls only
    most = max(c.wall for c in repeated) - empty
    if least > SLACK and most < 0.5 * least:
        evidence = f"{least * 1e6:.0f} us on new values, {most * 1e6:.0f} us on the same values again"
        raise ImplausibleTiming("remembers", evidence, calls)


def _summarize_timing(
    problem: JudgeProblem, form: InputForm, args: tuple[object, ...], calls: Mapping[str, list[CallOutcome]]
) -> Timed:
    """Return the times of one form, after checks of other streams, of the two clocks and of the least possible time."""
    walls = {name: [c.wall for c in made] for name, made in calls.items()}
    nothing = min(walls["nothing"])
    spread = max(walls["nothing"][1:]) - nothing  # the first call of each is cold
    device = next((t.device.type for t in tensors_among(args)), "cpu")
    times = _net_times(calls, device)
    # Results of a GPU are copied to the host, which the process that computes nothing does not do.
    copied = 0.0 if device == "cpu" else min(c.wall - c.spent for c in calls["reference"])
    _compare_clocks(calls, min(walls["candidate"]) - nothing, max(nothing, copied), spread)
    late = [c.late for c in calls["candidate"]]
    # Load delays single calls.
    for seconds, wrong in ((min(late), CandidateError), (median(late), partial(ImplausibleTiming, calls=calls))):
        if seconds > SLACK / 5 + 0.1 * times["candidate"]:
            raise wrong("streams", f"work went on for {seconds * 1e6:.0f} us after the call's own stream was done")
    moved = sum(t.numel() * t.itemsize for t in tensors_among(args))
    outs: list[int] = []
    with torch.no_grad():
        result = problem.expect_effects(form, args).own
    tree_map(lambda t: outs.append(t.numel() * t.itemsize), result)
    flops = problem.flops(args)
    bandwidth, operations = measure_peak_rates(device)
    # A factor of 8: caches and sparse values can beat the measured rates, but not by that much.
    bound = max(sum(outs) / (8 * bandwidth), flops / (8 * operations))
    if times["candidate"] + nothing < bound:
        evidence = f"{times['candidate'] * 1e6:.1f} us, and its work takes {bound * 1e6:.1f} us at least"
        raise ImplausibleTiming("impossible", evidence, calls)
    light = max((moved + sum(outs)) / bandwidth, flops / operations)
    taken = times["candidate"], times["reference"], times.get("compiled")
    return Timed(form.label, *taken, nothing, light, len(walls["candidate"]))


def _compare_clocks(calls: Mapping[str, Sequence[CallOutcome]], net: float, nothing: float, spread: float) -> None:
    """Raise Doubt where the wall time of every call is much longer than the time by the candidate's own clock.

    ``net`` is the least wall time of its calls without the exchange. ``nothing`` is the time of an exchange.
    """
    made = calls["candidate"]
    hidden = min(c.wall - c.spent for c in made) - nothing  # load on the machine delays single calls only
    least = min(c.wall for c in made) - nothing
    if hidden > max(DISTRUST * least, SLACK, spread):
        evidence = f"{hidden * 1e6:.0f} us of {least * 1e6:.0f} us are outside the call, says its own clock"
        raise ImplausibleTiming("clock", evidence, calls)
    if net < -max(3 * spread, 0.8 * nothing):
        raise ImplausibleTiming("clock", "it answers faster than a process that computes nothing", calls)
