"""A child that dies says how, and loses nothing of what it had said."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import subprocess
import threading
import time

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.audit import child_process
from shiplap.audit.child_process import ChildDeath, ChildLimits, can_isolate, run_isolated, stream_events
from shiplap.sandbox.fork import fork_process
from shiplap.sandbox.proc_filesystem import has_ended, stat_fields
from shiplap_testing.crashes import read_unmapped
from shiplap_testing.forked import python

# A library refuses a fork that begins while its hook runs for a fork of another thread.
FORKS = """
import os, threading, time
from concurrent.futures import ThreadPoolExecutor
from shiplap.audit.child_process import run_isolated
forking = []
def begin():
    forking.append(threading.get_ident())
    time.sleep(0.1)
    assert len(forking) == 1, "two threads fork at once"
os.register_at_fork(before=begin, after_in_parent=forking.pop)
with ThreadPoolExecutor(3) as pool:
    print(list(pool.map(lambda n: run_isolated(lambda send: n), range(3))))
"""
QUICK = ChildLimits(busy_s=1.0, idle_s=1.0, memory=256 << 20)


def crash():
    read_unmapped()


def wait():
    threading.Lock().acquire()
    threading.Event().wait()


def compute():
    while True:
        pass


def fill():
    kept = []
    while True:
        kept.append(torch.ones(1 << 22))


def raise_exit():
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (crash, "crashed with SIGSEGV"),
        (os.abort, "crashed with SIGABRT"),
        (wait, "deadlock: nothing has run for 1 s"),
        (compute, "hangs: 1 s of processor time and no end"),
        (fill, "memory exhausted: more than 0.25 GiB resident"),
        (lambda: os._exit(0), "the process exited with status 0"),
        (raise_exit, "raised SystemExit: 3"),
    ],
)
def test_a_death_is_told_and_what_was_said_before_is_kept(end, how):
    def work(send):
        send({"kind": "note", "text": "before"})
        end()

    *before, death = stream_events(work, QUICK)
    assert [e["text"] for e in before] == ["before"]
    assert isinstance(death, ChildDeath)
    assert death.how == how


def test_what_it_wrote_to_stderr_last_is_told():
    def work(send):
        os.write(2, b"free(): invalid pointer\n")
        os.abort()

    (death,) = stream_events(work, QUICK)
    assert str(death) == "crashed with SIGABRT (free(): invalid pointer)"


def test_a_child_computes_on_all_threads_although_its_parent_did():
    x = torch.randn(1 << 20)
    expected = float(x.sin().sum())  # the parent's OpenMP threads exist, and the child has none of them

    def work(send):
        send({"kind": "note", "value": float(x.sin().sum())})

    (messages,) = stream_events(work, QUICK)
    assert messages["value"] == pytest.approx(expected)


def test_an_event_may_ask_for_a_longer_silence():
    """A compiler waits for a lock while another process compiles the same."""

    def work(send):
        send({"kind": "case", "quiet": 30.0})
        time.sleep(3)
        send({"kind": "note"})
        time.sleep(3)

    *events, last = stream_events(work, ChildLimits(busy_s=30, idle_s=1.0))
    assert [e["kind"] for e in events] == ["case", "note"]
    assert isinstance(last, ChildDeath)
    assert "deadlock" in str(last)


def test_a_machine_that_stands_still_is_no_deadlock(monkeypatch):
    """The clock goes on, while neither the child nor its watcher runs."""
    clock, began = time.monotonic, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: clock() + (100.0 if clock() > began + 0.5 else 0.0))

    def work(send):
        time.sleep(1.5)
        send({"kind": "note"})

    assert list(stream_events(work, ChildLimits(busy_s=30, idle_s=10.0))) == [{"kind": "note"}]


def test_waiting_for_a_program_of_its_own_is_no_deadlock():
    def work(send):
        subprocess.run(["sh", "-c", "i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done"], check=True)
        send({"kind": "note"})

    assert list(stream_events(work, ChildLimits(busy_s=30, idle_s=0.5))) == [{"kind": "note"}]


def test_an_event_may_ask_for_patience():
    def work(send):
        send({"kind": "note", "patience": 20})
        end = time.process_time() + 1.5
        while time.process_time() < end:
            pass

    assert not [e for e in stream_events(work, QUICK) if isinstance(e, ChildDeath)]


def test_a_reader_that_stops_ends_the_child():
    def work(send):
        send({"kind": "note", "pid": os.getpid()})
        compute()

    events = stream_events(work, ChildLimits())
    pid = next(events)["pid"]
    events.close()
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize(("built_for", "raises"), [("13.0", True), ("13.0", False), (None, True)])
def test_a_fork_in_which_autograd_raises_is_not_used(built_for, raises, monkeypatch, working_forks):
    """A torch for CUDA raises in forks of a process that has differentiated a compiled function; no other does."""
    parent = os.getpid()
    backward = torch.Tensor.backward

    def raising(tensor):
        if raises and os.getpid() != parent:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")
        backward(tensor)

    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.Tensor, "backward", raising)
    assert can_isolate() is not (built_for is not None and raises)


def test_a_fork_that_autograd_ends_prints_nothing(monkeypatch, capfd):
    parent = os.getpid()

    def aborting(tensor):
        assert os.getpid() != parent
        os.write(2, b"terminate called after throwing an instance of 'c10::Error'")
        os.abort()

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.Tensor, "backward", aborting)
    assert not can_isolate()
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("fresh_compiler")
def test_an_audit_after_a_compiled_function_was_differentiated(ns):
    @sl.op(f"{ns}::square")
    def square(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * x

    @square.backward
    def _(grad, saved, needs):
        return {"x": 2 * grad * saved.x}

    torch.compile(lambda x: square(x).sum(), backend="aot_eager")(torch.ones(3, requires_grad=True)).backward()
    assert [finding.verdict for finding in sl.audit(square, checks=["gradient"])] == ["ok"]


class EndsFork:
    """Ends a forked process that collects it. In a program, it may wait for a thread that does not exist there."""

    def __init__(self) -> None:
        self.program, self.circle = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.program:
            os._exit(9)


def test_a_child_collects_no_garbage_of_the_program():
    EndsFork()
    try:
        assert run_isolated(lambda _send: gc.collect() >= 0) is True
    finally:
        gc.collect()  # a fork of a later test would end


def test_a_crash_is_told_if_another_process_holds_its_pipe(monkeypatch):
    """As a process does that another thread forks between the making of the pipe and the closing of its end."""
    pipe, held = os.pipe, list[int]()

    def pipe_that_is_held():
        reading, writing = pipe()
        held.append(os.dup(writing))
        return reading, writing

    def work(send):
        send({"kind": "note"})
        os.abort()

    monkeypatch.setattr(os, "pipe", pipe_that_is_held)
    *events, last = stream_events(work, QUICK)
    assert [e["kind"] for e in events] == ["note"]
    assert isinstance(last, ChildDeath)
    assert "crashed with SIGABRT" in str(last)
    for end in held:
        os.close(end)


@pytest.mark.parametrize(("state", "told"), [("R", ""), ("S", "deadlock: nothing has run for 1 s")])
def test_waiting_for_a_processor_is_no_deadlock(monkeypatch, state, told):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for name in ("_processor_seconds", "_session_seconds"):
        monkeypatch.setattr(child_process, name, lambda pid: 0.0)
    monkeypatch.setattr(child_process, "thread_states", lambda pid: {state})
    watch = child_process._ChildWatch(os.getpid(), -1, ChildLimits(busy_s=30, idle_s=1.0), io.BytesIO())
    found = []
    for _ in range(8):
        now[0] += 0.3
        found.append(watch._exceeded_limit())
    assert max(found) == told


def test_threads_fork_one_after_the_other():
    done = python("-c", FORKS)
    assert (done.stdout, done.returncode) == ("[0, 1, 2]\n", 0), done.stderr
    assert "two threads" not in done.stderr


def test_a_child_without_an_end_ends_with_the_process_that_started_it():
    reading, writing = os.pipe()

    def wait_for_ever(send):
        os.write(writing, b"%d" % os.getpid())
        time.sleep(60)

    parent = fork_process()
    if parent == 0:
        try:
            run_isolated(wait_for_ever, ChildLimits(idle_s=60))
        finally:
            os._exit(1)
    child = int(os.read(reading, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        latest = time.monotonic() + 10
        while (stat := stat_fields(child)) and not has_ended(stat) and time.monotonic() < latest:
            time.sleep(0.01)
        assert not stat or has_ended(stat)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.close(writing)
