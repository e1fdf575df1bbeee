"""A verdict is incomplete if one of the checks that it requires was not made."""

from __future__ import annotations

import math
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shiplap as sl
from shiplap.judge import checks, engine
from shiplap.judge.checks import Endurance
from shiplap.judge.options import StepDeadline
from shiplap.judge.problem import FunctionProblem
from tests.judge.cheats import HEAD

REFERENCE = """import torch
def reference(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
def get_inputs():
    return [torch.randn(24, 32), torch.randn(32, 16)]
"""
HONEST = HEAD + "def candidate(x, w):\n    return honest(x, w)\n"
MANY_OPERATORS = """
def candidate(x, w):
    one = torch.ones(1)
    for _ in range(2100):
        one.add_(1.0)
    return torch.tanh((x @ w) / 5.0) * 5.0
"""
MANY_SIZES = """
def candidate(x, w):
    row = torch.ones(2100)
    for n in range(2100):
        row[:n].add_(1.0)
    return torch.tanh((x @ w) / 5.0) * 5.0
"""
NOT_LISTED = """
def candidate(x, w):
    if getattr(torch.autograd, "_profiler_" + "enabled")():
        raise ValueError("not now")
    return torch.tanh((x @ w) / 5.0) * 5.0
"""


@pytest.fixture
def judged(launcher, tmp_path):
    (tmp_path / "candidate").mkdir()

    def run(text):
        (tmp_path / "problem.py").write_text(REFERENCE)
        (tmp_path / "candidate" / "it.py").write_text(text)
        options: dict[str, Any] = {"seconds": 60, "rounds": 5, "timed": False, "launcher": launcher}
        return sl.judge(tmp_path / "problem.py", tmp_path / "candidate" / "it.py", **options)

    return run


def test_a_verdict_without_time_for_many_calls_is_incomplete(judged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ENDURING_SHARE", 0.0)
    result = judged(HONEST)
    assert result.verdict == "incomplete", str(result)
    assert "calls" in dict(result.missing)


@pytest.mark.parametrize("text", [MANY_OPERATORS, MANY_SIZES, NOT_LISTED])
def test_the_reference_again_is_not_accepted_however_its_operators_are_hidden(judged, text: str) -> None:
    assert judged(HEAD + text).verdict != "accepted"


class CountingProcess:
    """A process whose calls take no time, with the resources of this one."""

    prisoner = SimpleNamespace(answering=0.0, pid=os.getpid())
    kept_bytes = 0

    def __init__(self) -> None:
        self.expected: list[Any] = []

    def call(self, args: Any, expected: Any) -> Any:
        self.expected.append(expected)
        return SimpleNamespace(wall=0.0, late=0.0)


def test_calls_that_show_leaks_are_made_with_earlier_values_if_new_ones_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "FRESH_SHARE", -math.inf)
    monkeypatch.setattr(checks, "LATE_CALLS", 0)
    problem = FunctionProblem("double", lambda x: 2 * x, lambda: [torch.randn(4)], 0.0)
    form, process = problem.forms(most=0)[0], CountingProcess()
    many = Endurance(problem, process, StepDeadline(math.inf))  # type: ignore[arg-type]
    monkeypatch.setattr(Endurance, "_run_batches", lambda *_: None)
    many.run(form, problem.draw(form), time.monotonic() + 600, 600)
    assert many.made == checks.ENDURANCE_CALLS
    assert len({id(expected) for expected in process.expected}) == 1
