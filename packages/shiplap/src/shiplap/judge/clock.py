"""Timing that cannot be gamed: nobody knows the values before the clock starts, and every result is checked.

A call's time runs from the moment before the candidate's process is continued to the moment at which it is stopped
again, since its answer has arrived here. Then its results are read from its memory. Whatever a
candidate does in between, right results within that time are what it is paid for. What the exchange itself takes is
measured on a process that computes nothing, and taken off. On a GPU the time is that of its events, and the referee's
clock bounds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from random import SystemRandom
from statistics import median

import torch

from shiplap.judge.options import Pace
from shiplap.judge.problem import Problem
from shiplap.judge.result import Timed
from shiplap.judge.variants import Form
from shiplap.sampling.case import tree_map
from shiplap.sampling.run import tensors
from shiplap.sandbox.candidate import Call, Witness, Wrong

LEAST = 5  # rounds
FLUSHED = 32 << 20  # bytes: more than the caches between two cores hold
BUSY = 0.2  # share of the time in which the processes of a measurement waited for a processor
DISTRUST, SLACK = 0.5, 500e-6  # share and seconds by which the two clocks may differ


class Doubt(Wrong):
    """Raised for times that cannot be. ``busy``: the share in which the machine had no processor for those it timed.

    The candidate can make itself wait, so its own calls say nothing about that.
    """

    def __init__(self, check: str, evidence: str, calls: Mapping[str, Sequence[Call]]) -> None:
        super().__init__(check, evidence)
        made = [c for name, each in calls.items() if name != "candidate" for c in each]
        self.busy = 1.0 - sum(c.quiet for c in made) / max(sum(c.wall for c in made), 1e-9)

    @property
    def proven(self) -> bool:
        """Whether load on the machine cannot be the reason."""
        return self.busy < BUSY


@cache
def rates(device: str = "cpu") -> tuple[float, float]:
    """Bytes and operations in a second, as fast as this device was seen to move and to multiply."""
    size, edge, dtype = (FLUSHED, 768, torch.float32) if device == "cpu" else (16 * FLUSHED, 4096, torch.float16)
    room = torch.ones(size // 4, device=device)
    copy, a = torch.empty_like(room), torch.randn(edge, edge, device=device).to(dtype)
    moved, done = [], []
    for _ in range(4):
        moved.append(2 * size / _seconds(device, lambda: copy.copy_(room)))
        done.append(2 * edge**3 / _seconds(device, lambda: torch.mm(a, a)))
    return max(moved), max(done)


def _seconds(device: str, work: Callable[[], object]) -> float:
    settle = torch.get_device_module(device).synchronize
    settle()
    started = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - started


def measure(problem: Problem, form: Form, judged: Mapping[str, Witness], rounds: int, ends: float, pace: Pace) -> Timed:
    """Time all of ``judged`` in turn: ``"candidate"``, ``"reference"``, ``"nothing"`` and perhaps ``"compiled"``.

    The least time of each counts: load on the machine can only add to it. Nothing else is taken off for load, as a
    process can make itself wait. Raises Wrong for what the candidate did in a timed call, and Doubt for times that
    cannot be.
    """
    flush, order = torch.empty(FLUSHED, dtype=torch.uint8), list(judged)
    calls: dict[str, list[Call]] = {name: [] for name in order}
    repeated: list[Call] = []
    for number in range(rounds):
        with pace.step():
            args = problem.draw(form)
            expected = problem.expect(form, args)
        SystemRandom().shuffle(order)
        for name in order:
            with pace.step(judged[name].prisoner):
                flush.fill_(number % 251)
                call = judged[name].call(args, expected if name == "candidate" else None)
                calls[name].append(call)
                if name == "candidate":
                    repeated.append(judged[name].call(args, expected))
        if number + 1 >= LEAST and time.monotonic() > ends:
            break
    _remembers(calls, repeated)
    return _timed(problem, form, args, calls)


def alone(problem: Problem, form: Form, judged: Mapping[str, Witness], timed: Timed, pace: Pace) -> Timed:
    """``timed`` with the time of the reference after the candidate has ended, if that is less.

    The candidate stands still while others are timed, and what it has left to a device or to the system may not.
    """
    flush = torch.empty(FLUSHED, dtype=torch.uint8)
    calls: dict[str, list[Call]] = {name: [] for name in judged}
    for number in range(LEAST):
        args = problem.draw(form)
        for name, witness in judged.items():
            with pace.step(witness.prisoner):
                flush.fill_(number)
                calls[name].append(witness.call(args))
    device = next((t.device.type for t in tensors(args)), "cpu")
    times = _times(calls, device)
    compiled = None if timed.compiled is None else min(timed.compiled, times["compiled"])
    return replace(timed, reference=min(timed.reference, times["reference"]), compiled=compiled)


def _times(calls: Mapping[str, Sequence[Call]], device: str) -> dict[str, float]:
    """The seconds of each but ``"nothing"``, whose time is taken off where ours is the clock.

    The exchange copies to and from a GPU, which takes far longer than its kernels. Its own clock is bounded instead:
    ``_agree`` compares it with ours, and what runs beside the clock's stream is looked at as well.
    """
    usual = min if device == "cpu" else median  # events of a GPU are not disturbed by load on its host
    own = {name: usual([min(c.spent, c.wall) for c in made[1:]]) for name, made in calls.items()}
    nothing = min(c.wall for c in calls["nothing"])
    net = {name: min(c.wall for c in made) - nothing for name, made in calls.items()}
    return {n: own[n] if device != "cpu" else max(net[n], own[n]) for n in calls if n != "nothing"}


def _remembers(calls: Mapping[str, list[Call]], repeated: list[Call]) -> None:
    """Raises Doubt where values that were seen before take much less time."""
    empty = median([c.quiet for c in calls["nothing"]])
    least = min(c.quiet for c in calls["candidate"]) - empty  # load on the machine delays single calls only
    most = max(c.wall for c in repeated) - empty
    if least > SLACK and most < 0.5 * least:
        evidence = f"{least * 1e6:.0f} us on new values, {most * 1e6:.0f} us on the same values again"
        raise Doubt("remembers", evidence, calls)


def _timed(problem: Problem, form: Form, args: tuple[object, ...], calls: Mapping[str, list[Call]]) -> Timed:
    walls = {name: [c.wall for c in made] for name, made in calls.items()}
    nothing = min(walls["nothing"])
    spread = max(walls["nothing"][1:]) - nothing  # the first call of each is cold
    device = next((t.device.type for t in tensors(args)), "cpu")
    times = _times(calls, device)
    # Results come back from a GPU through copies, which whoever computes nothing does not make.
    copied = 0.0 if device == "cpu" else min(c.wall - c.spent for c in calls["reference"])
    _agree(calls, min(walls["candidate"]) - nothing, max(nothing, copied), spread)
    late = [c.late for c in calls["candidate"]]
    for seconds, wrong in ((min(late), Wrong), (median(late), partial(Doubt, calls=calls))):  # load delays single calls
        if seconds > SLACK / 5 + 0.1 * times["candidate"]:
            raise wrong("streams", f"work went on for {seconds * 1e6:.0f} us after the call's own stream was done")
    moved = sum(t.numel() * t.itemsize for t in tensors(args))
    outs: list[int] = []
    with torch.no_grad():
        result = problem.expect(form, args).own
    tree_map(lambda t: outs.append(t.numel() * t.itemsize), result)
    flops = problem.flops(args)
    bandwidth, operations = rates(device)
    bound = max(sum(outs) / (8 * bandwidth), flops / (8 * operations))
    if times["candidate"] + nothing < bound:
        evidence = f"{times['candidate'] * 1e6:.1f} us, and its work takes {bound * 1e6:.1f} us at least"
        raise Doubt("impossible", evidence, calls)
    light = max((moved + sum(outs)) / bandwidth, flops / operations)
    taken = times["candidate"], times["reference"], times.get("compiled")
    return Timed(form.label, *taken, nothing, light, len(walls["candidate"]))


def _agree(calls: Mapping[str, Sequence[Call]], net: float, nothing: float, spread: float) -> None:
    """Raises Doubt where the candidate's process took much longer in every call than its own clock says.

    ``net``: the least time of its calls without that of an exchange; ``nothing``: what an exchange takes.
    """
    made = calls["candidate"]
    hidden = min(c.wall - c.spent for c in made) - nothing  # load on the machine delays single calls only
    least = min(c.wall for c in made) - nothing
    if hidden > max(DISTRUST * least, SLACK, spread):
        evidence = f"{hidden * 1e6:.0f} us of {least * 1e6:.0f} us are outside the call, says its own clock"
        raise Doubt("clock", evidence, calls)
    if net < -max(3 * spread, 0.8 * nothing):
        raise Doubt("clock", "it answers faster than a process that computes nothing", calls)
