"""A verdict comes within its time, whatever the candidate does with it."""

import os
import sys
import time
import types
from dataclasses import replace

import pytest
import torch

import shiplap as sl
from shiplap.errors import ShiplapError
from shiplap.judge.options import JudgeBudget, JudgeOptions
from shiplap.judge.problem import FunctionProblem
from shiplap.safe_io.work_folders import remove_folder
from shiplap.sandbox import supervisor
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.protocol import Inspect, LoadTarget
from shiplap.sandbox.request_errors import ProcessEnded, Timeout
from shiplap.sandbox.supervisor import Bounds, SandboxLauncher
from shiplap_testing.effort import sampled
from shiplap_testing.launchers import ordinary_launchers
from tests.judge.cheats import HEAD
from tests.judge.test_cheats import REFERENCE

SECONDS, LOAD = 8.0, 120.0  # the second guards against a hang, whatever else the machine does
HANGS = {  # where a candidate waits for ever
    "at import": "import time\ntime.sleep(1e6)\ncandidate = honest\n",
    "in native code at import": "import ctypes\nctypes.CDLL(None).pause()\ncandidate = honest\n",
    "in the first call": "import time\ndef candidate(x, w):\n    time.sleep(1e6)\n",
    "and computes": "def candidate(x, w):\n    while True:\n        honest(x, w)\n",
    "in a thread at exit": """
import threading, time
def candidate(x, w):
    threading.Thread(target=lambda: time.sleep(1e6)).start()
    raise SystemExit
""",
    "while it waits for a child": """
import os, time
def candidate(x, w):
    child = os.fork()
    if child == 0:
        time.sleep(1e6)
    os.waitpid(child, 0)
""",
    "in calls that are timed": """
import time
CALLS = []
def candidate(x, w):
    CALLS.append(1)
    if len(CALLS) > 150:
        time.sleep(1e6)
    return honest(x, w)
""",
    "in a backward": """
import time
class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return honest(x, w)
    @staticmethod
    def backward(ctx, grad):
        time.sleep(1e6)
candidate = Waits.apply
""",
}

QUICK = ("in the first call", "in a thread at exit")


@pytest.fixture
def judged(launcher, tmp_path):
    folder = tmp_path / "candidate"
    folder.mkdir()
    (tmp_path / "problem.py").write_text(REFERENCE)
    launcher.start().kill()  # it takes seconds to load torch

    def run(text, **options):
        (folder / "it.py").write_text(HEAD + text)
        rest = {"seconds": SECONDS, "rounds": 5, "bounds": Bounds(memory=1 << 29), **options}
        began = time.monotonic()
        result = sl.judge(tmp_path / "problem.py", folder / "it.py", launcher=launcher, **rest)
        return result, time.monotonic() - began

    return run


@pytest.mark.parametrize("where", sampled(HANGS, long=[n for n in HANGS if n not in QUICK]))
def test_who_waits_for_ever_has_a_verdict_in_time(judged, where):
    result, took = judged(HANGS[where], gradients="backward" in where)
    assert result.verdict in ("refused", "incomplete"), result  # the second where not much of the time was left
    assert result.min_speedup == 0.0
    assert took < SECONDS + LOAD, result


@pytest.mark.long
def test_who_is_slow_in_every_call_is_incomplete_in_time(judged):
    result, took = judged("import time\ndef candidate(x, w):\n    time.sleep(1)\n    return honest(x, w)\n")
    assert result.verdict == "incomplete", result
    assert took < SECONDS + LOAD, result


@pytest.mark.long
def test_the_time_is_that_of_the_whole_judgement_with_a_launcher_of_its_own(tmp_path):
    (tmp_path / "candidate").mkdir()
    (tmp_path / "problem.py").write_text(REFERENCE)
    (tmp_path / "candidate" / "it.py").write_text(HEAD + HANGS["in the first call"])
    began = time.monotonic()
    result = sl.judge(tmp_path / "problem.py", tmp_path / "candidate" / "it.py", seconds=25.0)
    assert result.verdict in ("refused", "incomplete"), result
    assert time.monotonic() - began < 25.0 + LOAD


def test_a_launcher_that_does_not_start_in_time_is_given_up(tmp_path):
    """As on a machine with so much load that loading torch takes longer than the judgement."""
    with SandboxLauncher() as launcher:
        with ordinary_launchers(), pytest.raises(Timeout):
            launcher.start(until=time.monotonic() + 0.05)
        launcher.start().kill()  # another one


