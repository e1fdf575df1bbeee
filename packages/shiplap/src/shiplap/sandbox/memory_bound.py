"""A bound of the memory of this process, so that a request for too much memory fails and Linux ends no process."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Threads of the process share one bound: how many of them use it, and the limits without it.
_LOCK = threading.Lock()
_users = 0
_before = (0, 0)


def enter(available: Callable[[], int]) -> None:
    """Bound the memory of this process by what it holds and ``available()`` further bytes, unless it is bounded. Do
    nothing where Linux does not say how much memory the process has. ``leave`` must be called for each call.
    """
    global _users, _before
    with _LOCK:
        _users += 1
        with suppress(OSError, ValueError, LookupError):
            if _users == 1:
                soft, hard = _before = resource.getrlimit(resource.RLIMIT_DATA)
                own = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) << 10
                kept = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
                resource.setrlimit(resource.RLIMIT_DATA, (min([own + available(), *kept]), hard))


def leave() -> None:
    """Remove the bound if nobody else uses it."""
    global _users
    with _LOCK:
        _users -= 1
        if not _users:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_DATA, _before)


def lift(pid: int) -> None:
    """Set the limit of the child process ``pid`` to that which this process has without the bound. A child inherits
    the bound if it is started meanwhile.
    """
    with _LOCK, suppress(OSError, ValueError):
        own = _before if _users else resource.getrlimit(resource.RLIMIT_DATA)
        resource.prlimit(pid, resource.RLIMIT_DATA, own)
