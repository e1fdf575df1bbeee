"""Timing of a candidate on values that are new in each call, with a comparison of every result.

On a CPU, calls are timed in batches. The process prepares the calls on arguments in shared memory that hold zeros; the
values are written while it is stopped. The time runs from the moment before the process is continued until it is
stopped again, which happens as soon as its reply has arrived. The results are then read from its memory. A candidate is
therefore paid for right results within that time, and for nothing else. The time of a batch of calls that compute
nothing and return as many results is subtracted; a batch has so many calls that this exchange is a small share of it.

On a GPU, the calls of a batch are queued behind a gate, and the process that judges times them by its own events while
the other process is stopped (``sandbox.device_clock``). Calls that wait for the device cannot be queued; those of all
processes are then made while the clock runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import SystemRandom
from statistics import median

import torch

from shiplap.judge.options import StepDeadline
from shiplap.judge.problem import SLOW_CALL_S, Args, JudgeProblem
from shiplap.judge.result import Timed
from shiplap.judge.variants import InputForm
from shiplap.sampling.case import tensors_among, tree_map
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.call_batch import CallBatch, release_block
from shiplap.sandbox.candidate import CallOutcome, CandidateError, DeviceUnavailable, ExpectedEffects, TargetProcess
from shiplap.sandbox.device_clock import CallsNotQueued
from shiplap.sandbox.device_memory import device_driver, lies_on_device
from shiplap.torch_private.dispatcher_calls import built_outside_modes

# Fewer rounds say too little about the least time of a call.
MIN_ROUNDS, LEAST_AGAIN = 5, 2
CHECKED_S = 2.0  # seconds for drawing and comparing the calls of one form
LONG_CALL_S, LEAST_LONG = 10e-3, 3  # a longer call is disturbed less, so that fewer rounds are enough
FLUSH_BYTES = 32 << 20  # bytes, more than the last-level cache of a CPU
BUSY_SHARE = 0.2  # share of waiting for a processor from which load may explain a time
EXCHANGE_SHARE = 0.04  # the share of a batch that the exchange of messages should take
MOST_CALLS, PROBED_CALLS, BATCH_BYTES = 256, 8, 128 << 20  # limits of a batch, and calls by which its size is chosen
MANY_CALLS = 16  # in a batch, of which the least number of rounds is enough
# Of a GPU: the share of the free memory for a batch, in how many places its arguments and results lie, and the number
# of calls from which on they are not queued rather than fewer.
DEVICE_SHARE, DEVICE_COPIES, LEAST_QUEUED = 0.75, 5, 4
# Of queued calls: the difference of two batches after which no further ones are timed, and the share of the exchange of
# messages in a batch from which on they are.
AGREEING, MOST_EXCHANGED = 5e-3, 0.5
FURTHER = 2  # batches of many queued calls that are timed then
DISTRUST, SLACK = 0.5, 500e-6  # the greatest difference of the two clocks: share of the time, and seconds


class ImplausibleTiming(CandidateError):
    """The error that measured times are not plausible.

    ``busy`` is the share (0 to 1) of the wall time in which the timed processes waited for a processor. The candidate's
    calls are left out, since a candidate can make itself wait.
    """

    def __init__(self, check: str, evidence: str, calls: Mapping[str, Sequence[CallOutcome]]) -> None:
        """Make the error from the name of the check, the observation and ``calls``, which maps names of processes to
        their timed calls. ``busy`` is computed from all calls but those of the process ``"candidate"``.
        """
        super().__init__(check, evidence)
        made = [c for name, each in calls.items() if name != "candidate" for c in each]
        self.busy = 1.0 - sum(c.quiet for c in made) / max(sum(c.wall for c in made), 1e-9)

    @property
    def proven(self) -> bool:
        """Whether the timed processes waited for a processor in less than a fifth of the time. If so, load on the
        machine cannot explain the implausible times.
        """
        return self.busy < BUSY_SHARE


@cache
def measure_peak_rates(device: str = "cpu") -> tuple[float, float]:
    """Return the highest rates that were measured on a device, as bytes moved per second and floating-point operations
    per second. The first comes from copies, the second from matrix products. They are measured once for each device.
    """
    # Larger than the caches, and long enough to be timed.
    size, edge, dtype = (
        (FLUSH_BYTES, 768, torch.float32) if device == "cpu" else (16 * FLUSH_BYTES, 4096, torch.float16)
    )
    room = torch.ones(size // 4, device=device)
    copy, a = torch.empty_like(room), torch.randn(edge, edge, device=device).to(dtype)
    moved, done = [], []
    for _ in range(4):
        # Each byte is read and written. Each term of the product takes a multiplication and an addition.
        moved.append(2 * size / _time_once(device, lambda: copy.copy_(room)))
        done.append(2 * edge**3 / _time_once(device, lambda: torch.mm(a, a)))
    return max(moved), max(done)


def _time_once(device: str, work: Callable[[], object]) -> float:
    """Return the wall time of one call of ``work`` in seconds, including the work that it leaves to the device."""
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
    """Return the times of one call for inputs of ``form`` (shapes and kind of values).

    ``judged`` maps ``"candidate"``, ``"reference"``, ``"nothing"`` (an idle one) and optionally ``"compiled"`` to
    processes. Each process is timed in turn on new values, in at most ``rounds`` batches. All results of the candidate
    are compared. Once the least number of rounds is made, no batch begins after ``ends``. Each process gets its least
    time, since load on the machine can only add to a time. No further allowance is made for load, because a process can
    make itself wait.

    Raise ``CandidateError`` for a fault of the candidate in a timed call, and ``ImplausibleTiming`` for implausible
    times. Raise ``DeviceUnavailable`` if one call does not fit into the memory of the device.
    """
    with pace.step():
        args = problem.draw(form)
    plan: _BatchPlan | None = None
    emptied = False
    while True:
        try:
            plan = plan or _plan_batches(problem, form, args, judged, pace, ends)
            return _measure_planned(problem, form, judged, rounds, ends, pace, plan)
        except CallsNotQueued:
            assert plan is not None
            plan = plan.easier()
            if plan.queued:  # a queue takes about a thousand kernels, and a call of any form has as many
                problem.queueable = plan.count
            # A block that is kept from more calls takes longer to write, in some of the processes only.
            _release_blocks(judged)
        except (CandidateError, torch.OutOfMemoryError) as e:
            # Several processes share the memory of the device, of which each keeps some. A candidate chooses the names
            # of its own errors.
            named = isinstance(e, torch.OutOfMemoryError) or "OutOfMemoryError" in e.evidence
            if not (named and any(map(lies_on_device, tensors_among(args)))):
                raise
            single = plan is None or plan.count == 1
            if single and emptied:
                raise DeviceUnavailable(f"the memory of the device is too small: {str(e)[:200]}") from None
            # Half the calls need half the memory. A single one may need what the processes keep.
            emptied = emptied or single
            plan = plan and replace(plan, count=max(1, plan.count // 2))
            _release_blocks(judged)
            device_driver().free_bytes()


@dataclass(frozen=True)
class _BatchPlan:
    """The plan of a batch of calls. ``count`` is the number of calls. If ``queued`` is true, they are queued on a GPU
    before the clock starts. If ``apart`` is true, each process gets values of its own. If it is false, all processes
    get equal values.
    """

    count: int = 1
    queued: bool = False
    apart: bool = False

    def easier(self) -> _BatchPlan:
        """Return a plan that is easier to carry out, for a GPU that could not queue all calls before its clock starts.
        The new plan has half as many calls. If this plan has at most 4 calls, the new one has as many and does not
        queue them.
        """
        # Fewer calls than this are not worth a queue.
        few = self.count <= LEAST_QUEUED
        return replace(self, count=self.count if few else self.count // 2, queued=self.queued and not few)


def _measure_planned(
    problem: JudgeProblem,
    form: InputForm,
    judged: Mapping[str, TargetProcess],
    rounds: int,
    ends: float,
    pace: StepDeadline,
    plan: _BatchPlan,
) -> Timed:
    """Return the times of one call, from at most ``rounds`` batches of ``plan.count`` calls for each process of
    ``judged``.

    The processes are timed in a secret order. Once the least number of rounds is made, no batch begins after ``ends``,
    nor if the calls are queued on a GPU and the batches suffice. Raise ``CallsNotQueued`` if the calls of a GPU
    could not all be queued before the clock started. The other errors are those of ``measure_form``.
    """
    order, count = list(judged), plan.count
    calls: dict[str, list[CallOutcome]] = {name: [] for name in order}
    repeated: list[CallOutcome] = []
    fewest = _fewest_rounds(plan)
    # Of another process, results must be of no use to the candidate. Trusted code may get the same values again.
    others = _repeat_draws(problem, form, count) if plan.apart else None
    for number in range(rounds if count < MANY_CALLS else fewest + FURTHER * plan.queued):
        with pace.step():
            sets = [problem.draw(form) for _ in range(count)]
            expected = [problem.expect_effects(form, args) for args in sets]
        # A secret order, so that no process can prepare for the one that is timed next.
        SystemRandom().shuffle(order)
        for name in order:
            # An idle batch of the reference makes a call, which may take long.
            makes_call = name == "nothing" and judged[name] is judged["reference"]
            if makes_call and count == 1 and number >= LEAST_AGAIN:
                continue
            with pace.step(judged[name].prisoner):
                judge, own = (expected, sets) if name == "candidate" else (None, others or sets)
                first, again = _run_turn(judged[name], name, own, judge, queued=plan.queued)
                calls[name].append(first)
                repeated += again
        took = min(c.wall for c in calls["reference"])
        least = LEAST_AGAIN if took / count > SLOW_CALL_S else LEAST_LONG if took > LONG_CALL_S else fewest
        if number + 1 >= least and (time.monotonic() > ends or (plan.queued and _suffice(calls, count))):
            break
    # Only after all rounds: the least times are the most reliable then.
    _check_memoization(calls, repeated)
    return replace(_summarize_timing(problem, form, sets[0], calls, count), queued=plan.queued)


def _suffice(calls: Mapping[str, Sequence[CallOutcome]], count: int) -> bool:
    """Return whether no further batches of ``count`` queued calls are needed. ``calls`` maps names of processes to the
    outcomes of their batches.

    The two shortest batches of each process have to differ by at most a two-hundredth. Batches of 16 calls or more need
    not, since they are means over their calls, unless the exchange of messages takes most of a batch: then other
    programs seem to have used the GPU in each round.
    """
    if count >= MANY_CALLS:
        exchanged, taken = (min(c.wall - c.written for c in calls[name]) for name in ("nothing", "candidate"))
        return exchanged < MOST_EXCHANGED * taken
    shortest = [sorted(c.wall for c in made)[:2] for made in calls.values()]
    return all(len(two) > 1 and two[1] <= (1.0 + AGREEING) * two[0] for two in shortest)


def _repeat_draws(problem: JudgeProblem, form: InputForm, count: int) -> list[Args]:
    """Return the arguments of ``count`` calls of trusted code. They repeat a few draws, each at addresses of its own
    later, since drawing takes longer than most kernels.
    """
    drawn = [problem.draw(form) for _ in range(min(count, PROBED_CALLS))]
    return [drawn[number % len(drawn)] for number in range(count)]


def _fewest_rounds(plan: _BatchPlan) -> int:
    """Return the least number of rounds in which batches of ``plan`` are timed.

    Calls that wait in the queue of a GPU need fewer rounds than calls on the host, since other programs do not delay
    them. Batches of many calls need the fewest, since the time of a batch is a mean over its calls.
    """
    if not plan.queued:
        return MIN_ROUNDS
    return LEAST_AGAIN if plan.count >= MANY_CALLS else LEAST_LONG


def _run_turn(
    witness: TargetProcess,
    name: str,
    sets: Sequence[Args],
    expected: Sequence[ExpectedEffects] | None,
    *,
    queued: bool = False,
) -> tuple[CallOutcome, list[CallOutcome]]:
    """Return the times of a batch of calls in the process ``witness``, and a list with the times of a second batch on
    the same values.

    ``sets`` has the arguments of each call. The second batch is faster if the candidate stores results. It is made only
    if ``expected`` is given and the calls change no argument. Otherwise the list is empty. If ``expected`` is given,
    the results of the first batch are compared with it. If ``name`` is ``"nothing"``, the process computes nothing. If
    ``queued`` is true, calls on a GPU are queued before the clock starts.
    """
    # Caches are emptied before each call, since this process has just written the arguments.
    flush = None if any(map(lies_on_device, tensors_among(sets[0]))) else _flush_room()
    idle = name == "nothing"
    # The reference makes its results while an idle batch is prepared, and may refuse zeros.
    with CallBatch(witness, -1 if idle else 0, sets, blank=not idle, queued=queued) as batch:
        outcomes: list[CallOutcome] = []
        # What a call has changed is no longer the value that it was given.
        for _ in range(2 if expected and not expected[0].changed else 1):
            if not idle and not outcomes:
                batch.fill(sets)
            if flush is not None:
                flush.fill_(SystemRandom().randrange(251))
            run = batch.run_calls(None if outcomes else expected)
            outcomes.append(CallOutcome(run.took.wall, run.took.quiet, run.claimed, 0.0, written=run.written))
    witness.forget_results()
    return outcomes[0], outcomes[1:]


@cache
@built_outside_modes
def _flush_room() -> torch.Tensor:
    """Return a tensor of bytes that is larger than the caches of a CPU, so that writing to it empties them. Every call
    returns the same tensor.
    """
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8)


def _plan_batches(
    problem: JudgeProblem,
    form: InputForm,
    args: Args,
    judged: Mapping[str, TargetProcess],
    pace: StepDeadline,
    ends: float,
) -> _BatchPlan:
    """Return the plan of the timed batches for a form (shapes and kind of values), found by timing a few probe batches.

    As far as memory and the time until ``ends`` allow, a batch has so many calls that the exchange of messages takes a
    small share of it. A batch has one call if shapes or plain arguments differ from draw to draw.
    """
    places = [lies_on_device(t) for t in tensors_among(args)]
    on_device = any(places)
    # Values on the host are in the memory of the process while calls are queued, which is before the clock starts.
    plan = _BatchPlan(queued=on_device and all(places))
    alike = [str(ArgumentArena(0).pack(list(made))) for made in (args, problem.draw(form))]
    # Those of another form would count as memory in use, and a larger one takes longer to write.
    _release_blocks(judged)
    if alike[0] != alike[1]:
        return _run_unqueued(judged, args, pace, plan)
    size = sum(t.numel() * t.itemsize for t in (*tensors_among(args), *problem.expect_effects(form, args).own))
    room = int(DEVICE_SHARE * device_driver().free_bytes() / DEVICE_COPIES) if on_device else BATCH_BYTES
    most = max(1, min(MOST_CALLS, problem.queueable, room // max(1, size)))
    plan = replace(plan, apart=on_device)
    if most == 1:
        return _run_unqueued(judged, args, pace, plan)
    if on_device:  # the first turn on a GPU allocates memory
        with pace.step(judged["candidate"].prisoner):
            _run_turn(judged["candidate"], "candidate", _repeat_draws(problem, form, min(PROBED_CALLS, most)), None)
    began = time.monotonic()
    probe = [problem.draw(form) for _ in range(min(PROBED_CALLS, most))]
    with pace.step(judged["candidate"].prisoner):
        expected = [problem.expect_effects(form, args) for args in probe]
        _run_turn(judged["candidate"], "candidate", probe, expected)
    # Drawing and comparing take longer than most kernels.
    each = (time.monotonic() - began) / len(probe)
    # All rounds of all calls have to fit into the time.
    fewest = _fewest_rounds(replace(plan, count=most))
    most = max(1, min(most, int(min(CHECKED_S, 0.5 * (ends - time.monotonic())) / (fewest * each))))
    # Twice, since a kernel that is loaded for the first time blocks the queue.
    took: dict[str, float] = {}
    for queued in (True, True, False) if plan.queued else (False,):
        plan = replace(plan, queued=queued)
        try:
            took = {name: _time_probe(process, name, probe, pace, queued=queued) for name, process in judged.items()}
            break
        except CallsNotQueued:
            continue
    least = max((min(took["reference"], took["candidate"]) - took["nothing"]) / len(probe), 1e-6)
    return replace(plan, count=min(most, int(took["nothing"] / (EXCHANGE_SHARE * least)) + 1))


def _release_blocks(judged: Mapping[str, TargetProcess]) -> None:
    """Release the GPU blocks that the processes of ``judged`` keep from one batch of calls to the next."""
    for process in judged.values():
        release_block(process)


def _time_probe(process: TargetProcess, name: str, probe: Sequence[Args], pace: StepDeadline, *, queued: bool) -> float:
    """Return the time of a probe batch with the arguments ``probe`` in ``process``, without the time of writing them.

    ``name`` is the key of the process, such as ``"candidate"``. If ``queued`` is true, the calls are queued on a GPU.
    Raise ``CallsNotQueued`` if the GPU could not queue them.
    """
    with pace.step(process.prisoner):
        if queued:  # memory that is allocated and kernels that are loaded now cannot block a queue
            _run_turn(process, name, probe, None)
        # The second run of a process is no longer cold.
        turns = [_run_turn(process, name, probe, None, queued=queued)[0] for _ in range(2)]
    return min(turn.wall - turn.written for turn in turns)


def _run_unqueued(judged: Mapping[str, TargetProcess], args: Args, pace: StepDeadline, plan: _BatchPlan) -> _BatchPlan:
    """Return ``plan`` unchanged. If it queues calls on a GPU, first make one call in each process of ``judged``. The
    first call of a process allocates memory and loads kernels, which would block the queue.
    """
    for name, process in judged.items() if plan.queued else ():
        with pace.step(process.prisoner):
            _run_turn(process, name, [args], None)
    return plan


def remeasure_without_candidate(
    problem: JudgeProblem,
    form: InputForm,
    judged: Mapping[str, TargetProcess],
    timed: Timed,
    pace: StepDeadline,
    ends: float = math.inf,
) -> Timed:
    """Measure the reference again after the candidate's process has ended. Return a copy of ``timed`` in which each
    time of the reference is the lower of the old and the new one.

    The candidate is stopped while other processes are timed. Work that it left to a device or to the system may have
    slowed the reference nevertheless. Return ``timed`` itself if the calls cannot be queued or there was no time for
    them. After ``ends``, at most the least number of rounds is run.
    """
    calls: dict[str, list[CallOutcome]] = {name: [] for name in judged}
    sets = _repeat_draws(problem, form, timed.batch)
    device = next((t.device.type for t in tensors_among(sets[0])), "cpu")
    for number in range(LEAST_AGAIN if timed.queued else MIN_ROUNDS):
        # A process that has ended leaves nothing to a CPU.
        if time.monotonic() > ends and (number >= LEAST_AGAIN or device == "cpu"):
            break
        # Drawing takes longer than most kernels of a GPU.
        sets = [problem.draw(form) for _ in range(timed.batch)] if number and device == "cpu" else sets
        for name, witness in judged.items():
            with pace.step(witness.prisoner):
                try:
                    calls[name].append(_run_turn(witness, name, sets, None, queued=timed.queued)[0])
                except CallsNotQueued:
                    return timed
    if any(len(made) < 2 for made in calls.values()):  # the first call of each is cold, and does not count
        return timed
    times = {name: seconds / timed.batch for name, seconds in _net_times(calls).items()}
    compiled = None if timed.compiled is None else min(timed.compiled, times["compiled"])
    return replace(timed, reference=min(timed.reference, times["reference"]), compiled=compiled)


def _net_times(calls: Mapping[str, Sequence[CallOutcome]]) -> dict[str, float]:
    """Return the least seconds of a batch for each process except the idle one, ``"nothing"``.

    ``calls`` maps names of processes to the outcomes of their batches. A time is the wall time minus the time for
    exchanging messages with the process. If the process's own clock reports a longer time, that time is returned
    instead.
    """
    # The first outcome is cold.
    own = {name: min(min(c.spent, c.wall) for c in made[1:]) for name, made in calls.items()}
    nothing = min(c.wall for c in calls["nothing"])
    return {n: max(min(c.wall for c in made) - nothing, own[n]) for n, made in calls.items() if n != "nothing"}


def _check_memoization(calls: Mapping[str, list[CallOutcome]], repeated: list[CallOutcome]) -> None:
    """Raise ``ImplausibleTiming`` if the candidate seems to store its results.

    ``repeated`` has the batches that repeat the values of the batch before. The candidate is suspected if each of them
    took less than half the time of any of its batches in ``calls``, which had new values.
    """
    empty = median([c.quiet for c in calls["nothing"]])
    least = min(c.quiet for c in calls["candidate"]) - empty  # load on the machine delays single calls only
    most = max(c.wall for c in repeated) - empty
    if least > SLACK and most < 0.5 * least:
        evidence = f"{least * 1e6:.0f} us on new values, {most * 1e6:.0f} us on the same values again"
        raise ImplausibleTiming("remembers", evidence, calls)


def _summarize_timing(
    problem: JudgeProblem, form: InputForm, args: Args, calls: Mapping[str, list[CallOutcome]], count: int = 1
) -> Timed:
    """Return the times of one call for inputs of ``form`` (shapes and kind of values). ``calls`` maps names of
    processes to the outcomes of their batches of ``count`` calls.

    Raise ``ImplausibleTiming`` if the clocks disagree, or if a time is shorter than the machine's measured rates allow.
    """
    walls = {name: [c.wall for c in made] for name, made in calls.items()}
    nothing = min(walls["nothing"])
    spread = max(walls["nothing"][1:]) - nothing  # the first call of each is cold
    device = next((t.device.type for t in tensors_among(args)), "cpu")
    times = _net_times(calls)
    _compare_clocks(calls, min(walls["candidate"]) - nothing, nothing, spread)
    moved = sum(t.numel() * t.itemsize for t in tensors_among(args))
    outs: list[int] = []
    with torch.no_grad():
        result = problem.expect_effects(form, args).own
    tree_map(lambda t: outs.append(t.numel() * t.itemsize), result)
    flops = problem.flops(args)
    # Measured here, since no table knows the machine.
    bandwidth, operations = measure_peak_rates(device)
    # A factor of 8: caches and sparse values can beat the measured rates, but not by that much.
    bound = count * max(sum(outs) / (8 * bandwidth), flops / (8 * operations))
    if times["candidate"] + nothing < bound:
        evidence = f"{times['candidate'] * 1e6:.1f} us, and its work takes {bound * 1e6:.1f} us at least"
        raise ImplausibleTiming("impossible", evidence, calls)
    light = max((moved + sum(outs)) / bandwidth, flops / operations)
    taken = {name: seconds / count for name, seconds in times.items()}
    rounds = count * len(walls["candidate"])
    each = taken["candidate"], taken["reference"], taken.get("compiled")
    exchanged = min(c.wall - c.written for c in calls["nothing"])
    return Timed(form.label, *each, exchanged / count, light, rounds, count)


def _compare_clocks(calls: Mapping[str, Sequence[CallOutcome]], net: float, nothing: float, spread: float) -> None:
    """Raise ``ImplausibleTiming`` if the candidate's clock and the clock of this process disagree.

    They disagree if every batch took much longer than the candidate's own clock reports. They also disagree if the
    candidate replies much faster than an idle process. ``net`` is the candidate's least wall time without the exchange
    of messages. ``nothing`` is the time of an exchange, and ``spread`` its variation.
    """
    made = calls["candidate"]
    hidden = min(c.wall - c.spent for c in made) - nothing  # load on the machine delays single calls only
    least = min(c.wall for c in made) - nothing
    if hidden > max(DISTRUST * least, SLACK, spread) and any(c.spent for c in made):
        evidence = f"{hidden * 1e6:.0f} us of {least * 1e6:.0f} us are outside the call, says its own clock"
        raise ImplausibleTiming("clock", evidence, calls)
    if net < -max(3 * spread, 0.8 * nothing):
        raise ImplausibleTiming("clock", "it answers faster than a process that computes nothing", calls)
