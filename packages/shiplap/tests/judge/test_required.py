"""A verdict is incomplete if one of the checks that it requires was not made."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shiplap as sl
from shiplap.judge import JudgeResult, checks, engine
from shiplap.judge.checks import Endurance
from shiplap.judge.options import StepDeadline
from shiplap.judge.problem import FunctionProblem
from shiplap.sandbox.supervisor import SandboxLauncher
from shiplap_testing.effort import sampled
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
def judged(launcher: SandboxLauncher, tmp_path: Path) -> Callable[[str], JudgeResult]:
    (tmp_path / "candidate").mkdir()

    def run(text: str) -> JudgeResult:
        (tmp_path / "problem.py").write_text(REFERENCE)
        (tmp_path / "candidate" / "it.py").write_text(text)
        options: dict[str, Any] = {"seconds": 60, "rounds": 5, "timed": False, "launcher": launcher}
        return sl.judge(tmp_path / "problem.py", tmp_path / "candidate" / "it.py", **options)

    return run


def test_a_verdict_without_time_for_many_calls_is_incomplete(
    judged: Callable[[str], JudgeResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "ENDURING_SHARE", 0.0)
    result = judged(HONEST)
    assert result.verdict == "incomplete", str(result)
    assert "calls" in dict(result.missing)


@pytest.mark.parametrize("text", sampled([MANY_OPERATORS, MANY_SIZES, NOT_LISTED], 1))
def test_the_reference_again_is_not_accepted_however_its_operators_are_hidden(
    judged: Callable[[str], JudgeResult], text: str
) -> None:
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
    form = problem.forms(most=0)[0]
    process: Any = CountingProcess()
    many = Endurance(problem, process, StepDeadline(math.inf))
    monkeypatch.setattr(Endurance, "_run_batches", lambda *_: None)
    many.run(form, problem.draw(form), time.monotonic() + 600, 600)
    assert many.made == checks.ENDURANCE_CALLS
    assert len({id(expected) for expected in process.expected}) == 1


def test_a_caller_may_allow_the_operators_of_the_reference(launcher: SandboxLauncher, tmp_path: Path) -> None:
    (tmp_path / "candidate").mkdir()
    (tmp_path / "problem.py").write_text(REFERENCE)
    (tmp_path / "candidate" / "it.py").write_text(REFERENCE.replace("def reference(", "def candidate("))
    verdicts = {}
    for allowed in (False, True):
        verdicts[allowed] = sl.judge(
            tmp_path / "problem.py",
            tmp_path / "candidate" / "it.py",
            launcher=launcher,
            seconds=300,
            timed=False,
            same_operators=allowed,
        )
    assert [reason.check for reason in verdicts[False].reasons] == ["resubmitted"]
    assert verdicts[True].verdict == "accepted", str(verdicts[True])
    assert any("the reference again" in text for text in verdicts[True].unchecked)
