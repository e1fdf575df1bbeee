"""Whatever ends the program that uses a sandbox, at whatever moment, all that a candidate has started ends as well."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from shiplap.sampling.compare import Difference
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.candidate import ExpectedEffects, TargetProcess
from shiplap.sandbox.forked_launcher import ForkedLauncher
from shiplap.sandbox.protocol import LoadTarget
from shiplap.sandbox.supervisor import Bounds
from tests.sandbox.supervised import what_is_left

STARTS_S = 60.0
CHAIN = """
import os, time
def begin():
    if os.fork():
        while not os.path.exists("begun"):  # it stands when this process answers
            time.sleep(0.001)
        return
    open("begun", "w").close()
    while True:  # each process of the chain ends before a list of processes is read to its end
        time.sleep(0.0005)
        if os.fork():
            os._exit(0)
"""
# The source of a candidate behind ``CHAIN``, by the moment at which the program ends.
MOMENTS = {
    "while it is loaded": "begin()\ntime.sleep(60)\n",
    "while it stands": "begin()\ndef candidate(x):\n    return x\n",
    "while it is called": "def candidate(x):\n    begin()\n    time.sleep(60)\n",
}


def start_candidate(launcher: ForkedLauncher, source: Path) -> TargetProcess:
    """Return the process of the candidate of a file, which is not loaded yet."""
    return TargetProcess(launcher.start([str(source.parent)], Bounds(seconds=STARTS_S)))


def load(target: TargetProcess, source: Path) -> None:
    target.load(LoadTarget(str(source), ["candidate"], "function", [], 1), ArgumentArena())


def use_sandbox(source: Path, told: int, *, forks: bool) -> NoReturn:
    """Load and call a candidate in this forked process. Write the folder and the ids of the processes to ``told``, and
    one more line when the candidate stands.
    """
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        launcher = ForkedLauncher()
        target = start_candidate(launcher, source)
        if forks and os.fork() == 0:  # it has the connection to the launcher, too
            signal.pause()
        os.write(told, f"{launcher.folder} {target.prisoner.pid}\n".encode())
        load(target, source)
        os.write(told, b"stands\n")
        if "60" not in source.read_text():
            signal.pause()
        target.call([torch.ones(4)], ExpectedEffects([torch.empty(4)], lambda got: Difference()))
    finally:
        os._exit(1)


def wait_for_chain(folder: str) -> None:
    ends = time.monotonic() + STARTS_S
    while not list(Path(folder).glob("*/begun")):
        assert time.monotonic() < ends, "the candidate does not run"
        time.sleep(0.005)


ENDS: dict[str, Callable[[int], None]] = {
    "SIGTERM for its group": lambda pid: os.killpg(pid, signal.SIGTERM),
    "SIGKILL for its group": lambda pid: os.killpg(pid, signal.SIGKILL),
    "SIGKILL, with a fork that goes on": lambda pid: os.kill(pid, signal.SIGKILL),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("end", ENDS)
def test_a_chain_of_forks_ends_with_the_program(end: str, moment: str, tmp_path: Path) -> None:
    source = tmp_path / "it.py"
    source.write_text(CHAIN + MOMENTS[moment])
    reading, writing = os.pipe()
    program = os.fork()
    if program == 0:
        use_sandbox(source, writing, forks="fork" in end)
    os.close(writing)
    groups = [program]
    try:
        with os.fdopen(reading) as pipe:
            folder, candidate = pipe.readline().split()
            groups.append(int(candidate))
            wait_for_chain(folder)
            assert moment != "while it stands" or pipe.readline() == "stands\n"
            ENDS[end](program)
        assert what_is_left(int(candidate), folder) == ""
    finally:
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        os.waitpid(program, 0)


@pytest.mark.parametrize("moment", ["while it stands", "while it is called"])
def test_a_chain_of_forks_ends_with_a_launcher_that_is_killed(moment: str, tmp_path: Path) -> None:
    source = tmp_path / "it.py"
    source.write_text(CHAIN + MOMENTS[moment].replace("60", "0.1"))
    with ForkedLauncher() as launcher:
        target = start_candidate(launcher, source)
        load(target, source)
        folder = launcher.folder
        if moment == "while it is called":
            with contextlib.suppress(Exception):
                target.call([torch.ones(4)], ExpectedEffects([torch.empty(4)], lambda got: Difference()))
        wait_for_chain(folder)
        os.kill(launcher.pid, signal.SIGKILL)
    try:
        assert what_is_left(target.prisoner.pid, folder) == ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(target.prisoner.pid, signal.SIGKILL)
