"""Candidates that count their calls in other forms, or are wrong for other values, memory, modes or gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import shiplap as sl
from shiplap.judge import JudgeResult
from shiplap.sandbox.supervisor import SandboxLauncher
from shiplap.sandbox.unsteady_source import find_unsteady_decisions
from shiplap_testing.effort import sampled
from tests.judge.tenth import HEAD
from tests.judge.twelfth import COUNTS, SOUND, WRONG

Judge = Callable[[tuple[str, str]], JudgeResult]
MISSED = ("wrong while it is traced", "a second gradient of zeros")  # the page on threats names them
QUICK = ("a result of another dtype",)
FOUND = [name for name in WRONG if name not in COUNTS and name not in MISSED]


@pytest.fixture
def judged(launcher: SandboxLauncher, tmp_path: Path) -> Judge:
    (tmp_path / "candidate").mkdir()

    def run(case: tuple[str, str]) -> JudgeResult:
        (tmp_path / "problem.py").write_text(HEAD + case[0])
        (tmp_path / "candidate" / "it.py").write_text(HEAD + case[1])
        return sl.judge(
            tmp_path / "problem.py",
            tmp_path / "candidate" / "it.py",
            seconds=300,
            rounds=5,
            timed=False,
            launcher=launcher,
        )

    return run


@pytest.mark.parametrize("name", sampled(FOUND, long=[n for n in FOUND if n not in QUICK]))
def test_a_candidate_that_is_wrong_for_others_is_not_accepted(judged: Judge, name: str) -> None:
    assert judged(WRONG[name]).verdict != "accepted"


@pytest.mark.parametrize("name", sampled(SOUND, 1))
def test_a_sound_candidate_with_state_is_accepted(judged: Judge, name: str) -> None:
    result = judged(SOUND[name])
    assert result.verdict == "accepted", str(result)


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_in_another_form_is_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "it.py").write_text(HEAD + COUNTS[name][1])
    assert find_unsteady_decisions(str(tmp_path / "it.py"))


@pytest.mark.parametrize("name", SOUND)
def test_state_that_decides_nothing_is_no_count(tmp_path: Path, name: str) -> None:
    (tmp_path / "it.py").write_text(HEAD + SOUND[name][1])
    assert not find_unsteady_decisions(str(tmp_path / "it.py"))
