"""The third attack: what got through, and what is refused by the way."""

import os
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch

import shiplap as sl
from shiplap.judge import checks, clock
from shiplap.judge.clock import ImplausibleTiming, _summarize_timing, remeasure_without_candidate
from shiplap.judge.options import StepDeadline
from shiplap.judge.problem import FunctionProblem
from shiplap.judge.result import Timed
from shiplap.judge.variants import InputForm
from shiplap.sandbox import candidate
from shiplap.sandbox.candidate import (
    CallOutcome,
    CandidateError,
    DeviceUnavailable,
    TargetProcess,
    check_process_state,
)
from shiplap.sandbox.device_clock import CallsNotQueued
from shiplap.sandbox.proc_filesystem import ProcessResources
from shiplap.sandbox.protocol import (
    BrokenMessage,
    CallTraces,
    OperatorList,
    TensorLocation,
    pack_message,
    parse_message,
)
from shiplap.sandbox.request_errors import Timeout
from shiplap.sandbox.source_scan import MAX_SOURCE_BYTES, constants_in_sources, find_suspicious_names
from shiplap.sandbox.supervisor import Bounds
from shiplap_testing.effort import sampled
from tests.judge.cheats import HEAD
from tests.judge.test_cheats import REFERENCE
from tests.judge.unseen import BACKWARD, UNSEEN

BOUNDS = Bounds(memory=1 << 29, seconds=8)
QUICK = ("precision by the new names", "a secret of the environment")


@pytest.fixture
def judged(launcher, tmp_path):
    folder = tmp_path / "candidate"
    folder.mkdir()
    (tmp_path / "problem.py").write_text(REFERENCE)

    def run(text, **options):
        (folder / "it.py").write_text(HEAD + text)
        rest = {"seconds": 60, "rounds": 5, "bounds": BOUNDS, **options}
        return sl.judge(tmp_path / "problem.py", folder / "it.py", launcher=launcher, **rest)

    return run


@pytest.mark.parametrize("name", sampled(UNSEEN, long=[n for n in UNSEEN if n not in QUICK]))
def test_an_attack_is_refused(judged, name):
    result = judged(UNSEEN[name])
    assert result.verdict == "refused", result
    assert result.speedup == result.min_speedup == 0.0


@pytest.mark.parametrize("name", sampled(BACKWARD, long=["right on the first shape"]))
def test_a_gradient_is_right_everywhere(judged, name):
    result = judged(BACKWARD[name], gradients=True)
    assert [r.check for r in result.reasons] == ["gradients"], result


def test_secrets_of_the_environment_stay_where_they_are(monkeypatch, tmp_path):
    monkeypatch.setenv("SHIPLAP_TEST_TOKEN", "hunter2")
    monkeypatch.setenv("SHIPLAP_TEST_PLAIN", "plain")
    (tmp_path / "candidate").mkdir()
    (tmp_path / "problem.py").write_text(REFERENCE)
    asks = "import os\nraise ValueError([v for k, v in os.environ.items() if k.startswith('SHIPLAP_TEST')])\n"
    (tmp_path / "candidate" / "it.py").write_text(asks)
    result = sl.judge(tmp_path / "problem.py", tmp_path / "candidate" / "it.py", seconds=60)
    assert "plain" in str(result), result
    assert "hunter2" not in str(result)
    assert os.environ["SHIPLAP_TEST_TOKEN"] == "hunter2"