@pytest.mark.parametrize(
    ("until", "bound", "error"), [(4.5, 5.0, ProcessEnded), (0.5, 60.0, Timeout), (60.0, 0.5, ProcessEnded)]
)
def test_who_is_silent_for_most_of_its_time_is_at_fault_and_who_had_none_is_late(
    launcher, tmp_path, monkeypatch, until, bound, error
):
    usage = supervisor.read_scheduler_usage
    # Silent for most of its time, also if a busy machine lets the request begin a second or two late.
    monkeypatch.setattr(supervisor, "HANGS", 0.2)
    monkeypatch.setattr(supervisor, "SILENT_S", 1.0)
    # On a busy machine the seconds for which the process waits for a processor would count for it.
    monkeypatch.setattr(supervisor, "read_scheduler_usage", lambda *ids: replace(usage(*ids), waited=0.0))
    (tmp_path / "it.py").write_text("import time\ntime.sleep(1e6)\n")
    order = LoadTarget(str(tmp_path / "it.py"), ["it"], "function", [], 1)
    prisoner = launcher.start([str(tmp_path)], Bounds(seconds=60.0))  # on a busy machine the start alone takes a second
    prisoner.bounds = Bounds(seconds=bound)
    prisoner.until = time.monotonic() + until
    with pytest.raises(ProcessEnded) as caught:
        prisoner.request_reply(order, ArgumentArena().write())
    assert caught.type is error
    with pytest.raises(ProcessEnded):
        prisoner.request_reply(order)


def test_nobody_is_asked_after_the_end(launcher):
    prisoner = launcher.start()
    prisoner.until = time.monotonic() - 1
    with pytest.raises(Timeout):
        prisoner.request_reply(Inspect())


def test_the_parts_of_a_budget():
    budget = JudgeBudget(time.monotonic(), 60.0)
    assert budget.one_call == 40.0
    assert 50.0 < budget.ends - budget.began < budget.last - budget.began < 58.0
    over = JudgeBudget(time.monotonic() - 100.0, 60.0)
    before = time.monotonic()
    half, none = budget.time_of_share(0.5), over.time_of_share(0.5)
    after = time.monotonic()
    assert (before + budget.ends) / 2 - 1e-6 <= half <= (after + budget.ends) / 2 + 1e-6
    assert before <= none <= after


def test_a_slow_reference_is_not_asked_for_shapes_without_end():
    def slow(x):
        time.sleep(0.05)
        return x + 1

    problem = FunctionProblem("slow", slow, lambda: (torch.rand(7, 9),), 0.0, vary_shapes=True)
    problem.until = time.monotonic() + 0.2
    assert problem.forms()
    assert problem.hurried


def test_a_folder_with_more_than_can_be_removed_in_time_is_left_to_its_remover(tmp_path):
    home = tmp_path / "scratch"
    home.mkdir()
    for number in range(3000):
        (home / str(number)).touch()
    began = time.monotonic()
    remove_folder(str(home), seconds=0.0)
    while home.exists():
        assert time.monotonic() - began < 60.0
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["Model", "reference"])
def test_what_a_cell_of_a_notebook_defines_has_an_error_that_says_what_to_do(monkeypatch, name):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    cell = "class Model:\n    def __call__(self, x): return x\ndef reference(x): return x\n"
    exec(compile(cell, "/tmp/ipykernel_4711/1234.py", "exec"), vars(main))
    with pytest.raises(ShiplapError) as e:
        sl.judge(vars(main)[name], vars(main)[name])
    assert e.value.id == "SL501"
    assert "%%writefile" in str(e.value)


def test_a_path_that_is_no_text_is_no_target(tmp_path):
    file = tmp_path / os.fsdecode(b"kernel\xff.py")
    file.write_text("def reference(x): return x\n")
    with pytest.raises(ShiplapError) as e:
        sl.judge(f"{file}:reference", f"{file}:reference")
    assert (e.value.id, e.value.what) == ("SL501", "the path of the target is not encoded in UTF-8")
    assert e.value.got.isascii()


@pytest.mark.parametrize(
    "wrong",
    [{"seconds": n} for n in (0.0, -1.0, float("nan"), float("inf"))]
    + [{"rounds": 0}, *({"tolerance": n} for n in (-1e-9, float("nan"), float("inf")))],
    ids=str,
)
def test_numbers_without_a_meaning_are_refused(wrong):
    """No result is too far from another one by a tolerance that is no number."""
    with pytest.raises(ShiplapError) as e:
        JudgeOptions(**wrong)
    assert e.value.id == "SL613"
    assert "=".join(map(str, *wrong.items())) in e.value.got


def test_all_processors_are_one_device():
    assert JudgeOptions(device="cpu:3", tolerance=0.0, seconds=1e-9).device == "cpu"
    assert JudgeOptions(device="cuda:1").device == "cuda:1"
