"""Candidates that are wrong for values, sizes, gradients and callers that no earlier attack tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shiplap.judge import JudgeResult, checks
from shiplap.sandbox.native_counts import native_decisions
from shiplap.sandbox.unsteady_source import find_unsteady_decisions
from shiplap_testing.effort import sampled
from tests.judge.fourteenth import HIDDEN, SOUND, WRONG
from tests.judge.tenth import HEAD

Judge = Callable[[tuple[str, str]], JudgeResult]
QUICK = ("a number that is zero", "sizes that only broadcasting allows")


@pytest.fixture(autouse=True)
def enough_calls_for_a_small_leak(fewer_calls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LATE_CALLS", 1024)


@pytest.mark.parametrize("name", sampled(WRONG, long=[n for n in WRONG if n not in QUICK]))
def test_a_candidate_that_is_wrong_for_others_is_not_accepted(judged: Judge, name: str) -> None:
    assert judged(WRONG[name]).verdict != "accepted"


@pytest.mark.parametrize(
    "name", sampled(SOUND, 1, long=[n for n in SOUND if n != "sizes that only broadcasting allows"])
)
def test_a_sound_candidate_is_accepted(judged: Judge, name: str) -> None:
    result = judged(SOUND[name])
    assert result.verdict == "accepted", str(result)


@pytest.mark.parametrize("name", HIDDEN)
def test_a_decision_by_what_few_calls_show_is_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "it.py").write_text(HEAD + HIDDEN[name][1])
    assert find_unsteady_decisions(str(tmp_path / "it.py"))


@pytest.mark.parametrize("name", SOUND)
def test_no_decision_is_found_in_a_sound_candidate(tmp_path: Path, name: str) -> None:
    (tmp_path / "it.py").write_text(HEAD + SOUND[name][1])
    assert not find_unsteady_decisions(str(tmp_path / "it.py"))


@pytest.mark.parametrize(
    "text",
    [
        'CODE = f"__shared__ float s[{B}];\\n int i = threadIdx.x;\\n while (i < n) {{ s[i] = 0; i += {B}; }} }}"\n',
        'CODE = "void f() { " + X + "; int i = 0; while (i < n) { i++; } " + Y + "}"\n',
        "def f(x): return F.dropout(F.layer_norm(x, (8,), eps=1e-5), 0.1, True)\n",
        "def f(x): return F.dropout(x, p=P) * 1e-6\n",
    ],
)
def test_parts_of_native_code_and_usual_dropouts_decide_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "it.py").write_text(HEAD + text)
    assert not find_unsteady_decisions(str(tmp_path / "it.py"))


@pytest.mark.parametrize(
    "text",
    [
        'CODE = ["#include <cmath>\\nint n = 0;\\nfloat f(float x) { n++; return n > 3 ? x * 2 : x; }"]\n',
        "def f(x): return x + torch.bernoulli(torch.full_like(x, 1e-7))\n",
        "def f(x): return x + x.bernoulli(1e-7)\n",
    ],
)
def test_a_whole_source_in_a_list_and_rare_draws_are_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "it.py").write_text(HEAD + text)
    assert find_unsteady_decisions(str(tmp_path / "it.py"))


def test_long_native_code_is_searched_soon() -> None:
    for piece in ("long  ", "\t \t", "a[ ", "++ * ", "static x ", "namespace ", "x = ", "(*"):
        text = "void f() {}" + piece * 40_000 + ";"
        assert list(native_decisions(text, 1)) == []