def test_nobody_parses_a_source_without_end(tmp_path):
    file = tmp_path / "it.py"
    file.write_text("x = [" + "1234567," * (MAX_SOURCE_BYTES // 8 + 1) + "]\n")
    assert constants_in_sources(str(file)) == []
    assert "bytes" in find_suspicious_names(str(file))[0]


@pytest.mark.parametrize("traces", [{"raced": True}, {"left": ["signal handlers"]}, {"threads": 2}])
def test_what_a_process_tells_of_a_call_on_a_device_counts(traces):
    with pytest.raises(CandidateError):
        check_process_state(CallTraces(**traces))
    check_process_state(CallTraces())


@pytest.mark.parametrize(
    ("told", "valid"),
    [
        (["OperatorUse", "aten::mm", [[2, 3], [3, 4], []]], True),
        (["OperatorUse", "aten::cat", [[[2, 3], [2, 3]], []]], True),
        (["OperatorUse", "kernel void gemm<float>", []], True),
        (["OperatorUse", "aten::mm", [[2, 3.0]]], False),
        (["OperatorUse", "aten::mm", [[1 << 63]]], False),
        (["OperatorUse", "aten::mm", [[[[[1]]]]]], False),
        (["OperatorUse", "aten::mm", 3], False),
        (["OperatorUse", ["aten::mm"], []], False),
        (["OperatorUse", "aten::mm"], False),
        (["Foreign", "aten::mm"], False),
        (7, False),
    ],
)
def test_an_operator_is_a_name_and_sizes(told, valid):
    body = msgspec.msgpack.encode(["OperatorList", [told], [], ["CallTraces"]])
    if valid:
        assert pack_message(parse_message(body, OperatorList))
        return
    with pytest.raises(BrokenMessage):
        parse_message(body, OperatorList)


def test_a_result_in_much_more_memory_than_it_needs_is_not_read():
    like = torch.empty(1 << 20)
    assert 63 * like.numel() * like.itemsize > candidate.MAX_PADDED_BYTES / 2
    like = torch.empty(1 << 22)
    told = TensorLocation("float32", [1 << 22], [63], 0, "cpu")
    with pytest.raises(CandidateError, match="strides"):
        TargetProcess.__new__(TargetProcess)._tensor(0, told, like, candidate.MAX_PADDED_BYTES)


ARGS = torch.rand(4, 4), torch.rand(4, 4)
FORM = InputForm("4x4", shapes=((4, 4), (4, 4)))


class Played:
    """A process whose calls take what they are said to."""

    prisoner = block = None

    def __init__(self, seconds):
        self.seconds = seconds

    def run_turn(self, name, sets, expected, *, queued):
        assert not queued
        assert len(sets) == 1
        assert expected is None
        return CallOutcome(self.seconds, self.seconds, self.seconds, 0.0), []


@pytest.mark.parametrize(("now", "expected"), [(5e-3, 5e-3), (9e-3, 7e-3)])
def test_the_reference_is_timed_without_the_candidate_too(monkeypatch, now, expected):
    """What a candidate has left to a device slows the reference down, and not the candidate."""
    monkeypatch.setattr(clock, "_run_turn", Played.run_turn)
    problem = FunctionProblem("matmul", torch.matmul, lambda: ARGS, 0.0, vary_shapes=False)
    before = Timed("4x4", 1e-3, 7e-3, None, 1e-3, 1e-6, 5)
    judged = {"reference": Played(now), "nothing": Played(1e-3)}
    timed = remeasure_without_candidate(problem, FORM, judged, before, StepDeadline(float("inf")))
    assert timed.reference == pytest.approx(expected)
    assert timed.candidate == before.candidate


@pytest.mark.parametrize(("blocked", "queued"), [(1, True), (2, False)])
def test_a_kernel_that_is_loaded_behind_the_gate_blocks_the_queue_once(monkeypatch, blocked, queued):
    left = [blocked]

    def run_turn(process, name, sets, expected, *, queued=False):
        if queued and left[0]:
            left[0] -= 1
            raise CallsNotQueued("the process waits for the device")
        seconds = 1e-3 if name == "nothing" else 2e-3
        return CallOutcome(seconds, seconds, seconds, 0.0), []

    monkeypatch.setattr(clock, "_run_turn", run_turn)
    monkeypatch.setattr(clock, "lies_on_device", lambda tensor: True)
    monkeypatch.setattr(clock, "device_driver", lambda: SimpleNamespace(free_bytes=lambda: 1 << 30))
    problem = FunctionProblem("matmul", torch.matmul, lambda: ARGS, 0.0, vary_shapes=False)
    judged = {"candidate": Played(0), "reference": Played(0), "nothing": Played(0)}
    plan = clock._plan_batches(problem, FORM, ARGS, judged, StepDeadline(float("inf")), float("inf"))
    assert (plan.queued, plan.count > 1) == (queued, True)


@pytest.mark.parametrize(("second", "queued"), [(torch.float32, True), (torch.float64, False)])
def test_values_on_the_host_are_not_queued_and_large_calls_share_none(monkeypatch, second, queued):
    """The process could read the values while it queues its calls, and another process would have the results."""
    monkeypatch.setattr(clock, "lies_on_device", lambda tensor: tensor.dtype == torch.float32)
    monkeypatch.setattr(clock, "device_driver", lambda: SimpleNamespace(free_bytes=lambda: 1))
    problem = FunctionProblem("add", torch.add, lambda: (ARGS[0], ARGS[1].to(second)), 0.0, vary_shapes=False)
    turns: list[str] = []
    monkeypatch.setattr(clock, "_run_turn", lambda process, name, *args: turns.append(name))
    judged = {"candidate": Played(0), "reference": Played(0)}
    plan = clock._plan_batches(problem, FORM, problem.draw(FORM), judged, StepDeadline(float("inf")), float("inf"))
    assert plan == clock._BatchPlan(1, queued=queued, apart=True)
    assert turns == (["candidate", "reference"] if queued else [])  # not queued, so that all is loaded


@pytest.mark.parametrize(("on_device", "raised"), [(False, CandidateError), (True, DeviceUnavailable)])
def test_only_a_device_may_lack_memory_for_a_batch(monkeypatch, on_device, raised):
    """A candidate chooses the names of its own errors, also where there is no device."""
    counts, freed = [], []

    def measure_planned(*args):
        counts.append(args[-1].count)
        raise CandidateError("raised", "OutOfMemoryError: says the candidate")

    monkeypatch.setattr(clock, "_plan_batches", lambda *args: clock._BatchPlan(4))
    monkeypatch.setattr(clock, "_measure_planned", measure_planned)
    monkeypatch.setattr(clock, "lies_on_device", lambda tensor: on_device)
    monkeypatch.setattr(clock, "device_driver", lambda: SimpleNamespace(free_bytes=lambda: freed.append(1)))
    problem = FunctionProblem("matmul", torch.matmul, lambda: ARGS, 0.0, vary_shapes=False)
    with pytest.raises(raised):
        clock.measure_form(problem, FORM, {}, 5, 0.0, StepDeadline(float("inf")))
    # One call is tried once more, when the processes have returned what they keep.
    assert counts == ([4, 2, 1, 1] if on_device else [4])
    assert len(freed) == len(counts) - 1


def test_a_clock_that_hides_time_is_doubted():
    problem = FunctionProblem("matmul", torch.matmul, lambda: ARGS, 0.0, vary_shapes=False)

    def calls(wall: float, spent: float) -> list[CallOutcome]:
        return [CallOutcome(wall, wall, spent, 0.0)] * 6

    made = {"candidate": calls(9e-3, 1e-5), "reference": calls(5e-3, 5e-3), "nothing": calls(1e-3, 0.0)}
    with pytest.raises(ImplausibleTiming, match="outside the call"):
        _summarize_timing(problem, FORM, ARGS, made)


def test_late_calls_take_a_share_of_the_whole_judgement(monkeypatch):
    """Calls on a CPU leave no late work, and that is no time of the judgement."""
    ends, began = [], time.monotonic()
    monkeypatch.setattr(checks.Endurance, "_run_batches", lambda self, form, until: ends.append(until))
    monkeypatch.setattr(checks.Endurance, "_held_resources", lambda self: ProcessResources())
    problem = FunctionProblem("matmul", torch.matmul, lambda: ARGS, 0.0, vary_shapes=False)
    witness = SimpleNamespace(prisoner=None, call=lambda args, expected: CallOutcome(1e-3, 1e-3, 1e-3, 0.0))
    checks.Endurance(problem, witness, StepDeadline(float("inf"))).run(FORM, ARGS, float("inf"), 1e6)
    assert len(ends) == 1
    assert ends[0] >= began + checks.LATE_SHARE * 1e6


@pytest.mark.parametrize(("seen", "products"), [(True, False), (False, True)])
def test_a_reference_that_shows_no_functions_may_compute_products(seen, products):
    """As a script of torch.jit."""

    def add(a, b):
        if seen:
            return a + b
        with torch._C.DisableTorchFunction():
            return a + b

    problem = FunctionProblem("add", add, lambda: ARGS, 0.0, vary_shapes=False)
    problem.note_products(ARGS)
    assert problem.runs_products == products


class Answers:
    answering = 0.0


@pytest.fixture
def now(monkeypatch):
    """The time of a clock that the test alone moves."""
    made = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: made[0])
    return made


def test_what_a_process_takes_for_its_answer_is_no_reason_to_end_a_stage(now):
    """As a first call does, which compiles."""
    pace, process = StepDeadline(now[0] + 0.4), Answers()
    with pace.step(process):
        now[0] += 0.25
        process.answering += 0.25
    with pace.step(process):
        pass


def test_a_stage_ends_before_a_step_would_end_too_late(now):
    pace = StepDeadline(now[0] + 0.3)
    with pace.step():
        now[0] += 0.2
    with pytest.raises(Timeout), pace.step():
        pytest.fail("it began")
