"""A budget is a promise: it ends what a sampler, a kernel or a worker would go on with, and keeps what is done."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from queue import Empty, SimpleQueue

import pytest
import torch
from typer.testing import CliRunner

from shiplap.cli.app import app
from shiplap.tuning import ChoiceStore, engine
from shiplap.tuning.engine import Deadline, OutOfTime, make_requests, tune_all
from shiplap.tuning.selector import SelectionOptions
from tests.tuning import slow_ops

LATE = 120.0  # seconds: what hangs here would hang on


@pytest.fixture(autouse=True)
def slow():
    slow_ops.entered.clear()
    slow_ops.awake.clear()
    yield
    slow_ops.awake.set()
    for thread in [t for t in threading.enumerate() if t.name == "shiplap tune"]:
        thread.join(LATE)
        assert not thread.is_alive(), "what nobody waits for ends by itself"


def tuned(ops, budget, **options):
    requests = [r for op in ops for r in make_requests(op, [{"n": 64}], "cpu")]
    started = time.monotonic()
    choices = tune_all(requests, budget, options=SelectionOptions(), progress=False, **options)
    return choices, time.monotonic() - started


def stored():
    return [entry.key["op"] for entry in ChoiceStore().entries()]


class Results(SimpleQueue):
    """The queue of a result that nobody awaits any more once an op hangs: the budget is spent by then, however much of
    it a busy machine has needed for the first op."""

    def get(self, block=True, timeout=None):
        if timeout is None:
            return super().get()
        ends = time.monotonic() + timeout
        while not slow_ops.entered and time.monotonic() < ends:
            with contextlib.suppress(Empty):
                return super().get(timeout=0.05)
        raise Empty


@pytest.mark.parametrize(("op", "where"), [(slow_ops.sampled, "sampler"), (slow_ops.stuck, "kernel")])
def test_what_hangs_costs_no_more_than_the_budget(op, where, monkeypatch):
    monkeypatch.setattr(engine, "SimpleQueue", Results)
    monkeypatch.setattr(engine, "monotonic", lambda: time.monotonic() + 1e3 * bool(slow_ops.entered))
    (first, second, third), took = tuned([slow_ops.quick, op, slow_ops.last], 600.0, isolate=False)
    assert took < LATE
    assert [c.origin for c in (first, second, third)] == ["measured", "left out", "left out"]
    assert slow_ops.entered == [where]
    assert (second.op, str(second.bucket), second.dtypes) == (op.spec.name, "n<=64", "Float=float32")
    assert (second.label, second.reason) == ("", "the budget was spent")
    assert stored() == ["tune_slow::quick"], "what was done is stored, and nothing else"


def test_what_nobody_waits_for_stores_nothing():
    _, _ = tuned([slow_ops.stuck], 0.3, isolate=False)
    slow_ops.awake.set()
    for thread in [t for t in threading.enumerate() if t.name == "shiplap tune"]:
        thread.join(LATE)
    assert stored() == []
    (repeated,), _ = tuned([slow_ops.stuck], 600.0, isolate=False)
    assert repeated.origin == "measured"


def test_a_worker_that_is_busy_or_starting_is_ended():
    choices, took = tuned([slow_ops.stuck, slow_ops.quick], 1.0)
    assert took < 1.0 + LATE
    assert [c.origin for c in choices] == ["left out", "left out"]


def test_the_command_says_what_it_left_out(monkeypatch):
    arguments = ["tune", "tests.tuning.slow_ops:sampled", "--sizes", "n=64", "--in-process", "--budget", "0.3s"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 3
    answer = json.loads(result.stdout)
    assert answer["left_out"] == 1
    assert [c["origin"] for c in answer["choices"]] == ["left out"]
    assert result.stderr == (
        "1 of 1 calls are left out: the budget of 0.3s was spent. The same command goes on with them.\n"
    )
    result = CliRunner().invoke(app, arguments)
    assert result.stdout.splitlines()[1].endswith("  left out  no choice: the budget was spent (left out)")


def test_a_deadline_passes_on_results_and_errors():
    with Deadline(30.0) as deadline:
        assert deadline.run(threading.get_ident) == deadline.run(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            deadline.run(lambda: 1 // 0)
        deadline.check()
    with Deadline(0.0) as deadline, pytest.raises(OutOfTime):
        deadline.run(lambda: 7)
    with pytest.raises(OutOfTime):
        deadline.check()


def test_a_budget_that_ends_between_two_looks_at_the_clock_is_spent(monkeypatch):
    """The second look gave the queue a negative timeout, and its ValueError left the work running."""
    ended, may_end = [], threading.Event()
    with Deadline(0.0, lambda: ended.append(True)) as deadline:
        left = iter([0.5, -0.5])
        monkeypatch.setattr(Deadline, "seconds_left", property(lambda self: next(left)))
        with pytest.raises(OutOfTime):
            deadline.run(may_end.wait)
        assert (deadline.over, ended) == (True, [True])
        may_end.set()


def test_work_has_the_number_of_threads_of_its_caller():
    kept = torch.get_num_threads()
    other = threading.Thread(target=torch.set_num_threads, args=(kept + 1,))  # for threads that start later
    other.start()
    other.join()
    try:
        assert torch.get_num_threads() == kept
        with Deadline(60.0) as deadline:
            assert deadline.run(torch.get_num_threads) == kept, "a choice is stored under this number"
    finally:
        torch.set_num_threads(kept)  # of threads that later tests start, too


ABANDONED = """
import time
import torch
from shiplap.tuning.engine import Deadline, OutOfTime

def work():
    ends = time.monotonic() + 1.5
    while time.monotonic() < ends:
        torch.rand(1 << 20).sort()

with Deadline(0.2) as deadline:
    try:
        deadline.run(work)
    except OutOfTime:
        print("left out")
"""


@pytest.mark.long
def test_a_program_ends_well_while_abandoned_work_is_inside_of_torch():
    for _ in range(3):
        done = subprocess.run([sys.executable, "-P", "-c", ABANDONED], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "left out\n"), done.stderr
