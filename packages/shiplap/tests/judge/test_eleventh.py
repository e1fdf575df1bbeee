"""Candidates that are wrong by a clock, in later calls, for sizes and values that nothing drew, or for others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shiplap as sl
from shiplap.judge.shapes import shapes_near_constants, varied_shapes
from shiplap.judge.variants import InputFacts, make_input_forms, vary_arguments
from shiplap.sandbox.source_scan import constants_in_sources
from shiplap.sandbox.unsteady_source import TOO_DEEP, find_unsteady_decisions
from shiplap_testing.effort import sampled
from tests.judge.eleventh import LATER, SOUND, WRONG
from tests.judge.tenth import HEAD

QUICK = ("one more than a number", "wrong in another thread")
MISSED = ("a ring of results",)  # the page on threats names them


@pytest.fixture
def judged(launcher, tmp_path):
    (tmp_path / "candidate").mkdir()

    def run(case):
        reference, text = case
        (tmp_path / "problem.py").write_text(HEAD + reference)
        (tmp_path / "candidate" / "it.py").write_text(HEAD + text)
        options = {"seconds": 300, "rounds": 5, "timed": False, "launcher": launcher}
        return sl.judge(tmp_path / "problem.py", tmp_path / "candidate" / "it.py", **options)

    return run


FOUND = [name for name in WRONG if name not in MISSED]


@pytest.mark.parametrize("name", sampled(FOUND, long=[n for n in FOUND if n not in QUICK]))
def test_a_candidate_that_is_wrong_for_others_is_not_accepted(judged, name: str) -> None:
    assert judged(WRONG[name]).verdict != "accepted"


@pytest.mark.parametrize("name", sampled(SOUND, 1))
def test_a_sound_candidate_is_accepted(judged, name: str) -> None:
    result = judged(SOUND[name])
    assert result.verdict == "accepted", str(result)


def decisions(tmp_path: Path, text: str) -> list[str]:
    """Return what the source of a candidate decides by."""
    (tmp_path / "it.py").write_text(HEAD + text)
    return find_unsteady_decisions(str(tmp_path / "it.py"))


@pytest.mark.parametrize("name", LATER)
def test_a_decision_by_what_later_calls_have_otherwise_is_found(tmp_path: Path, name: str) -> None:
    assert decisions(tmp_path, LATER[name][1])


@pytest.mark.parametrize("name", SOUND)
def test_no_decision_is_found_in_a_sound_candidate(tmp_path: Path, name: str) -> None:
    assert not decisions(tmp_path, SOUND[name][1])


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("made = []\n    for row in x: made.append(row)\n    return len(made) > 2000", False),
        ("made = set()\n    made.update(x)\n    return len(made) % 7", False),
        ("made = [r for r in x]\n    made.extend(x)\n    return len(made) > 2000", False),
        ("for row in x:\n        made = []\n        made.append(row)\n    return len(made) > 2000", False),
        ("if first is None: first = []\n    first.append(x)\n    return len(first) > 2000", True),
        ("made = SEEN\n    made.append(x)\n    return len(made) > 2000", True),
        ("made = list(SEEN)\n    SEEN.append(x); made.append(x)\n    return len(made) > 2000", True),
        ("made = [SEEN]\n    made[0].append(x)\n    return len(made[0]) > 2000", True),
        ("made = []\n    SEEN.append(x); made.extend(SEEN)\n    return len(made) > 2000", True),
        ("SEEN.append(x)\n    return len(SEEN) > 2000", True),
        ("return np.random.rand() < 1e-5", True),
        ("return np.random.randn() > 4", True),
        ("return np.random.rand(1, 1) < 1e-5", True),
        ("return torch.rand(size=()) < 1e-5", True),
        ("return torch.rand(x.shape) < 0.5", False),
        ("return torch.rand(size=x.shape) < 0.5", False),
        ("return np.random.rand(*x.shape) < 0.5", False),
        ("return torch.randint(0, 3, x.shape) < 2", False),
        ("return torch.randint(0, 2, (4096,)) == 1", False),
        ("return np.random.random(64) > 1 - 1e-6", True),
        ("return torch.randint(0, 1 << 20, x.shape) == 1", True),
    ],
)
def test_only_what_outlives_a_call_grows_and_one_drawn_number_is_a_chance(tmp_path, body: str, found: bool) -> None:
    text = f"import numpy as np\nSEEN = []\ndef candidate(x, first=SEEN):\n    {body}\n"
    assert bool(decisions(tmp_path, text)) == found


def test_a_list_that_an_enclosing_function_has_made_outlives_a_call(tmp_path: Path) -> None:
    text = """
