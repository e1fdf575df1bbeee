"""Checks of a candidate beside its results."""

from __future__ import annotations

import copy
import resource
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shiplap.errors import ShiplapError
from shiplap.judge import engine
from shiplap.judge.checks import _compare_unchanged
from shiplap.judge.declined import decline_form
from shiplap.judge.problem import FunctionProblem
from shiplap.sandbox import machine_lack
from shiplap.sandbox.candidate import CandidateError, check_process_state
from shiplap.sandbox.protocol import CallTraces
from shiplap.sandbox.request_errors import ProcessEnded
from shiplap.sandbox.supervisor import SandboxLauncher


class HeldState:
    """A process that holds ``state`` and reads from it as a ``TargetProcess`` does."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def read_module_state(self, names: Mapping[str, Tensor]) -> list[Tensor]:
        for name, like in names.items():
            own = self.state[name]
            if (own.device, own.dtype) != (like.device, like.dtype):
                raise CandidateError("results", f"{name} is {own.dtype} on {own.device}")
        return [self.state[name] for name in names]


def session_on(device: str) -> Any:
    """Return what the check needs of a judgement on ``device``."""
    return SimpleNamespace(options=SimpleNamespace(device=device), unchecked=[])


def test_a_parameter_in_another_dtype_does_not_hide_that_another_one_changes() -> None:
    case, before = session_on("cpu"), {"first": torch.ones(2), "second": torch.ones(2)}
    witness: Any = HeldState({"first": torch.ones(2).double(), "second": torch.zeros(2)})
    with pytest.raises(CandidateError, match="a call changes second"):
        _compare_unchanged(case, witness, before)
    assert len(case.unchecked) == 1
    assert "first" in case.unchecked[0]


def test_parameters_are_compared_on_the_device_of_the_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters of the subject lie on the processor, and those of the candidate on the device."""
    compared: list[str] = []
    own = _compare_unchanged.__globals__  # meta tensors have no bits
    monkeypatch.setitem(own, "bits_are_equal", lambda a, b: not compared.append(a.device.type))
    case = session_on("meta")
    witness: Any = HeldState({"weight": torch.ones(2, device="meta")})
    _compare_unchanged(case, witness, {"weight": torch.ones(2)})
    assert compared == ["meta"]
    assert not case.unchecked


def test_a_result_without_a_gradient_leaves_those_of_the_others_to_compare() -> None:
    problem = FunctionProblem("mask", lambda x: ((x > 0).float(), 3 * x), lambda: [torch.randn(4)], 0.0)
    (got,) = problem.gradients((torch.ones(2),), [torch.ones(2), torch.full((2,), 2.0)], wide=False)
    assert got.tolist() == [6.0, 6.0]


def test_results_may_share_memory_in_each_layout_if_those_of_the_reference_do_in_one() -> None:
    problem = FunctionProblem("flat", lambda x: (x, x.flatten()), lambda: [torch.randn(3, 4)], 0.0)
    form = problem.forms(most=0)[0]
    apart, shared = torch.randn(4, 3).T, torch.randn(3, 4)
    assert [problem.expect_effects(form, (x,)).overlapping for x in (apart, shared, apart)] == [False, True, True]


def test_a_change_of_an_argument_that_the_reference_makes_as_well_is_allowed() -> None:
    problem = FunctionProblem("energy", lambda x: x.requires_grad_() * 2, lambda: [torch.randn(4)], 0.0)
    form = problem.forms(most=0)[0]
    altered = problem.expect_effects(form, problem.draw(form)).altered
    assert list(altered) == ["requires_grad of tensor argument 0"]
    check_process_state(CallTraces(altered=list(altered)), altered)
    with pytest.raises(CandidateError, match="sizes of tensor argument 0"):
        check_process_state(CallTraces(altered=["sizes of tensor argument 0"]), altered)


