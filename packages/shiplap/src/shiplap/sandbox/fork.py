"""A fork of this process, one at a time."""

from __future__ import annotations

import os
import threading

_LOCKS: dict[int, threading.Lock] = {}  # by the id of the process that forks


def fork_process() -> int:
    """Fork this process. Return the id of the new process in this one, and 0 in the new one. Raise ``OSError`` if the
    machine starts no process.

    No two threads of this process fork at the same time. Hooks of libraries run in a fork, and that of filelock, which
    torch's compiler uses, refuses a fork while another thread forks (version 4.3 with Python 3.12).
    """
    # A process that other code forks meanwhile has a copy of a lock that nobody releases there.
    with _LOCKS.setdefault(os.getpid(), threading.Lock()):
        return os.fork()
