"""Nothing of a candidate stays when its launcher ends while its processes are listed, started or forked."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from typing import Any

import pytest

from shiplap.sandbox import supervisor
from shiplap.sandbox.forked_launcher import START_S, ForkedLauncher
from shiplap.sandbox.proc_filesystem import list_descendants, thread_states
from shiplap.sandbox.protocol import BrokenMessage, Fork, ImportModule
from shiplap.sandbox.request_errors import ProcessEnded
from shiplap.sandbox.supervisor import Bounds, SandboxedProcess, SandboxLauncher
from shiplap_testing.launchers import ordinary_launchers
from tests.sandbox.supervised import KILLED, plain, run_candidate, what_is_left


def test_processes_whose_launcher_ended_while_they_were_listed_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed, kill, listed = set[int](), os.kill, supervisor.list_descendants

    def note(pid: int, number: int) -> None:
        killed.add(pid)
        kill(pid, number)

    monkeypatch.setattr(os, "kill", note)
    # Of a process that has just ended: its descendants have another parent.
    monkeypatch.setattr(supervisor, "list_descendants", lambda pid, **how: {} if pid in killed else listed(pid, **how))
    with SandboxLauncher() as launcher:
        text = plain(KILLED["a child without its first thread, of a launcher that is killed"])
        _, pid = run_candidate(launcher, text, kill=True)
        folder = launcher.folder
    assert what_is_left(pid, folder) == ""


MEANWHILE_S = 0.3  # in which another thread does what nothing keeps it from; on a slow machine no defect is seen, then
ENDS_S = 60.0  # until a process that ends by itself has ended


def in_thread(work: Any, *arguments: Any) -> threading.Thread:
    """A thread that has begun with ``work``, and has had some time for it."""
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join(MEANWHILE_S)
    return thread


def test_processes_may_start_while_those_of_a_dead_launcher_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LAUNCHER_PROGRAM", "pass")
    launcher, looked = SandboxLauncher(), list[int]()

    def list_while_another_starts(leader: int) -> list[int]:
        looked.append(leader)
        in_thread(launcher.prisoners.add, leader + 1).join()
        return []

    monkeypatch.setattr(supervisor, "list_session", list_while_another_starts)
    with ordinary_launchers():
        launcher.preload()
    launcher.prisoners.add(1 << 24)
    launcher.finish()
    assert 1 << 24 in looked
    assert 1 + (1 << 24) in launcher.prisoners


def test_a_launcher_that_starts_while_it_is_ended_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LAUNCHER_PROGRAM", "import signal; signal.pause()")
    launcher, start, threads = SandboxLauncher(), subprocess.Popen, list[threading.Thread]()
    started: list[Any] = []

    def end_and_start(*arguments: Any, **named: Any) -> Any:
        threads.append(in_thread(launcher.finish))
        started.append(start(*arguments, **named))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", end_and_start)
    with ordinary_launchers():
        launcher.preload()
    threads[0].join()
    try:
        assert started[0].returncode == -signal.SIGKILL
    finally:
        started[0].kill()
    with pytest.raises(ProcessEnded, match="the time is over"):
        launcher.preload()


def test_a_fork_of_the_program_that_starts_while_it_is_ended_is_ended() -> None:
    threads, made = list[threading.Thread](), list[int]()

    class Ended(ForkedLauncher):
        def _fork(self, connection: socket.socket) -> None:
            threads.append(in_thread(self.finish))
            super()._fork(connection)
            made.append(self.pid)

    launcher = Ended()
    with contextlib.suppress(ProcessEnded):
        launcher.preload()
    threads[0].join()
    try:
        assert not os.path.exists(f"/proc/{made[0]}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(made[0], signal.SIGKILL)


def test_the_first_reply_of_a_fork_of_the_program_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited = []

    def ask(self: ForkedLauncher, message: Any, handles: Any = (), until: float = 0.0) -> None:
        awaited.append((type(message), until))

    monkeypatch.setattr(ForkedLauncher, "ask", ask)
    launcher, begin = ForkedLauncher(), time.monotonic()
    try:
        launcher.preload()
    finally:
        launcher.finish()
    ((kind, until),) = awaited
    assert kind is ImportModule
    assert until >= begin + START_S


def test_a_connection_that_another_thread_closes_while_a_reply_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    process = object.__new__(SandboxedProcess)  # one that never ran: only its connection is looked at
    process.connection, process.bounds = ours, Bounds()

    def close(*_: float) -> None:
        if ours.fileno() < 0:
            raise BrokenMessage("another file has its number")
        ours.close()

    monkeypatch.setattr(process, "_keep_within", close, raising=False)
    with theirs, pytest.raises((OSError, BrokenMessage)):
        process._receive()


def test_a_fork_that_is_not_listed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    with SandboxLauncher() as launcher:
        first, found, ask = launcher.start(), list[int](), launcher.ask
        threads: list[threading.Thread] = []

        def look_when_forked(message: Any, *rest: Any) -> Any:
            reply = ask(message, *rest)
            if isinstance(message, Fork):
                threads.append(in_thread(lambda: found.extend(first.strays())))
            return reply

        monkeypatch.setattr(launcher, "ask", look_when_forked)
        second = launcher.start()
        threads[0].join()
        assert found == [], "it is no child of another process"
        first.kill()
        second.kill()
        forked = list[int]()

        def lose_the_reply(message: Any, *rest: Any) -> Any:
            forked.append(ask(message, *rest).value)
            raise ProcessEnded("the time is over")

        monkeypatch.setattr(launcher, "ask", lose_the_reply)
        with pytest.raises(ProcessEnded) as held:  # with all that its frames hold
            launcher.start()
        ends = time.monotonic() + ENDS_S
        while not thread_states(forked[0]) <= {"Z", "X"} and time.monotonic() < ends:
            time.sleep(0.01)
        assert thread_states(forked[0]) <= {"Z", "X"}, "nobody holds its connection"
        assert held.tb is not None
        monkeypatch.undo()


PR_SET_CHILD_SUBREAPER = 36


def test_ended_processes_that_a_launcher_has_adopted_end_with_it() -> None:
    """Where the first process of a container waits for none, they would stay for ever."""
    adopt = ctypes.CDLL(None).prctl
    with ordinary_launchers(), SandboxLauncher() as launcher:
        # One after the other: a candidate may have four processes that run.
        text = plain(
            "if os.fork() == 0:\n    for _ in range(9):\n        made = os.fork() or os._exit(0)\n"
            "        os.waitid(os.P_PID, made, os.WEXITED | os.WNOWAIT)\n    os._exit(0)\nos.wait()"
        )
        told, _ = run_candidate(launcher, text)
        assert told == "returned"
        adopted = list_descendants(launcher.pid, dead=True)
        assert len(adopted) >= 9
        adopt(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            launcher.close()
            assert not adopted.keys() & list_descendants(os.getpid(), dead=True).keys()
        finally:
            adopt(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
