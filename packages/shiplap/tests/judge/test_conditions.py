"""Calls of a candidate under other conditions of its caller, and when there is no time for them."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shiplap.judge import conditions
from shiplap.judge.conditions import COMPILES_S, _effects_of_equal_arguments, call_elsewhere
from shiplap.judge.problem import FunctionProblem
from shiplap.judge.result import Reason
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


PRODUCT = FunctionProblem("product", torch.mm, lambda: [torch.randn(8, 12), torch.randn(12, 6)], 0.0)


def judged(
    witness: Witness,
    *,
    left: float = 100.0,
    first_call: float = 0.1,
    problem: FunctionProblem = PRODUCT,
    form: InputForm = FORM,
    file: str = "",
    device: str = "cpu",
) -> Any:
    until = time.monotonic() + left
    case: Any = SimpleNamespace(
        problem=problem,
        budget=SimpleNamespace(ends=until, last=until + 100),
        first_call=first_call,
        unchecked=[],
        reasons=[],
        missing={},
        candidate=SimpleNamespace(file=file),
        calls=0,
        options=SimpleNamespace(device=device),
    )

    @contextlib.contextmanager
    def record_faults(label: str) -> Any:
        try:
            yield
        except CandidateError as e:
            case.reasons.append(Reason(e.check, e.evidence, label))

    case.record_faults = record_faults
    call_elsewhere(case, witness, form)  # type: ignore[arg-type]
    return case


def test_one_call_is_made_under_each_of_the_conditions() -> None:
    witness = Witness()
    case = judged(witness)
    assert witness.conditions == ["thread", "gradient mode", "parameters", "autocast"]
    assert (case.calls, case.reasons, case.unchecked) == (4, [], [])


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_wrong_result_on_another_stream_of_a_gpu_is_a_missing_check() -> None:
    """What was compared before was right, as it is for every caller on the default stream."""

    class Late(Witness):
        def call(self, args: Any, expected: ExpectedEffects, *, conditions: str) -> None:
            self.answer = 0.0 if conditions == "stream" else 1.0
            super().call(args, expected, conditions=conditions)

    witness = Late()
    case = judged(witness, device="cuda")
    assert witness.conditions == ["thread", "stream"]
    assert case.reasons == []
    assert "torch's current stream" in case.missing["stream"]

    class Leaving(Witness):
        def call(self, args: Any, expected: ExpectedEffects, *, conditions: str) -> None:
            self.error = CandidateError("state", "it leaves a file") if conditions == "stream" else None
            super().call(args, expected, conditions=conditions)

    left = judged(Leaving(), device="cuda")
    assert ([reason.check for reason in left.reasons], left.missing) == (["state"], {})
    right = Witness()
    assert judged(right, device="cuda").missing == {}
    assert right.conditions == ["thread", "stream", "gradient mode", "parameters", "autocast"]
    changing = FunctionProblem("in place", lambda x: x.add_(1), lambda: [torch.randn(8, 12)], 0.0)
    form = InputForm("8x12 drawn", shapes=((8, 12),))
    other = Witness()
    judged(other, problem=changing, form=form, device="cuda")
    assert other.conditions[:2] == ["thread", "gradient mode"]


@pytest.mark.parametrize(("left", "first_call", "made", "left_out"), [(1.0, 0.6, [], 5), (100.0, 9.0, ["thread"], 4)])
def test_what_takes_too_long_is_left_out_and_named(
    left: float, first_call: float, made: list[str], left_out: int
) -> None:
    witness = Witness()
    case = judged(witness, left=left, first_call=first_call)
    assert witness.conditions == made
    assert len(case.unchecked) == left_out
    assert first_call <= COMPILES_S or "autocast" in case.unchecked[-1]


def test_a_fault_is_recorded_and_an_exception_of_the_candidate_is_not() -> None:
    assert judged(Witness(answer=0.0)).reasons[0].check == "values"
    case = judged(Witness(error=CandidateError("raised", "ValueError: not here")))
    assert case.reasons == []
    assert len(case.unchecked) == 4


@pytest.mark.parametrize(
    ("factor", "right"), [(1.0, True), (1.01, True), (0.0, False), (-1.0, False), (float("nan"), False)]
)
def test_under_autocast_gross_deviations_alone_count(factor: float, right: bool) -> None:
    class Loose(Witness):
        def call(self, args: Any, expected: ExpectedEffects, *, conditions: str) -> None:
            if conditions == "autocast":
                super().call(args, expected, conditions=conditions)

    assert (not judged(Loose(answer=factor)).reasons) == right


@pytest.mark.parametrize(("factor", "right"), [(1.01, True), (0.0, False)])
def test_large_results_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch, factor: float, right: bool) -> None:
    """The memory of a GPU that holds a result may have no room for several copies of it in float64."""
    monkeypatch.setattr(conditions, "part_length", lambda t: 10)
    sizes: dict[str, list[int]] = {"one tensor": [], "autocast": []}

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype == torch.float64:
                seen.append(out.numel())
            return out

    class Parts(Witness):
        def call(self, args: Any, expected: ExpectedEffects, *, conditions: str) -> None:
            if conditions in sizes:
                nonlocal seen
                seen = sizes[conditions]
                with Sizes():
                    super().call(args, expected, conditions=conditions)

    seen: list[int] = []
    square = FunctionProblem("sum", torch.add, lambda: [torch.randn(8, 12), torch.randn(8, 12)], 0.0)
    form = InputForm("8x12, 8x12 drawn", shapes=((8, 12), (8, 12)))
    assert (not judged(Parts(answer=factor), problem=square, form=form).reasons) == right
    assert {max(listed) for listed in sizes.values() if listed} == {10}
    assert sizes["one tensor"]


def test_a_result_of_autocast_has_its_dtype() -> None:
    seen: list[Tensor] = []

    class Seen(Witness):
        def call(self, args: Any, expected: ExpectedEffects, *, conditions: str) -> None:
            seen.extend(expected.own)

    judged(Seen())
    assert [t.dtype for t in seen] == [torch.float32, torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (0.0, False), (float("nan"), False)])
def test_two_arguments_of_a_kind_are_one_tensor_once(factor: float, right: bool) -> None:
    seen: list[tuple[Any, ...]] = []

    class Alike(Witness):
        def call(self, args: Any, expected: ExpectedEffects, *, conditions: str) -> None:
            if conditions == "one tensor":
                seen.append(args)
                super().call(args, expected, conditions=conditions)

    problem = FunctionProblem("hypot", torch.hypot, lambda: [torch.randn(8, 12), torch.randn(8, 12)], 0.0)
    case = judged(Alike(answer=factor), problem=problem, form=InputForm("two", shapes=((8, 12), (8, 12))))
    assert len(seen) == 1
    assert torch.equal(*seen[0])
    assert (not case.reasons) == right


class OneTensor(Witness):
    """A process that makes the call on one tensor for two arguments alone, and computes in float32."""

    def call(self, args: Any, expected: ExpectedEffects, *, conditions: str) -> None:
        if conditions == "one tensor":
            self.conditions.append(conditions)
            x, *rest = args
            for w in rest:
                x = x.float() @ w.float()
            assert not expected.against([x]).problem


def test_numbers_that_cancel_out_may_be_off_by_their_rounding() -> None:
    shapes = ((256, 256),) * 3
    made = [torch.randn(s).bfloat16() for s in shapes]
    problem = FunctionProblem("products", lambda x, v, w: x @ v @ w, lambda: made, 0.0)
    witness = OneTensor()
    judged(witness, problem=problem, form=InputForm("products", shapes=shapes))
    assert witness.conditions == ["one tensor"]


def test_indices_are_not_given_twice() -> None:
    called: list[bool] = []

    def reference(x: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        called.append(torch.equal(rows, cols))
        return x[rows, cols]

    problem = FunctionProblem(
        "picked", reference, lambda: [torch.randn(4, 40), torch.arange(3), torch.arange(30, 33)], 0.0
    )
    judged(Witness(), problem=problem, form=InputForm("picked", shapes=((4, 40), (3,), (3,))))
    assert not any(called)


def test_narrow_numbers_are_compared_too() -> None:
    made = [torch.randn(4, 4).to(torch.float8_e4m3fn), torch.randn(4, 4).to(torch.float8_e4m3fn)]
    args = made[0], made[0]
    case: Any = SimpleNamespace(problem=FunctionProblem("sum", lambda x, y: x.float() + y.float(), lambda: made, 0.0))
    expected = _effects_of_equal_arguments(case, InputForm("sum", shapes=((4, 4),) * 2), args)
    assert expected is not None
    assert not expected.against(expected.own).problem
    assert expected.against([-o for o in expected.own]).problem


def test_who_reads_memory_by_addresses_may_be_wrong_under_autocast(tmp_path: Path) -> None:
    class Wrong(Witness):
        def call(self, args: Any, expected: ExpectedEffects, *, conditions: str) -> None:
            if conditions == "autocast":
                super().call(args, expected, conditions=conditions)

    (tmp_path / "it.py").write_text("def candidate(x, w): return read((x @ w).data_ptr())\n")
    case = judged(Wrong(answer=0.0), file=str(tmp_path / "it.py"))
    assert (case.reasons, list(case.missing)) == ([], ["autocast"])
    (tmp_path / "it.py").write_text("def candidate(x, w): return x @ w\n")
    case = judged(Wrong(answer=0.0), file=str(tmp_path / "it.py"))
    assert (len(case.reasons), case.missing) == (1, {})