def make():
    seen = []
    def candidate(x):
        seen.append(x)
        return len(seen) > 2000
    return candidate
"""
    assert decisions(tmp_path, text)


@pytest.mark.parametrize(
    ("native", "found"),
    [
        ("static int made = 0; void f() { if (++made > 9000) g(); }", True),
        ("static std::atomic<int> made{0}; void f() { made++; if (made >= 9000) g(); }", True),
        ("void f() { auto t = std::chrono::steady_clock::now(); }", True),
        ("void f() { if (getpid() % 7 == 3) g(); }", True),
        ("static const int width = 16; void f(int n) { for (int i = 0; i < n; i++) g(i, width); }", False),
        ("void f(float* x, int n) { for (int i = 0; i < n; ++i) x[i] *= 2; }", False),
    ],
)
def test_native_code_that_counts_its_calls_is_found(tmp_path: Path, native: str, found: bool) -> None:
    assert bool(decisions(tmp_path, f"SOURCE = {native!r}\n")) == found


def test_numbers_that_are_compared_come_first_and_arithmetic_on_constants_is_computed(tmp_path: Path) -> None:
    text = "import math\nSIZES = [16, 32]\ndef f(x):\n    return x.shape[0] == math.comb(9, 3) or len(x) > 5 * 7 + 2\n"
    (tmp_path / "it.py").write_text(text)
    numbers = constants_in_sources(str(tmp_path / "it.py"))
    assert set(numbers[:2]) == {84, 37}
    assert {16, 32} <= set(numbers)


@pytest.mark.parametrize("text", ["3 ** 999999999", "1 << 99999999999", "math.comb(10**7, 5 * 10**6)", "'ab' * 10**10"])
def test_an_expression_that_takes_long_is_not_computed(tmp_path: Path, text: str) -> None:
    (tmp_path / "it.py").write_text(f"import math\ndef f(x):\n    return x == {text}\n")
    assert all(abs(number) < 1 << 21 for number in constants_in_sources(str(tmp_path / "it.py")))


def test_sizes_near_a_constant_are_tried_however_large_it_is() -> None:
    own = ((16, 24), (24, 20))
    drawn = list(shapes_near_constants(own, [30000, 40], 4096))
    sizes = {shapes[0][0] for shapes in drawn}
    assert {30000, 30001, 40, 41} <= sizes
    assert all(shapes[0][1] == shapes[1][0] for shapes in drawn)
    assert all(sum(a * b for a, b in shapes) < 1 << 21 for shapes in drawn)
    assert any({30000, 40} <= {n for s in shapes for n in s} for shapes in drawn)


def test_two_sizes_become_equal() -> None:
    own = ((16, 24), (24, 20))
    assert any(shapes[0][0] == shapes[1][1] for _ in range(4) for shapes in varied_shapes(own))


def test_values_lie_beyond_a_constant_as_a_whole_and_huge_ones_are_tried() -> None:
    first = (torch.randn(16, 24),)
    forms = make_input_forms(first, lambda form: True, most=4, facts=InputFacts(numbers=[33.5]))
    about = [vary_arguments(first, form, 1)[0] for form in forms if form.kind == "about"]
    assert any(bool((values > 33.5).all()) for values in about)
    assert any(bool((values < -33.5).all()) for values in about)
    (huge,) = (form for form in forms if form.kind == "huge" and not form.layout)
    assert float(vary_arguments(first, huge, 1)[0].abs().max()) > 1 << 31


def test_a_long_sum_does_not_end_the_search(tmp_path: Path) -> None:
    counted = "def candidate(x, w):\n    return x if time.perf_counter() > 600 else w\n"
    long = f"TOTAL = {' + '.join(['1'] * 1500)}\n"
    assert decisions(tmp_path, f"import time\n{counted}{long}") == decisions(tmp_path, f"import time\n{counted}")
    assert not decisions(tmp_path, long)


def test_what_is_nested_too_deeply_to_be_looked_through_is_a_decision(tmp_path: Path) -> None:
    deep = f"TOTAL = {' + '.join(['1'] * 90_000)}\n"
    assert decisions(tmp_path, deep) == [TOO_DEEP]
    assert not decisions(tmp_path, "this is no Python\n")
