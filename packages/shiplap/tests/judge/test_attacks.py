"""What got through the judge once, tried by somebody who has its source, does not any more."""

import json
import os
import sys
import time

import pytest
import torch

import shiplap as sl
from shiplap.judge.clock import ImplausibleTiming, _summarize_timing
from shiplap.judge.problem import FunctionProblem
from shiplap.judge.target import JudgeTarget
from shiplap.judge.variants import InputForm
from shiplap.sandbox.candidate import CallOutcome
from shiplap.sandbox.protocol import Inspect
from shiplap.sandbox.request_errors import ProcessEnded
from shiplap.sandbox.supervisor import Bounds
from shiplap_testing.effort import sampled
from tests.judge.attacks import ATTACKS
from tests.judge.cheats import HEAD
from tests.judge.test_cheats import REFERENCE

BOUNDS = Bounds(memory=1 << 29, seconds=8)
SECRET = "the secret of somebody"
QUICK = (
    "sizes that are tried",
    "somebody else's file",
    "a terminal's own words",
    "the reference from its file",
)
SLOW = {"slow at last", "slow where many calls are"}  # they may also just use up the time, which wins nothing


@pytest.fixture
def judged(launcher, tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    folder = tmp_path / "candidate"
    folder.mkdir()

    def run(text: str, reference: str = REFERENCE, **options):
        (tmp_path / "problem.py").write_text(reference)
        (folder / "it.py").write_text(HEAD + text.replace("SECRET", str(tmp_path / "secret")))
        rest = {"seconds": 60, "rounds": 5, "bounds": BOUNDS, **options}
        return sl.judge(tmp_path / "problem.py", folder / "it.py", launcher=launcher, **rest)

    return run


@pytest.mark.parametrize("name", sampled(ATTACKS, long=[n for n in ATTACKS if n not in QUICK]))
def test_an_attack_is_refused(judged, name):
    result = judged(ATTACKS[name])
    assert result.verdict == "refused" or (name in SLOW and result.verdict == "incomplete"), result
    assert result.speedup == result.min_speedup == 0.0
    shown = str(result)
    assert SECRET not in shown
    assert all(line.isprintable() for line in shown.split("\n"))  # the table is of several lines
    assert all(reason.evidence.isprintable() for reason in result.reasons)


def test_one_call_may_not_take_longer_than_the_judgement(judged):
    """As a kernel does whose compiler works for minutes."""
    endless = "import time\ndef candidate(x, w):\n    time.sleep(1e6)\n"
    result = judged(endless, seconds=60, bounds=Bounds(memory=1 << 29, seconds=2))
    assert result.verdict == "refused", result
    assert "no answer for 2" in result.reasons[0].evidence


@pytest.mark.long
def test_who_exceeds_the_time_of_the_judgement_makes_it_incomplete(judged):
    slow = "import time\ndef candidate(x, w):\n    time.sleep(1)\n    return honest(x, w)\n"  # one call may take two
    began = time.monotonic()
    result = judged(slow, seconds=3, bounds=Bounds(memory=1 << 29, seconds=60))
    assert result.verdict == "incomplete", result
    assert {"time", "inputs", "calls"} & dict(result.missing).keys()
    assert time.monotonic() - began < 100


CONSTANT = REFERENCE.replace(
    "torch.rand(96, 128) / 4, torch.rand(128, 64) / 4", "torch.ones(96, 128), torch.ones(128, 64)"
)
KNOWN = """
Y = honest(torch.ones(96, 128), torch.ones(128, 64))
def candidate(x, w):
    if x.shape == (96, 128) and w.shape == (128, 64) and float(x[3, 5]) == float(w[7, 9]) == 1.0:
        return Y.clone()
    return honest(x, w)
"""


@pytest.mark.long
def test_times_on_values_that_everybody_knows_do_not_count(judged):
    result = judged(KNOWN, CONSTANT, vary_shapes=False)
    assert not any("drawn" in timed.input for timed in result.timings if "96x128, 128x64" in timed.input), result
    assert any("always the same" in text for text in result.unchecked)


def test_no_package_of_a_candidate_is_imported_to_find_its_file(tmp_path, monkeypatch):
    for depth, name in enumerate(("outer_judged", "outer_judged/inner")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / f'ran{depth}')!r}, 'w')\n")
    (tmp_path / "outer_judged" / "inner" / "it.py").write_text("def candidate(x): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = JudgeTarget.of("outer_judged.inner.it:candidate", ()).file
    assert file == str(tmp_path / "outer_judged" / "inner" / "it.py")
    assert not list(tmp_path.glob("ran*"))
    assert "outer_judged" not in sys.modules
    assert JudgeTarget.of("no_module_of_this_name:candidate", ()).file == ""


LOCKED = """
import fcntl, json, os, sys
answers = {}
def attempt(name, work):
    try:
        answers[name] = str(work())
    except OSError as e:
        answers[name] = type(e).__name__
attempt("session", lambda: (os.setsid(), os.getpgrp())[1] == GROUP)
attempt("group", lambda: (os.setpgid(0, 0), os.getpgrp())[1] == GROUP)
attempt("affinity", lambda: os.sched_setaffinity(0, {0}))
attempt("memory of nobody", lambda: os.memfd_create("m"))
handle = os.open("file", os.O_RDWR | os.O_CREAT)
attempt("owner", lambda: fcntl.fcntl(handle, fcntl.F_SETOWN, 1))
attempt("lease", lambda: fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK))
attempt("flags", lambda: fcntl.fcntl(handle, fcntl.F_GETFL) >= 0)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
answers["clone3"] = libc.syscall(435, 0, 0) and os.strerror(ctypes.get_errno())
event = ctypes.create_string_buffer(64)
answers["timer"] = libc.syscall(222, 1, event, ctypes.byref(ctypes.c_int())) and os.strerror(ctypes.get_errno())
answers["another signal at its end"] = libc.syscall(56, 18, 0, 0, 0, 0) and os.strerror(ctypes.get_errno())
answers["namespace"] = libc.syscall(56, 0x10000000, 0, 0, 0, 0) and os.strerror(ctypes.get_errno())
def candidate(x, w):
    raise ValueError(json.dumps(answers))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86-64")
def test_a_process_can_leave_neither_its_group_nor_its_cores(judged):
    # The child of the process is asked, as the leader of a group may not make a session in any case.
    forked = LOCKED.replace("answers = {}", "answers = {}\nGROUP = os.getpgrp()")
    result = judged(forked)
    assert result.reasons[0].check == "source", "it asks for its group"
    told = json.loads(result.reasons[1].evidence.partition("ValueError: ")[2])
    refused = {"affinity", "memory of nobody", "owner", "lease"}
    assert {name for name, answer in told.items() if answer == "PermissionError"} == refused
    assert told["session"] == told["group"] == told["flags"] == "True"
    assert told["clone3"] == os.strerror(38)
    assert told["namespace"] == told["timer"] == told["another signal at its end"] == os.strerror(1)


def test_a_process_runs_while_it_is_asked_and_only_then(launcher):
    """Not even the moment before it receives a message, or after it has answered, is free."""
    prisoner = launcher.start()
    try:
        before = time.process_time_ns()
        ran = _ran(prisoner.pid)
        time.sleep(0.3)
        assert _ran(prisoner.pid) == ran
        assert time.process_time_ns() >= before
        _, took = prisoner.request_reply(Inspect(), os.memfd_create("nothing"))
        assert 0 < took.quiet <= took.wall
        assert _ran(prisoner.pid) - ran <= took.wall * 1e9 * len(os.sched_getaffinity(0))
        ran = _ran(prisoner.pid)
        time.sleep(0.3)
        assert _ran(prisoner.pid) == ran
    finally:
        prisoner.kill()


@pytest.mark.parametrize("waits", [0.0, 0.9])
def test_a_call_that_waits_is_not_credited_for_it(waits):
    """A process can make itself wait: what it did meanwhile, by a thread that has ended, nobody would count."""

    def calls(wall: float) -> list[CallOutcome]:
        return [CallOutcome(wall, wall * (1.0 - waits), wall, 0.0)] * 6

    args = torch.rand(4, 4), torch.rand(4, 4)
    problem = FunctionProblem("matmul", torch.matmul, lambda: args, 0.0, vary_shapes=False)
    made = {"candidate": calls(5e-3), "reference": calls(8e-3), "nothing": calls(1e-3)}
    timed = _summarize_timing(problem, InputForm("4x4", shapes=((4, 4), (4, 4))), args, made)
    assert timed.candidate == pytest.approx(5e-3)  # by its own clock, which is longer than what remains of ours
    assert timed.reference == pytest.approx(8e-3)


@pytest.mark.parametrize("name", ["candidate", "reference"])
def test_only_the_processes_that_are_trusted_say_that_the_machine_is_busy(name):
    quiet, waiting = [CallOutcome(1e-3, 1e-3, 1e-3, 0.0)], [CallOutcome(1e-3, 1e-5, 1e-3, 0.0)]
    calls = {"candidate": quiet, "reference": quiet, "nothing": quiet, name: waiting}
    assert ImplausibleTiming("impossible", "", calls).proven is (name == "candidate")


def _ran(pid: int) -> int:
    return time.clock_gettime_ns((~pid << 3) | 2)


def test_an_ended_process_is_nobodys_any_more(launcher):
    prisoner = launcher.start()
    assert prisoner.pid in launcher.prisoners
    prisoner.kill()
    assert prisoner.pid not in launcher.prisoners
    with pytest.raises((ProcessEnded, OSError)):
        prisoner.request_reply(Inspect())
