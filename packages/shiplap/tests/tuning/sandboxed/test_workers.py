"""The processes of a tuning: side by side while nothing is timed, and of a launcher that may stay for the next."""

import threading
import time
from types import SimpleNamespace

import pytest

import shiplap as sl
from shiplap.dispatch.tuned_choices import REFERENCE
from shiplap.sandbox.candidate import TargetProcess
from shiplap.sandbox.launcher_pool import standby
from shiplap.sandbox.proc_filesystem import list_descendants, stat_fields
from shiplap.sandbox.protocol import MESSAGE_HEAD, AwaitExit, parse_message
from shiplap.sandbox.request_errors import ProcessEnded
from shiplap.sandbox.supervisor import SandboxLauncher
from shiplap.tuning import WorkerProcess, worker_process
from shiplap.tuning.sandboxed import workers
from shiplap.tuning.sandboxed.workers import KernelProcesses, OpenTask, ProcessUnavailable
from tests.tuning import ops

OPENING = OpenTask("an::op", "it", [], "", [], "", "cpu", "", "auto", 1, [])


# --- the launcher that stays ------------------------------------------------------------------------------------------


def tuned(op, **sizes):
    (choice,) = sl.tune(op, [sizes], budget=600, compiled=False)
    return choice


def test_the_next_tuning_has_the_launcher_of_the_last_and_none_of_its_processes():
    standby.end()
    assert not [f for f in tuned(ops.turn, n=64).findings if f.verdict == "fail"]
    launcher = standby.pid
    assert stat_fields(launcher)
    assert not list_descendants(launcher)
    tuned(ops.turn, n=3000)
    assert standby.pid == launcher
    assert not list_descendants(launcher)
    refused = [f for f in tuned(ops.mm, m=16, k=100, n=16).findings if f.verdict == "fail"]
    assert refused, "kernels that end their loop early"
    assert standby.pid == -1, "who was refused may have tried other things as well"
    assert not stat_fields(launcher)


class _Kept:
    """In the place of what keeps a launcher."""

    def __init__(self):
        self.closed = self.left = 0
        self.launcher = SimpleNamespace(close=self.close, finish=self.close)

    def take(self):
        return self.launcher

    def leave(self, launcher):
        self.left += 1

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("what", ["nothing", "a worker ran", "something was refused", "it raises", "no time is left"])
def test_a_launcher_stays_after_a_tuning_without_doubts(what, monkeypatch):
    kept = _Kept()
    monkeypatch.setattr(worker_process, "standby", kept)
    try:
        with WorkerProcess() as isolation:
            isolation.started += what == "a worker ran"
            isolation.hosts.doubted |= what == "something was refused"
            if what == "it raises":
                raise KeyboardInterrupt
            if what == "no time is left":
                isolation.close()
    except KeyboardInterrupt:
        pass
    assert kept.left == (what == "nothing")
    assert bool(kept.closed) == (what != "nothing")


# --- side by side -----------------------------------------------------------------------------------------------------


class _Prisoner:
    def __init__(self, kernel):
        self.kernel, self.killed = kernel, False

    def kill(self):
        self.killed = True


@pytest.fixture
def prepared(monkeypatch):
    """Hosts whose processes do what ``loads`` says, and the names of those that were started."""
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: {0, 1})
    launcher = SandboxLauncher()
    started = []

    def start(*_, **__):
        started.append(_Prisoner(len(started)))
        return started[-1]

    monkeypatch.setattr(launcher, "start", start)
    monkeypatch.setattr(launcher, "ask", lambda *_: {})
    made = KernelProcesses(launcher, 1.0)
    made.open(OPENING, [])
    return made, started


def test_as_many_load_at_once_as_there_are_processors(prepared, monkeypatch):
    made, started = prepared
    together = threading.Barrier(2, timeout=120)
    monkeypatch.setattr(TargetProcess, "request", lambda *_: together.wait())
    made.prepare({REFERENCE: 10.0, "one": 1.0, "other": 1.0})
    assert len(started) == 2
    monkeypatch.setattr(TargetProcess, "request", lambda *_: None)
    made.process_for("other")
    assert len(started) == 3
    made.process_for("one")
    assert len(started) == 3


def test_what_fails_is_told_to_who_asks_for_it_and_tried_once_more_after_that(prepared, monkeypatch):
    made, started = prepared

    def request(self, *_):
        if self.prisoner.kernel == 1:
            raise ProcessEnded("it ended")

    monkeypatch.setattr(TargetProcess, "request", request)
    made.prepare({REFERENCE: 10.0, "one": 1.0})
    assert made.process_for(REFERENCE, 10.0).prisoner is started[0]
    assert made.doubted
    assert started[1].killed
    with pytest.raises(ProcessUnavailable, match="it ended"):
        made.process_for("one")
    assert made.process_for("one").prisoner is started[2]


def test_one_question_at_a_time_reaches_a_launcher(monkeypatch):
    """Its answers have no names: two threads that fail at once would read each other's."""
    launcher, asked = SandboxLauncher(), []
    monkeypatch.setattr(launcher, "_ready", lambda: SimpleNamespace(settimeout=lambda seconds: None))

    def send(connection, data, handles):
        asked.append(parse_message(data[MESSAGE_HEAD.size :], AwaitExit).pid)
        time.sleep(0.002)

    monkeypatch.setattr("shiplap.sandbox.supervisor.send_message", send)
    monkeypatch.setattr("shiplap.sandbox.supervisor.receive_message", lambda connection, kind: (kind(asked[-1]), []))
    wrong = []

    def ask(n):
        wrong.extend(n for _ in range(20) if launcher.ask(AwaitExit(n)).value != n)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
