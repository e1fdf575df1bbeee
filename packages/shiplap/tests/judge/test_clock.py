"""The plan of timed batches, where the calls of a GPU cannot all be queued."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shiplap.judge import clock
from shiplap.judge.options import StepDeadline
from shiplap.judge.problem import FunctionProblem
from shiplap.judge.variants import InputForm
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
