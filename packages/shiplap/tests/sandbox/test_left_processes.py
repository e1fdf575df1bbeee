"""Nothing of a candidate stays when its launcher ends at the moment in which its processes are listed."""

from __future__ import annotations

import os

import pytest

from shiplap.sandbox import supervisor
from shiplap.sandbox.supervisor import SandboxLauncher
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
