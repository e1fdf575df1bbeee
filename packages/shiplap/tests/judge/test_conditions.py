"""Calls of a candidate in another thread and under autocast, and when there is no time for them."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shiplap.judge.conditions import COMPILES_S, call_elsewhere
from shiplap.judge.problem import FunctionProblem
from shiplap.judge.variants import InputForm
from shiplap.sandbox.candidate import CandidateError, ExpectedEffects

FORM = InputForm("8x12 drawn", shapes=((8, 12), (12, 6)))


class Witness:
    """A process that notes the conditions of its calls, and returns the product of ``answer`` and the right results."""

    def __init__(self, answer: float = 1.0, error: CandidateError | None = None) -> None:
        self.prisoner = SimpleNamespace(answering=0.0)
        self.answer, self.error = answer, error
        self.conditions: list[str] = []

    def call(self, args: Any, expected: ExpectedEffects, *, conditions: str) -> None:
        self.conditions.append(conditions)
        if self.error is not None:
            raise self.error
        difference = expected.against([o * self.answer for o in expected.own])
        if difference.problem:
            raise CandidateError("values", difference.problem)


def judged(witness: Witness, *, left: float = 100.0, first_call: float = 0.1) -> Any:
    problem = FunctionProblem("product", torch.mm, lambda: [torch.randn(8, 12), torch.randn(12, 6)], 0.0)
    until = time.monotonic() + left
    case: Any = SimpleNamespace(
        problem=problem,
        budget=SimpleNamespace(ends=until, last=until + 100),
        first_call=first_call,
        unchecked=[],
        reasons=[],
        calls=0,
        options=SimpleNamespace(device="cpu"),
    )

    @contextlib.contextmanager
    def record_faults(label: str) -> Any:
        try:
            yield
        except CandidateError as e:
            case.reasons.append((e.check, label))

    case.record_faults = record_faults
    call_elsewhere(case, witness, FORM)  # type: ignore[arg-type]
    return case


def test_one_call_is_made_under_each_of_the_conditions() -> None:
    witness = Witness()
    case = judged(witness)
    assert witness.conditions == ["thread", "autocast"]
    assert (case.calls, case.reasons, case.unchecked) == (2, [], [])


@pytest.mark.parametrize(("left", "first_call", "made", "left_out"), [(1.0, 0.6, [], 2), (100.0, 9.0, ["thread"], 1)])
def test_what_takes_too_long_is_left_out_and_named(
    left: float, first_call: float, made: list[str], left_out: int
) -> None:
    witness = Witness()
    case = judged(witness, left=left, first_call=first_call)
    assert witness.conditions == made
    assert len(case.unchecked) == left_out
    assert first_call <= COMPILES_S or "autocast" in case.unchecked[-1]


def test_a_fault_is_recorded_and_an_exception_of_the_candidate_is_not() -> None:
    assert judged(Witness(answer=0.0)).reasons[0][0] == "values"
    case = judged(Witness(error=CandidateError("raised", "ValueError: not here")))
    assert case.reasons == []
    assert len(case.unchecked) == 2


@pytest.mark.parametrize(
    ("factor", "right"), [(1.0, True), (1.01, True), (0.0, False), (-1.0, False), (float("nan"), False)]
)
def test_under_autocast_gross_deviations_alone_count(factor: float, right: bool) -> None:
    class Loose(Witness):
        def call(self, args: Any, expected: ExpectedEffects, *, conditions: str) -> None:
            if conditions == "autocast":
                super().call(args, expected, conditions=conditions)

    assert (not judged(Loose(answer=factor)).reasons) == right


def test_a_result_of_autocast_has_its_dtype() -> None:
    seen: list[Tensor] = []

    class Seen(Witness):
        def call(self, args: Any, expected: ExpectedEffects, *, conditions: str) -> None:
            seen.extend(expected.own)

    judged(Seen())
    assert [t.dtype for t in seen] == [torch.float32, torch.bfloat16]
