"""The files of processes that are not trusted: what they print into, and the removal of all that they wrote."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time

PATIENCE_S = 2.0


def nameless(folder: str) -> int:
    """A new file for what a process prints. It has no name, so that nobody can put another file in its place."""
    handle, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_APPEND)
    return handle


def remove(folder: str, seconds: float = PATIENCE_S) -> None:
    """Remove ``folder``. What takes longer than ``seconds``, such as a million files, is done after this returns.

    ``rm`` descends as deep as folders go, and follows no links.
    """
    pid = os.spawnvp(os.P_NOWAIT, "rm", ["rm", "-rf", "--", folder])
    ends = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < ends:
        time.sleep(0.005)
