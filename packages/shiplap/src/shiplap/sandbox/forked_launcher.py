"""A launcher that is a fork of this program, for code that no other process can import.

An op that a function or a notebook declares exists in the memory of the program alone. The fork holds all that the
program held when it began, and nothing of what is drawn later. Its own forks are locked in like any others. Variables
of the environment that may hold a secret are removed; other memory of the program can be read there, and cannot leave.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time

from shiplap.sandbox.protocol import ImportModule
from shiplap.sandbox.supervisor import (
    LAUNCHER_VARIABLES,
    SECRET_VARIABLE,
    ProcessEnded,
    SandboxLauncher,
)

START_S = 20.0  # seconds in which the fork replies; a lock that another thread held may keep it from that
FIRST_FREE_FILE = 3


class _ForkedProcess:
    """The part of ``subprocess.Popen`` that a launcher uses, for a fork."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None if the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait until the process has ended, and return its exit status."""
        return self._wait(0)

    def _wait(self, how: int) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, how)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        """End the process."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkedLauncher(SandboxLauncher):
    """A launcher that starts as a fork of this program."""

    def _start(self) -> socket.socket:
        """Fork the program and return the connection. Raises ProcessEnded if the fork does not reply."""
        if self._over:
            raise ProcessEnded("the time is over")
        self.folder = tempfile.mkdtemp(prefix="shiplap-judge-")
        ours, theirs = socket.socketpair()
        # A pool of OpenMP belongs to the thread that has made it, and does not survive a fork of that thread.
        thread = threading.Thread(target=self._fork, args=(theirs,))
        thread.start()
        thread.join()
        theirs.close()
        self._connection = ours
        self.ask(ImportModule(), until=time.monotonic() + START_S)
        return ours

    def _fork(self, connection: socket.socket) -> None:
        """Fork in this thread. The fork serves requests and never returns."""
        pid = os.fork()
        if pid:
            self._process = _ForkedProcess(pid)
            return
        try:
            _serve_alone(connection.detach())
        finally:
            os._exit(0)


def _serve_alone(handle: int) -> None:
    """Serve requests without the files and the secrets of the program."""
    from shiplap.sandbox.launcher import serve_forks

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in [name for name in os.environ if SECRET_VARIABLE.search(name)]:
        del os.environ[name]
    os.environ.update(LAUNCHER_VARIABLES)
    os.dup2(handle, FIRST_FREE_FILE)
    os.closerange(FIRST_FREE_FILE + 1, 1 << 16)
    sys.setprofile(None)
    sys.settrace(None)
    serve_forks(FIRST_FREE_FILE)
