"""A fork of this process, one at a time."""

from __future__ import annotations

import os
import threading

_FORKING = threading.Lock()


def fork_process() -> int:
    """Fork this process. Return the id of the new process in this one, and 0 in the new one. Raise ``OSError`` if the
    machine starts no process.

    No two threads of this process fork at the same time. Hooks of libraries run in a fork, and that of filelock, which
    torch's compiler uses, refuses a fork while another thread forks (version 4.3 with Python 3.12).
    """
    with _FORKING:  # the new process has a copy of the lock, which this thread releases there as well
        return os.fork()
