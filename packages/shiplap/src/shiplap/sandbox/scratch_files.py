"""Files of processes that are not trusted: a file for their output, and the removal of their folders."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time

REMOVAL_PATIENCE_S = 2.0


def open_unnamed_file(folder: str) -> int:
    """Return a new open file for the output of a process. It has no name, so it cannot be replaced by another file."""
    handle, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_APPEND)
    return handle


def remove_folder(folder: str, seconds: float = REMOVAL_PATIENCE_S) -> None:
    """Remove ``folder``. If that takes longer than ``seconds``, it ends after this function has returned.

    ``rm`` descends to any depth and follows no links.
    """
    pid = os.spawnvp(os.P_NOWAIT, "rm", ["rm", "-rf", "--", folder])
    ends = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < ends:
        time.sleep(0.005)
