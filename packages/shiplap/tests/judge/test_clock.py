"""The plan of timed batches, where the calls of a GPU cannot all be queued."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shiplap.judge import clock
from shiplap.judge.options import StepDeadline
from shiplap.judge.problem import FunctionProblem
from shiplap.judge.result import Timed
from shiplap.judge.variants import InputForm
from shiplap.sandbox.candidate import CallOutcome
from shiplap.sandbox.device_clock import CallsNotQueued


def test_fewer_calls_begin_with_blocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of more calls takes longer to write, and only some of the processes would have one."""
    judged = {name: SimpleNamespace(block=None) for name in ("candidate", "reference")}
    planned: list[tuple[int, int]] = []

    def measure(problem, form, processes, rounds, ends, pace, plan):
        planned.append((plan.count, sum(p.block is not None for p in processes.values())))
        processes["candidate"].block = object()  # the reference's turn has not come
        if plan.count > 50:
            raise CallsNotQueued("too many")
        return plan.count

    monkeypatch.setattr(clock, "_plan_batches", lambda *args: clock._BatchPlan(200, queued=True))
    monkeypatch.setattr(clock, "_measure_planned", measure)
    monkeypatch.setattr(clock, "release_block", lambda process: setattr(process, "block", None))
    problem = FunctionProblem("relu", torch.relu, lambda: (torch.randn(4, 4),), 0.0)
    form = InputForm("4x4 drawn", shapes=((4, 4),))
    assert clock.measure_form(problem, form, judged, 5, 0.0, StepDeadline(1e12)) == 50
    assert planned == [(200, 0), (100, 0), (50, 0)]
    assert problem.queueable == 50, "other forms have as many kernels a call"


def test_calls_of_trusted_code_repeat_a_few_draws() -> None:
    drawn: list[Any] = []
    problem: Any = SimpleNamespace(draw=lambda form: drawn.append(form) or (len(drawn),))
    assert clock._repeat_draws(problem, InputForm("any"), 19) == [*[(n,) for n in range(1, 9)] * 2, (1,), (2,), (3,)]
    assert len(drawn) == 8
    assert clock._repeat_draws(problem, InputForm("any"), 1) == [(9,)]


def count_rounds(monkeypatch: pytest.MonkeyPatch, walls: dict[str, Iterator[float]], plan: Any) -> int:
    """Return how many batches are timed of each process whose batches take the seconds of ``walls``, of at most 7."""
    judged: Any = {name: SimpleNamespace(prisoner=SimpleNamespace(answering=0.0)) for name in walls}

    def run(witness: Any, name: str, *rest: Any, queued: bool) -> tuple[CallOutcome, list[CallOutcome]]:
        wall = next(walls[name])
        return CallOutcome(wall, wall, 0.0, 0.0), []

    def summarize(problem: Any, form: Any, args: Any, calls: Any, count: int) -> Timed:
        return Timed("", 1.0, 1.0, None, 0.0, 0.0, len(calls["candidate"]))

    monkeypatch.setattr(clock, "_run_turn", run)
    monkeypatch.setattr(clock, "_check_memoization", lambda calls, repeated: None)
    monkeypatch.setattr(clock, "_summarize_timing", summarize)
    problem = FunctionProblem("relu", torch.relu, lambda: (torch.randn(4, 4),), 0.0)
    form = InputForm("4x4 drawn", shapes=((4, 4),))
    return clock._measure_planned(problem, form, judged, 7, 1e12, StepDeadline(1e12), plan).rounds


@pytest.mark.parametrize(
    ("queued", "walls", "rounds"), [(True, [9, 3, 3.01], 3), (True, [9, 3, 3.2, 3], 4), (False, [3], 7)]
)
def test_queued_batches_end_once_the_shortest_agree(
    monkeypatch: pytest.MonkeyPatch, queued: bool, walls: list[float], rounds: int
) -> None:
    made = {name: itertools.chain(walls, itertools.repeat(3.0)) for name in ("candidate", "reference", "nothing")}
    assert count_rounds(monkeypatch, made, clock._BatchPlan(4, queued=queued)) == rounds


@pytest.mark.parametrize(("exchanges", "rounds"), [([1e-4], 2), ([6e-3, 5e-3], 3), ([6e-3, 5e-3, 5e-3, 5e-3], 4)])
def test_an_exchange_as_long_as_the_calls_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, exchanges: list[float], rounds: int
) -> None:
    """Another program has used the GPU meanwhile: the time of a call would be the difference of two long ones."""
    made: dict[str, Iterator[float]] = {name: itertools.repeat(5e-3) for name in ("candidate", "reference")}
    made |= {"nothing": itertools.chain(exchanges, itertools.repeat(1e-4))}
    assert count_rounds(monkeypatch, made, clock._BatchPlan(26, queued=True)) == rounds