class Scarce(torch.nn.Module):
    """A module whose copies are counted, and whose call fails in evaluation if ``lacks``."""

    alive, most = 0, 0

    def __init__(self, *, lacks: bool) -> None:
        super().__init__()
        self.lacks = lacks

    def __deepcopy__(self, memo: object) -> Scarce:
        made = Scarce(lacks=self.lacks)
        Scarce.alive += 1
        Scarce.most = max(Scarce.most, Scarce.alive)
        weakref.finalize(made, lambda: setattr(Scarce, "alive", Scarce.alive - 1))
        return made

    def double(self) -> Scarce:
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.lacks and not self.training:
            raise MemoryError
        return x if self.training else 2 * x


def test_evaluation_is_looked_for_with_one_copy_at_a_time_and_a_lack_of_memory_is_no_answer() -> None:
    problem = FunctionProblem("scarce", Scarce(lacks=False), lambda: [torch.ones(2)], 0.0)
    Scarce.alive = Scarce.most = 0
    assert problem.depends_on_mode((torch.ones(2),))
    assert Scarce.most == 1
    lacking = FunctionProblem("lacking", Scarce(lacks=True), lambda: [torch.ones(2)], 0.0)
    with pytest.raises(MemoryError):
        lacking.depends_on_mode((torch.ones(2),))


def test_a_module_without_a_word_of_its_mode_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = FunctionProblem("linear", torch.nn.Linear(2, 2), lambda: [torch.ones(2)], 0.0)
    dropped = FunctionProblem("dropout", torch.nn.Dropout(), lambda: [torch.ones(64)], 0.0)
    assert dropped.depends_on_mode((torch.ones(64),))
    monkeypatch.setattr(copy, "deepcopy", None)
    assert not problem.depends_on_mode((torch.ones(2),))


def pairs(x: Tensor) -> Tensor:
    return (x[:, None] - x[None]).square().sum(-1)


def test_far_sizes_for_which_the_machine_lacks_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference of all pairs took what the machine had, and its process was killed."""
    monkeypatch.setattr(machine_lack, "available_memory", lambda: 1 << 28)
    problem = FunctionProblem("pairs", pairs, lambda: [torch.randn(16, 24)], 0.0)
    forms = problem.forms([9000.0])
    assert any(form.far_size for form in problem.lacked)
    assert forms
    case = SimpleNamespace(problem=problem, missing={}, unchecked=[])
    case.candidate = SimpleNamespace(file="", names=())
    case.budget, case.options = SimpleNamespace(time_of_share=lambda share: 1e9), SimpleNamespace(seconds=60)
    monkeypatch.setattr(problem, "forms", lambda numbers, most: forms)
    monkeypatch.setattr(engine, "constants_in_sources", lambda file: [])
    monkeypatch.setattr(engine, "parameters_in_source", lambda file, names: [])
    monkeypatch.setattr(engine, "_reference_is_comparable", lambda case, forms: True)
    engine._choose_forms(case)
    assert case.missing["far sizes"].startswith("the machine lacks the memory that the reference needs at sizes near")

    case.missing.clear()
    with decline_form(case, next(form for form in problem.lacked if form.far_size)):
        raise MemoryError
    assert list(case.missing) == ["far sizes"]
    with pytest.raises(MemoryError), decline_form(case, forms[0]):
        raise MemoryError


def test_memory_is_bounded_by_that_of_the_machine_and_free_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_lack, "available_memory", lambda: 1 << 26)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with machine_lack.bounded_memory(), machine_lack.bounded_memory():
        torch.ones(1 << 20)
        with pytest.raises(RuntimeError) as seen:
            torch.ones(1 << 28)
    assert machine_lack.is_lack(seen.value)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    torch.empty(1 << 28)
    assert machine_lack.is_lack(torch.OutOfMemoryError("CUDA out of memory"))


@pytest.mark.parametrize("failure", [ProcessEnded("the launcher ended"), OSError(24, "Too many open files")])
def test_a_launcher_that_does_not_start(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    """It may be killed, or find no further open file, before anything is judged."""

    def preload(launcher: SandboxLauncher) -> None:
        raise failure

    monkeypatch.setattr(SandboxLauncher, "preload", preload)
    with pytest.raises(ShiplapError, match=failure.args[-1]) as seen:
        engine.judge(pairs, pairs, inputs=lambda: [torch.ones(3, 2)])
    assert seen.value.id == "SL617"
