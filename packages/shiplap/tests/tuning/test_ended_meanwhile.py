"""When a budget is spent, one thread ends all processes of a tuning while another one uses them and starts others."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from shiplap.sandbox.forked_launcher import ForkedLauncher
from shiplap.sandbox.protocol import Heartbeat
from shiplap.sandbox.request_errors import ProcessEnded
from shiplap.sandbox.supervisor import SandboxLauncher
from shiplap.tuning import worker_process
from shiplap.tuning.sandboxed.workers import FinishCompiling, KernelProcesses
from shiplap.tuning.worker_process import WorkerDied, WorkerProcess


def in_thread(work: Any, *arguments: Any) -> None:
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join()


def test_two_threads_close_the_memory_of_a_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    isolation, closed, close = WorkerProcess(), list[int](), os.close
    isolation._worker, isolation._heartbeat = SimpleNamespace(kill=lambda: None), Heartbeat()  # type: ignore[assignment]
    handle = isolation._heartbeat.handle

    def close_and_end(number: int) -> None:
        closed.append(number)
        if len(closed) == 1:
            in_thread(isolation.end_worker)
        close(number)

    monkeypatch.setattr(os, "close", close_and_end)
    isolation.end_worker()
    monkeypatch.undo()
    assert closed == [handle]
    with pytest.raises(WorkerDied, match="it was ended"):
        isolation.ask(FinishCompiling())


def test_processes_of_kernels_may_start_while_they_are_ended() -> None:
    hosts, ended = KernelProcesses(SandboxLauncher(), 1.0), list[str]()

    def process(name: str) -> Any:
        def kill() -> None:
            ended.append(name)
            in_thread(hosts._running.__setitem__, f"beside {name}", process(f"beside {name}"))

        return SimpleNamespace(prisoner=SimpleNamespace(kill=kill)), None

    hosts._running |= {"first": process("first"), "second": process("second")}
    hosts.close()
    assert ended == ["first", "second"]
    hosts._running.clear()
    with pytest.raises(ProcessEnded, match="the budget was spent"):  # of a thread that had started it
        hosts._load("first")


def test_no_fork_of_the_program_is_made_for_a_budget_that_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    isolation, made = WorkerProcess(), list[ForkedLauncher]()

    class Ended(ForkedLauncher):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            in_thread(isolation.close)

    monkeypatch.setattr(worker_process, "ForkedLauncher", Ended)
    with pytest.raises(ProcessEnded, match="the budget was spent"):
        isolation._forked_hosts()
    assert isolation._fork is None
    assert len(made) == 1


def test_a_tuning_that_was_interrupted_starts_no_further_process() -> None:
    isolation = WorkerProcess()
    with pytest.raises(KeyboardInterrupt), isolation:
        raise KeyboardInterrupt
    with pytest.raises(ProcessEnded, match="the time is over"):  # of a thread that goes on
        isolation.launcher.preload()
