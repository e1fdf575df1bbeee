"""The stages of a judgement: their times, the processes that load meanwhile, and indices that no GPU may see."""

from __future__ import annotations

import time
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shiplap as sl
from shiplap.judge import engine, index_bounds, new_shapes, processes
from shiplap.judge.checks import JudgeSession
from shiplap.judge.engine import _compare_operators
from shiplap.judge.index_bounds import IndexTrials, TrialTooLong
from shiplap.judge.options import JudgeBudget, JudgeOptions
from shiplap.judge.problem import FunctionProblem
from shiplap.judge.result import StageClock, StageTime
from shiplap.judge.target import JudgeSubject, JudgeTarget
from shiplap.judge.variants import InputForm
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.candidate import CandidateError, TargetProcess
from shiplap.sandbox.protocol import LoadTarget, OperatorUse
from shiplap.sandbox.request_errors import Timeout
from shiplap.sandbox.supervisor import Bounds, SandboxLauncher
from tests.judge.cheats import HEAD
from tests.judge.test_cheats import REFERENCE


def test_the_time_of_a_stage_is_without_that_of_other_judgements(monkeypatch: pytest.MonkeyPatch) -> None:
    now, clock, process = [10.0], StageClock(), SimpleNamespace(answering=1.0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock.prisoners.append(process)  # type: ignore[arg-type]

    def pass_time(seconds: float, answering: float = 0.0) -> None:
        now[0] += seconds
        process.answering += answering

    with clock.stage("values"):
        pass_time(5.0, 2.0)
        clock.waited += 3.0
    pass_time(1.0, 1.0)
    with pytest.raises(ZeroDivisionError), clock.stage("times"):
        pass_time(1 / (now[0] - now[0]))
    with clock.stage("values"):
        pass_time(1.0)
    assert clock.times() == (StageTime("values", 3.0, 2.0), StageTime("times", 0.0, 0.0))


def test_a_verdict_says_where_its_time_went(launcher: SandboxLauncher, tmp_path) -> None:
    (tmp_path / "problem.py").write_text(REFERENCE)
    (tmp_path / "it.py").write_text(HEAD + "candidate = honest\n")
    result = sl.judge(tmp_path / "problem.py", tmp_path / "it.py", launcher=launcher, seconds=120, timed=False)
    assert result.verdict == "accepted", (result.reasons, result.missing)
    assert result.calls > 100
    names = [s.stage for s in result.stages]
    assert names[:5] == ["reference", "start", "forms", "load", "values"]
    assert names[5:] == ["parameters", "calls", "gradients", "operators", "times", "end"]
    assert sum(s.seconds for s in result.stages) <= result.seconds
    assert sum(s.sandboxed for s in result.stages) > 0
    assert result.as_json()["stages"][0]["stage"] == "reference"


def test_a_refused_candidate_is_not_compared_further(launcher: SandboxLauncher, tmp_path) -> None:
    (tmp_path / "problem.py").write_text(REFERENCE)
    (tmp_path / "it.py").write_text(HEAD + "def candidate(x, w):\n    return honest(x, w) + 1\n")
    result = sl.judge(tmp_path / "problem.py", tmp_path / "it.py", launcher=launcher, seconds=120)
    assert result.verdict == "refused"
    assert [s.stage for s in result.stages][-2:] == ["values", "end"]


def test_a_launcher_imports_what_exists_once_and_goes_on(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SandboxLauncher() as launcher:
        asked: list[object] = []
        ask = launcher.ask
        monkeypatch.setattr(
            launcher, "ask", lambda message, *rest, **named: asked.append(message) or ask(message, *rest, **named)
        )
        launcher.preload()
        assert launcher.pid > 0
        assert not asked
        launcher.preload(["colorsys", "shiplap_without_such_a_module"])
        launcher.preload(["colorsys"])
        assert len(asked) == 2
        launcher.start().kill()


TABLE, IDS = torch.randn(20, 3), torch.tensor([0, 19, 4])


class Lookup(nn.Module):
    """A table of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(TABLE.clone())

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


@pytest.mark.parametrize(
    ("args", "own", "outside"),
    [
        ((TABLE, torch.tensor([1, 2])), (TABLE, IDS), False),
        ((TABLE[:19], IDS), (TABLE, IDS), True),
        ((TABLE[:19], torch.tensor([3, 18])), (TABLE, IDS), True),  # of other draws, one has 19
        ((torch.randn(30, 3), IDS), (TABLE, IDS), False),
        ((TABLE, TABLE), (TABLE, TABLE), False),
        ((TABLE, IDS[:0]), (TABLE, IDS), False),
    ],
    ids=["fewer", "a smaller table", "by chance within", "a larger table", "no indices", "none"],
)
def test_indices_beyond_what_they_index_are_seen_on_the_processor(args, own, outside: bool) -> None:
    def lookup(table: Tensor, ids: Tensor) -> Tensor:
        return table[ids] if not ids.is_floating_point() else table + ids

    assert IndexTrials(lookup, own).indexes_outside(args) == outside


@pytest.mark.parametrize(("offset", "outside"), [(0, False), (99, True)])
@pytest.mark.parametrize("ids", [(IDS,), ()], ids=["indices", "none"])
def test_a_number_may_lead_indices_out_of_a_tensor(monkeypatch: pytest.MonkeyPatch, ids, offset, outside) -> None:
    def lookup(table: Tensor, offset: int, *ids: Tensor) -> Tensor:
        return table[(ids[0] if ids else torch.arange(2)) + offset]

    monkeypatch.setattr(index_bounds, "lies_on_device", lambda t: True)  # as if the arguments were on a GPU
    trials = IndexTrials(lookup, (TABLE, *ids))
    assert trials.would_end_device((TABLE, offset, *ids), scalars=True) == outside


def test_forms_with_other_numbers_are_tried_on_the_processor_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []

    def refuse(self: IndexTrials, args: tuple[object, ...], *, scalars: bool = False) -> bool:
        tried.append(scalars)
        return scalars

    monkeypatch.setattr(IndexTrials, "would_end_device", refuse)
    problem = FunctionProblem("add", lambda t, n: t + n, lambda: [torch.randn(4, 4), 1], 0.0)
    assert not [form for form in problem.forms() if form.plain]
    assert True in tried


def test_the_parameters_of_a_module_are_not_moved() -> None:
    module = Lookup()
    before, trials = module.table, IndexTrials(module, (IDS,))
    assert not trials.indexes_outside((IDS,))
    assert trials.indexes_outside((IDS + 1,))
    assert module.table is before


def test_errors_of_another_kind_say_nothing_about_indices() -> None:
    def refuses(ids: Tensor) -> Tensor:
        raise NotImplementedError("no kernel for the CPU")

    assert not IndexTrials(refuses, (IDS,)).indexes_outside((IDS,))


def test_a_trial_that_takes_too_long_is_ended_and_no_larger_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    now, called = [0.0], []

    def slow(table: Tensor, ids: Tensor) -> Tensor:
        called.append(len(ids))
        for _ in range(4):
            now[0] += 1.0
            table = table * 2
        return table[ids]

    monkeypatch.setattr(index_bounds.time, "monotonic", lambda: now[0])
    trials = IndexTrials(slow, (TABLE, IDS))
    with pytest.raises(TrialTooLong):
        trials.indexes_outside((TABLE, IDS), 3.0)
    assert not trials.indexes_outside((TABLE, IDS), 9.0)  # two calls
    # As if the arguments were on a GPU: what cannot be looked at in time is not run there.
    monkeypatch.setattr(index_bounds, "lies_on_device", lambda t: True)
    called.clear()
    assert trials.would_end_device((TABLE, IDS))
    assert trials.would_end_device((TABLE, torch.cat([IDS, IDS])))
    assert trials.left_out == 2
    assert called == [len(IDS)]


def test_a_trial_changes_no_arguments() -> None:
    def counts(table: Tensor, ids: Tensor) -> Tensor:
        ids.add_(1)
        return table[ids]

    ids = torch.tensor([1, 2])
    assert not IndexTrials(counts, (TABLE, ids)).indexes_outside((TABLE, ids))
    assert ids.tolist() == [1, 2]


def test_the_search_for_forms_leaves_the_first_arguments_as_they_are() -> None:
    """Of large arguments, integers of the first draw are used again in draws of other values."""

    def steps(x: Tensor, number: Tensor) -> Tensor:
        number.add_(1)
        return x * number[:1]

    problem = FunctionProblem("steps", steps, lambda: (torch.rand(1200, 1000), torch.tensor([3, 5])), 0.0)
    before = [t.clone() for t in problem.first]
    assert len(problem.forms(most=2)) > 4
    assert all(map(torch.equal, problem.first, before))


@pytest.mark.parametrize("call", [0, 1])
def test_operators_of_the_candidate_that_cannot_be_listed_are_a_missing_check(call: int) -> None:
    """A candidate that hides its operators in the second call is not accepted, and neither is it at fault."""
    uses = [OperatorUse("aten::add", [[3]])]
    answers: list[list[OperatorUse] | str] = [uses, uses]
    answers[call] = "it runs operators in 9999 ways"
    case: Any = SimpleNamespace(problem=SimpleNamespace(queueable=100), missing={}, unchecked=[])
    case.problem.draw = case.problem.expect_effects = lambda *args: ()
    witness: Any = SimpleNamespace(list_operators=lambda *args: answers.pop(0), check_interpreter=lambda: None)
    twin: Any = SimpleNamespace(list_operators=lambda *args, trusted: [OperatorUse("aten::mul", [[3]])])
    forms: Any = [SimpleNamespace(timed=True)]
    _compare_operators(case, witness, twin, forms)
    assert list(case.missing) == ["operators"]
    assert "it runs operators in 9999 ways" in case.missing["operators"]
    assert case.problem.queueable == 100
    answers[:] = [uses, [*uses, OperatorUse("aten::mul", [[3]])]]
    with pytest.raises(CandidateError, match="a second call on the same values runs other operators"):
        _compare_operators(case, witness, twin, forms)


@pytest.mark.parametrize("error", [RuntimeError, torch.AcceleratorError, NotImplementedError, TypeError])
def test_a_copy_that_cannot_be_page_locked_is_made_elsewhere(monkeypatch, error: type[Exception]) -> None:
    """As of a nested tensor, or on a machine that locks no more memory."""

    class OnDevice(torch.Tensor):
        is_cuda = True

    def refuse(*args: Any, **options: Any) -> None:
        assert options == {"device": "cpu", "pin_memory": True}
        raise error("no more")

    monkeypatch.setattr(torch, "empty_like", refuse)
    monkeypatch.setattr(index_bounds, "lies_on_device", lambda t: True)
    assert index_bounds.to_host(torch.arange(3).as_subclass(OnDevice)).tolist() == [0, 1, 2]


def test_operators_of_candidate_and_reference_are_listed_side_by_side() -> None:
    both, listed = Barrier(2), []

    def list_operators(name: str) -> list[OperatorUse]:
        listed.append(name)
        if len(listed) < 3:  # the candidate's second call comes later
            both.wait(timeout=10)
        return [OperatorUse(f"aten::{name}", [[3]])]

    case: Any = SimpleNamespace(problem=SimpleNamespace(), options=JudgeOptions(device="cpu"), missing={}, unchecked=[])
    case.problem.draw = case.problem.expect_effects = lambda *args: ()
    witness: Any = SimpleNamespace(list_operators=lambda *args: list_operators("add"), check_interpreter=lambda: None)
    twin: Any = SimpleNamespace(list_operators=lambda *args, trusted: list_operators("mul"))
    forms: Any = [SimpleNamespace(timed=True)]
    _compare_operators(case, witness, twin, forms)
    assert sorted(listed[:2]) == ["add", "mul"]
    assert listed[2:] == ["add"]


def judge_session() -> JudgeSession:
    problem = FunctionProblem("double", lambda x: 2 * x, lambda: [torch.ones(4)], 0.0)
    subject = JudgeSubject(problem, "function", [], {}, 1, False)
    target, budget = JudgeTarget("it.py", ("it",)), JudgeBudget(time.monotonic(), 60.0)
    return JudgeSession(JudgeOptions(), subject, target, target, lambda *stage: None, budget)


def test_a_candidate_that_takes_long_for_each_shape_gets_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that choose among many configs for each shape take seconds for each."""
    witness, checked = SimpleNamespace(prisoner=SimpleNamespace(answering=0.0)), list[InputForm]()

    def check(case: Any, witness: Any, form: InputForm, pace: Any, *, brief: bool) -> bool:
        witness.prisoner.answering += 2.0
        checked.append(form)
        return True

    monkeypatch.setattr(engine, "_check_one_form", check)
    case = judge_session()
    case.calls = 1
    forms = [InputForm(f"{size} {kind}", shapes=((size,),), kind=kind) for size in range(20) for kind in ("a", "b")]
    kept = engine._check_inputs(case, witness, forms)  # type: ignore[arg-type]
    sizes = {form.shapes for form in checked}
    assert len(sizes) == 4 == len(checked) / 2, "a tenth of 60 s, and all values of these shapes"
    assert case.unchecked == ["32 inputs of further shapes: the candidate took 6.0 s for 3 others"]
    assert kept == forms[:8], "later checks would take as long for the others"
    assert not case.missing


def test_a_candidate_that_takes_very_long_gets_its_own_shape_another_one_and_a_near_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that chooses among 18 configs for each number of columns is compared with other rows in no time."""
    witness, checked = SimpleNamespace(prisoner=SimpleNamespace(answering=0.0)), list[InputForm]()

    def check(case: Any, witness: Any, form: InputForm, pace: Any, *, brief: bool) -> bool:
        known = {other.shapes[0][1] for other in checked}
        witness.prisoner.answering += 0.0 if form.shapes[0][1] in known else 7.0
        checked.append(form)
        return True

    monkeypatch.setattr(engine, "_check_one_form", check)
    case = judge_session()
    case.calls = 1
    shapes = [(64, 64), (8, 8), (32, 32), (9, 8), (16, 16), (8, 4)]
    forms = [InputForm(str(s), s in shapes[:1] + shapes[2:3], shapes=(s, s[1:])) for s in shapes]
    engine._check_inputs(case, witness, forms)  # type: ignore[arg-type]
    assert [form.shapes[0] for form in checked] == [(64, 64), (8, 8), (9, 8), (64, 64)], "32 x 32 is timed as well"


def test_a_size_that_the_candidate_compares_is_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate may take long for each shape on purpose, so that it is not called with the size that decides."""
    witness, checked = SimpleNamespace(prisoner=SimpleNamespace(answering=0.0)), list[int]()

    def check(case: Any, witness: Any, form: InputForm, pace: Any, *, brief: bool) -> bool:
        witness.prisoner.answering += 9.0
        checked.append(form.shapes[0][0])
        return form.shapes[0][0] != 2  # which the reference refuses

    monkeypatch.setattr(engine, "_check_one_form", check)
    monkeypatch.setattr(new_shapes, "compared_numbers", lambda file: {1, 20, 30})
    case, forms = judge_session(), [InputForm(str(size), shapes=((size,),)) for size in range(33)]
    case.calls = 1
    engine._check_inputs(case, witness, forms)  # type: ignore[arg-type]
    assert checked == [0, 1, 2, 3, 20, 21, 30, 31]
    assert [each.partition(":")[0] for each in case.unchecked] == ["25 inputs of further shapes"]


@pytest.mark.parametrize("most", [60.0, 0.0], ids=["it counts for nothing", "up to a limit"])
def test_the_time_of_programs_that_build_a_candidate(launcher, tmp_path, monkeypatch, most: float) -> None:
    """A compiler takes half a minute for the headers of torch, which is no time of the candidate's calls."""
    monkeypatch.setattr(processes, "BUILDING_S", most)
    (tmp_path / "it.py").write_text("import subprocess\nsubprocess.run(['sleep', '1'])\ndef it(): ...\n")
    prisoner = launcher.start([str(tmp_path)], Bounds(seconds=0.4), until=time.monotonic() + 60)
    witness, case, clock = TargetProcess(prisoner), judge_session(), processes._BuildingClock(prisoner)
    case.clock.prisoners.append(prisoner)
    target, until, began = (
        LoadTarget(str(tmp_path / "it.py"), ["it"], "function", [], 1),
        prisoner.until,
        case.budget.began,
    )
    if not most:
        with pytest.raises(Timeout, match="no answer for"):
            witness.load(target, ArgumentArena(), clock)
        return
    witness.load(target, ArgumentArena(), clock)
    clock.finish(case)
    assert prisoner.bounds.seconds == 0.4
    assert 0.3 < clock.seconds < 10
    assert prisoner.until - until == pytest.approx(case.budget.began - began) == pytest.approx(clock.seconds)
    assert case.clock.times() == (StageTime("building", clock.seconds, clock.seconds),)
    prisoner.kill()


def test_a_process_that_cannot_be_killed_leaves_the_others_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, closed = StageClock(), list[bool]()
    clock.prisoners.append(SimpleNamespace(answering=0.0))  # type: ignore[arg-type]
    monkeypatch.setattr(engine.SandboxedProcess, "kill", lambda prisoner: 1 / 0)
    with pytest.raises(ZeroDivisionError), engine._closed_in_stage(clock, "end") as stack:
        stack.callback(closed.append, True)
    assert closed == [True]


def test_memory_of_a_gpu_is_unmapped_once_where_two_threads_end_a_process() -> None:
    closed: list[bool] = []
    target = TargetProcess(SimpleNamespace())  # type: ignore[arg-type]
    driver = SimpleNamespace(synchronize=lambda: target.use_block(None), release_retired=lambda: None)
    target.block = SimpleNamespace(driver=driver, close=lambda: closed.append(True))  # type: ignore[assignment]
    target.use_block(None)
    assert closed == [True]


def test_processes_are_killed_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = list[int]()
    prisoners = [SimpleNamespace(kill=lambda number=number: killed.append(number)) for number in range(2)]

    def start(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", start)
    engine._kill_all(prisoners)  # type: ignore[arg-type]
    assert killed == [0, 1]
