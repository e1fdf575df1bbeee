"""The mutants of ``make power``: planted where they should be, and told from the kernel that they were made of."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.docs

POWER = Path(__file__).parents[1] / "tools/power"
PYTHON = """def kernel(x, limit):
    total = x[:limit].amax(1) + 2
    total += 1
    return -total if limit < 3 else total
"""
C = "int kernel(int n, float* to) {\n  for (int i = 0; i < n; ++i) {\n    to[i] += 2;\n  }\n  return 0;\n}\n"


@pytest.fixture
def power(monkeypatch):
    monkeypatch.syspath_prepend(str(POWER))
    names = ("operators", "subjects", "judge", "page", "subjects_cuda")
    yield lambda name: __import__(name)
    for name in names:
        sys.modules.pop(name, None)


def test_each_mutant_of_python_is_another_program(power):
    planted = list(power("operators").python_mutants(PYTHON))
    assert len({m.source for m in planted} - {PYTHON}) == len({m.source for m in planted})
    made = {m.operator for m in planted}
    assert {"comparison", "arithmetic", "constant", "name", "sign", "overwritten", "slice", "negated"} <= made
    for mutant in planted:
        compile(mutant.source, "mutant", "exec")


def test_statements_and_tokens_of_c_are_mutated_and_declarations_are_not(power):
    planted = list(power("operators").c_mutants(C))
    assert [m.before for m in planted if m.operator == "statement"] == ["to[i] += 2;"]
    assert ("<", "<=") in {(m.before, m.after) for m in planted}
    assert all(m.source != C for m in planted)


def test_each_barrier_and_each_stream_is_taken_away_once(power):
    operators = power("operators")
    source = "  __syncthreads();\n  atomicAdd(&out[i % 3], x[i]);\n  f<<<1, 2, 0, STREAM>>>(p);\n  __syncthreads();\n"
    planted = list(operators.sync_mutants(source))
    assert [(m.line, m.after) for m in planted] == [(1, ";"), (4, ";"), (2, "out[i % 3] += x[i];"), (3, "0")]
    assert len({m.source for m in planted} - {source}) == 4


def test_every_subject_of_a_gpu_has_something_to_take_away(power):
    subjects, judge = power("subjects_cuda"), power("judge")
    for subject in subjects.SUBJECTS:
        planted = judge.mutants(subject)
        assert planted, subject.name
        assert {part for part, _ in planted} == {"kernel"}
        if subject.language == "triton":
            compile(planted[0][1].source, subject.name, "exec")


def test_a_mutant_that_differs_is_told_from_one_that_does_not(power, tmp_path):
    judge, subjects = power("judge"), power("subjects")
    subject = next(s for s in subjects.SUBJECTS if s.name == "huber")
    original = judge.load(subject, subject.kernel, subject.backward, "original_of_test", tmp_path)
    wrong = subject.kernel.replace("0.5, (a", "0.6, (a")
    assert wrong != subject.kernel
    mutant = judge.load(subject, wrong, subject.backward, "mutant_of_test", tmp_path)
    judge.INPUTS = 20
    assert judge.differs(mutant, original, 1)[0]
    assert judge.differs(original, original, 1) == (False, 20)


def test_the_page_counts_what_counts(power):
    rows = [
        {"subject": "a", "fate": "killed", "by": "numerics"},
        {"subject": "a", "fate": "equal"},
        {"subject": "b", "fate": "survived", "part": "kernel", "line": 3, "operator": "token"}
        | {"before": "<", "after": ">"},
    ]
    text = power("page").page(rows, 9)
    assert "killed 1 of the 2 mutants that count (50.0 %)" in text
    assert "- b, kernel line 3, token: `<` → `>`" in text


def test_a_mutant_is_compared_in_an_interpreter_of_its_own(power, tmp_path):
    judge = power("judge")
    subject = next(s for s in power("subjects").SUBJECTS if s.name == "rms_norm")
    for name, sign in (("correct", "+"), ("wrong", "-")):
        judge.load(subject, subject.kernel.replace("r + eps", f"r {sign} eps"), subject.backward, name, tmp_path)
    event = judge._isolated(tmp_path / "wrong.py", tmp_path / "correct.py", 1, "cpu")
    assert event == {"kind": "found", "differs": True, "inputs": 1}


def test_no_mutant_is_judged_where_the_correct_kernel_is_not_correct(power, tmp_path):
    judge, subjects = power("judge"), power("subjects")
    sound = next(s for s in subjects.SUBJECTS if s.name == "rms_norm")
    broken = dataclasses.replace(sound, name="broken", kernel=sound.kernel.replace("* w", "+ w"))
    originals = judge.Originals(tmp_path, 1, tmp_path / "notes")
    assert originals.runs(sound)
    assert not originals.runs(broken)


def test_integers_differ_by_one(power):
    judge, counts = power("judge"), torch.tensor([3, 4])
    assert not judge._differs([counts], [counts.clone()])
    assert judge._differs([counts], [counts + torch.tensor([0, 1])])
