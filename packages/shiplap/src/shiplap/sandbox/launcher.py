"""The program of the launcher process, which forks the processes for code that is not trusted.

The launcher imports torch and modules of Shiplap, and nothing of the user. A fork of it therefore starts in
milliseconds, and holds no result, no seed and no state of another candidate. It serves requests until the connection
ends, or until its time to rest is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import signal
import socket
import sys
import time
from typing import Any

from shiplap.sandbox import child as inside
from shiplap.sandbox.protocol import BrokenMessage, receive_message, send_message

PR_SET_CHILD_SUBREAPER = 36
END_CHILDREN_S = 1.0  # seconds until killed processes must be gone


def main() -> None:
    """Serve requests until the connection ends."""
    inside.take_baseline()
    gc.freeze()
    gc.enable()  # ``START`` switches it off for the import of torch
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Processes whose parent has ended become children of this one, where the supervisor finds them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    while True:
        try:
            asked, handles = receive_message(connection, 2)
        except (BrokenMessage, OSError):  # the connection has ended, or the time to rest is over
            return
        connection.settimeout(None)
        if asked["do"] == "wait":
            send_message(connection, {"status": _wait_for_status(asked["pid"])})
        elif asked["do"] == "rest":
            os.chdir("/")  # the folder in which it started will be removed
            send_message(connection, {"alone": _all_children_gone()})
            connection.settimeout(asked["seconds"])
        elif asked["do"] == "wake":
            send_message(connection, {})
        elif asked["do"] == "import":  # modules of Shiplap only: one import here saves one in each fork
            importlib.import_module(asked["module"])
            send_message(connection, {})
        else:
            gc.freeze()  # existing objects are not collected in the forks, so their pages stay shared
            child = os.fork()
            if child == 0:
                _run_forked_child(asked, handles, connection)
            for handle in handles:
                os.close(handle)
            send_message(connection, {"pid": child})


def _wait_for_status(pid: int) -> int:
    """Wait for a process, and return its status, or 0 if it is no child of this one."""
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0


def _all_children_gone() -> bool:
    """Return whether all processes that this one started are gone. They were killed or have ended before."""
    ends = time.monotonic() + END_CHILDREN_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < ends:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        return False
    return True


def _run_forked_child(asked: dict[str, Any], handles: list[int], connection: socket.socket) -> None:
    """Turn this forked child into the process for code that is not trusted. Never returns.

    ``handles`` are the connection of the child and the file that it prints into.
    """
    try:
        # A session and a group of its own, which the supervisor stops and ends as one.
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in any program of Python
        connection.detach()
        nothing = os.open(os.devnull, os.O_RDONLY)
        # Above the numbers that are assigned next.
        handle, output = (os.dup(fcntl.fcntl(h, fcntl.F_DUPFD, 16)) for h in handles)
        for number, target in ((0, nothing), (1, output), (2, output), (3, handle)):
            if target != number:
                os.dup2(target, number, number < 3)
        # No file of the launcher may be reached from here.
        os.closerange(4, 1 << 16)
        inside.serve_requests(socket.socket(fileno=3), asked)
    except BaseException as e:
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{type(e).__name__}: {e}\n")
            sys.stderr.flush()
    finally:
        os._exit(1)
