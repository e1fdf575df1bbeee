"""Fixtures of the judge's tests. All tests of a worker share a launcher, which takes seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shiplap as sl
from shiplap.judge import JudgeResult, checks, engine
from shiplap.sandbox.supervisor import SandboxLauncher
from tests.judge.tenth import HEAD


@pytest.fixture(scope="session")
def launcher() -> Iterator[SandboxLauncher]:
    # It imports no more than those of users: sympy, which torch imports for the first gradient of a process, doubles
    # the time of each look at the interpreter, also in forks that compute no gradient.
    with SandboxLauncher() as started:
        yield started


@pytest.fixture(autouse=True)
def fewer_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls in batches: the 4,096 of a judgement take seconds, and matter to candidates that count calls. The calls
    one by one show leaks, of which only those of much memory are seen after few.
    """
    monkeypatch.setattr(checks, "LATE_CALLS", 128)
    if not request.node.get_closest_marker("long"):
        for module in (checks, engine):
            monkeypatch.setattr(module, "ENDURANCE_CALLS", 40)


@pytest.fixture
def judged(launcher: SandboxLauncher, tmp_path: Path) -> Callable[..., JudgeResult]:
    """A function that judges a pair ``(source of the reference, source of the candidate)``, with options of
    ``sl.judge``.
    """
    (tmp_path / "candidate").mkdir()

    def run(case: tuple[str, str], **options: Any) -> JudgeResult:
        problem, candidate = tmp_path / "problem.py", tmp_path / "candidate" / "it.py"
        problem.write_text(HEAD + case[0])
        candidate.write_text(HEAD + case[1])
        return sl.judge(problem, candidate, seconds=300, rounds=5, timed=False, launcher=launcher, **options)

    return run
