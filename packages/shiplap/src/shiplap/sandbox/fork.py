"""A fork of this process, one at a time."""

from __future__ import annotations

import os
import threading

_LOCKS: dict[int, threading.Lock] = {}
"""The lock of each process, by its id. A process that something else forks meanwhile has a locked copy of another's."""


def fork_process() -> int:
    """Fork this process. Return the id of the new process in this one, and 0 in the new one. Raise ``OSError`` if the
    machine starts no process.

    No two threads of this process fork at the same time. Hooks of libraries run in a fork, and that of filelock, which
    torch's compiler uses, refuses a fork while another thread forks (version 4.3 with Python 3.12).
    """
    with _LOCKS.setdefault(os.getpid(), threading.Lock()):  # released in the new process as well
        return os.fork()
