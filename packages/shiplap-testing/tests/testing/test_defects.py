"""Every defect is one: each bad op is wrong on an input chosen by hand, and its twin is right on it."""

import collections
import json

import pytest

from shiplap_testing.defects import CAUSES, defects
from shiplap_testing.defects.score import Outcome, count, report
from shiplap_testing.defects.witness import restored
from shiplap_testing.effort import sampled
from shiplap_testing.forked import interpreted, python

DEFECTS = defects()
ISOLATED = [d.name for d in DEFECTS.values() if d.breaks or "triton" in d.needs]
HERE = [name for name in DEFECTS if name not in ISOLATED]
PROGRAM = """
import json, os, signal, sys, time, torch
from shiplap_testing.defects import defects

def judge(name, make):
    pid = os.fork()
    if not pid:
        os.setsid()
        defect = defects()[name]
        op = getattr(defect, make)()
        os._exit(40 if defect.right(op) else 41)
    return pid

def ended(pid, deadline):
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"

import shiplap_testing.defects.triton_kernels
torch.set_num_threads(1)  # forked: no threads before
names = sys.argv[1:]
good = {name: ended(judge(name, "make_good"), time.monotonic() + 60) for name in names}
bad = {name: judge(name, "make_bad") for name in names}
until = time.monotonic() + 4
patience = {name: 0 if defects()[name].breaks else 60 for name in names}
print(json.dumps([good, {name: ended(pid, until + patience[name]) for name, pid in bad.items()}]))
"""


@pytest.mark.parametrize("name", sampled(HERE, len(HERE) // 14))
def test_the_bad_op_is_wrong_and_its_twin_is_right(name):
    defect = DEFECTS[name]
    with restored():
        assert defect.right(defect.make_good())
        assert not defect.right(defect.make_bad())


@pytest.fixture(scope="module")
def ends(request):
    """How processes ended that asked whether an op is right, 40 for yes, 41 for no: of the twins, of the bad ones."""
    tests = [
        i for i in request.session.items if getattr(i, "originalname", "") == "test_the_same_in_processes_that_may_end"
    ]
    names = [test.callspec.params["name"] for test in tests]
    done = interpreted("-W", "ignore", "-c", PROGRAM, *names)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", sampled(ISOLATED, long=[n for n in ISOLATED if n != "exit for NaN"]))
def test_the_same_in_processes_that_may_end(name, ends):
    good, bad = ends
    assert good[name] == 40
    assert bad[name] == 41 or DEFECTS[name].breaks
    assert bad[name] != 40


def test_there_are_enough_of_each_cause_in_each_half():
    halves = collections.Counter(d.half for d in DEFECTS.values())
    assert len(DEFECTS) >= 300
    assert halves.pop("later") >= 60
    assert min(halves.values()) >= 0.4 * sum(halves.values())
    for cause in CAUSES:
        assert {d.half for d in DEFECTS.values() if d.cause == cause} >= {"seen", "held_out"}
        assert sum(d.cause == cause for d in DEFECTS.values()) >= 6
    assert sum("compiler" in d.needs or "triton" in d.needs for d in DEFECTS.values()) <= 35


def test_each_op_is_declared_in_a_namespace_of_its_own():
    defect = DEFECTS["relu that swallows NaN"]
    assert (
        len({defect.make_bad().spec.namespace, defect.make_good().spec.namespace, defect.make_bad().spec.namespace})
        == 3
    )


def outcome(name, bad, good):
    return Outcome(name, "size", bad, good)


def test_a_defect_counts_as_caught_where_a_check_fails_that_passes_on_the_twin():
    judged = {"failed": [], "seconds": 1.0, "status": "done"}
    numerics = {**judged, "failed": ["numerics"]}
    lost = {**judged, "status": "timeout"}
    assert outcome("a", numerics, judged).verdict == "caught"
    assert outcome("b", judged, judged).verdict == "missed"
    assert outcome("c", numerics, numerics).verdict == "missed"
    assert outcome("d", lost, judged).verdict == "lost"
    assert outcome("e", numerics, lost).alarm == "timeout"
    assert outcome("f", judged, numerics).alarm == "numerics"
    outcomes = [outcome("a", numerics, judged), outcome("d", lost, numerics)]
    assert count(outcomes) == {"size": {"caught": 1, "missed": 0, "lost": 1, "alarms": 1}}
    assert "1 of 2 caught" in report(outcomes)


@pytest.mark.long
def test_the_score_of_one_defect(tmp_path):
    file = tmp_path / "score.json"
    command = [
        "-m",
        "shiplap_testing.defects.score",
        "--only",
        "relu that swallows NaN",
        "--budget",
        "5",
        "--json",
        file,
    ]
    done = python("-W", "ignore", *command)
    assert done.returncode == 0, done.stderr
    (outcome,) = json.loads(file.read_text())["outcomes"]
    assert outcome["name"] == "relu that swallows NaN"
    assert outcome["bad"]["status"] == outcome["good"]["status"] == "done"
    assert outcome["good"]["failed"] == []
