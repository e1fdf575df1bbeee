"""What ``Launcher`` starts: forks the processes in which code that is not trusted runs.

This process imports torch and modules of ours, and nothing of the user's. A fork of it therefore starts in
milliseconds, and holds no result, no seed and no other candidate's state. It serves requests until the connection ends,
or until nobody asks it anything for as long as it was told to rest.
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
from shiplap.sandbox.protocol import Broken, receive, send

PR_SET_CHILD_SUBREAPER = 36
LAST_S = 1.0  # seconds in which processes that were killed have to be gone


def main() -> None:
    """Serve requests until the referee is gone."""
    inside.get_ready()
    gc.freeze()
    gc.enable()  # whoever starts this process switches it off while torch is imported
    connection = socket.socket(fileno=int(sys.argv[1]))
    # What a process leaves behind when it ends becomes a child of this one, where the referee finds it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    while True:
        try:
            asked, handles = receive(connection, 2)
        except (Broken, OSError):  # its end, or the end of a rest
            return
        connection.settimeout(None)
        if asked["do"] == "wait":
            send(connection, {"status": _status(asked["pid"])})
        elif asked["do"] == "rest":
            os.chdir("/")  # the folder in which it started will be removed
            send(connection, {"alone": _alone()})
            connection.settimeout(asked["seconds"])
        elif asked["do"] == "wake":
            send(connection, {})
        elif asked["do"] == "import":  # modules of ours only: what one fork would import, each would
            importlib.import_module(asked["module"])
            send(connection, {})
        else:
            gc.freeze()  # what is here already need not be looked through in each process, nor copied for that
            child = os.fork()
            if child == 0:
                _become(asked, handles, connection)
            for handle in handles:
                os.close(handle)
            send(connection, {"pid": child})


def _status(pid: int) -> int:
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0


def _alone() -> bool:
    """Whether all that it started is gone. It has been killed, or has ended by itself, before this is asked."""
    ends = time.monotonic() + LAST_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < ends:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        return False
    return True


def _become(asked: dict[str, Any], handles: list[int], connection: socket.socket) -> None:
    """The child: never returns. ``handles``: its connection, and the file that it prints into."""
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in any program of Python
        connection.detach()
        nothing = os.open(os.devnull, os.O_RDONLY)
        handle, output = (os.dup(fcntl.fcntl(h, fcntl.F_DUPFD, 16)) for h in handles)  # numbers that stay free
        for number, target in ((0, nothing), (1, output), (2, output), (3, handle)):
            if target != number:
                os.dup2(target, number, number < 3)
        os.closerange(4, 1 << 16)
        inside.serve(socket.socket(fileno=3), asked)
    except BaseException as e:
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{type(e).__name__}: {e}\n")
            sys.stderr.flush()
    finally:
        os._exit(1)
