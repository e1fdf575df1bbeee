"""A pool of at most one launcher that waits for the next tuning, since a new one takes a second or two to import torch.

A launcher never runs code that is not trusted: its forks do, after they are locked in. A launcher is kept only if every
fork was sealed. It is used again only if a new launcher would start with the same surroundings. It ends after a minute
without use, or with this program, and never serves a fork of this program.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import socket
import sys
import threading
import time

from shiplap.safe_io.work_folders import make_work_folder
from shiplap.sandbox.launcher_environment import launcher_environment
from shiplap.sandbox.protocol import ImportModule, Rest
from shiplap.sandbox.request_errors import ProcessEnded
from shiplap.sandbox.supervisor import SandboxLauncher

IDLE_S = 60.0  # seconds for which a launcher waits
GRACE_S = 30.0  # further seconds after which the launcher ends by itself
PROMPT_S = 2.0  # seconds for a reply of an idle launcher
RESOURCE_LIMITS = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]
LauncherSurroundings = tuple[object, ...]


def _launcher_surroundings() -> LauncherSurroundings:
    """Return the settings of this program that a launcher inherits when it starts. They are the interpreter, the
    environment variables, the working folder, resource limits, allowed processors, priority and user ids.
    """
    here = ""
    with contextlib.suppress(OSError):  # a folder that was removed
        here = os.getcwd()
    limits = tuple(resource.getrlimit(limit) for limit in RESOURCE_LIMITS)
    processors, nice = frozenset(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)
    users = os.getresuid(), os.getresgid(), tuple(os.getgroups())
    return sys.executable, launcher_environment(), here, limits, processors, nice, users


class IdleLauncher(SandboxLauncher):
    """A launcher (the process that forks sandboxed processes) that may rest between two tunings.

    Attributes:
        resting: whether it waits for its next use.
    """

    def __init__(self) -> None:
        """Make a launcher that is not started."""
        super().__init__()
        self.resting = False
        self._surroundings: LauncherSurroundings = ()

    def _start(self) -> socket.socket:
        """Start the launcher's process and return the socket that is connected to it. Record the settings that the
        program has at that time.
        """
        self._surroundings = _launcher_surroundings()
        return super()._start()

    def _ready(self) -> socket.socket:
        """Return the socket that is connected to the launcher's process. A resting process is woken, and is replaced by
        a new one if that fails.
        """
        if self.resting:
            self.resting = False
            self.folder, self._lock = make_work_folder("judge")
            with contextlib.suppress(ProcessEnded):
                self.ask(ImportModule(), until=time.monotonic() + PROMPT_S)
                return super()._ready()
            self.close()
        return super()._ready()

    def fits(self) -> bool:
        """Return whether the process runs and was started with the settings that the program has now."""
        return (
            self._process is not None
            and self._process.poll() is None
            and self._surroundings == _launcher_surroundings()
        )

    def rest(self, seconds: float) -> bool:
        """Kill all sandboxed processes that the launcher has forked, and make it wait at most ``seconds`` for its next
        use. Return True if it now rests, and False if it must not be used again.
        """
        if self.resting:
            return True
        if self._process is None or self._over or self._unread or not self.sealed:
            return False
        self._end_all()
        try:
            alone = self.ask(Rest(seconds), until=time.monotonic() + PROMPT_S).yes
        except ProcessEnded:
            return False
        self.prisoners.clear()
        self._remove_folder()
        self.folder = ""
        self.resting = alone
        return self.resting

    def forget(self) -> None:
        """Close the connection to the launcher's process in a fork of the program. That process is not ended, since it
        belongs to the parent.
        """
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.returncode = 0  # no warning that it still runs: the parent waits for it
        self._process = self._connection = None
        self.folder = ""


class LauncherPool:
    """A pool that keeps at most one launcher for the next use and ends it with the program. It can be used by several
    threads and after a fork.
    """

    def __init__(self, seconds: float = IDLE_S) -> None:
        """Make an empty pool, in which a launcher waits for at most ``seconds``."""
        self.seconds = seconds
        self._lock = threading.Lock()
        self._waiting: IdleLauncher | None = None
        self._timer: threading.Timer | None = None
        self._known = False  # whether the handlers are registered with the interpreter

    @property
    def pid(self) -> int:
        """The id of the launcher process that waits, or -1 if there is none."""
        waiting = self._waiting
        return waiting.pid if waiting is not None else -1

    def take(self) -> IdleLauncher:
        """Remove the waiting launcher from the pool and return it if it can still be used. Otherwise return a new one,
        which starts at its first use.
        """
        launcher = self._swap(None)
        if launcher is not None and launcher.fits():
            return launcher
        if launcher is not None:
            launcher.close()
        return IdleLauncher()

    def leave(self, launcher: IdleLauncher) -> None:
        """Put a launcher into the pool for the next use, and end the one that waited there before. If ``launcher`` must
        not be used again, end it instead.
        """
        if not launcher.rest(self.seconds + GRACE_S):
            launcher.close()
        elif (other := self._swap(launcher)) is not None:
            other.close()

    def end(self) -> None:
        """End the waiting launcher. Do nothing if there is none."""
        if (launcher := self._swap(None)) is not None:
            launcher.close()

    def _swap(self, launcher: IdleLauncher | None) -> IdleLauncher | None:
        """Make ``launcher`` wait in the pool from now on with a new timer, or leave the pool empty if it is None.
        Return the launcher that waited before, or None if none waited.
        """
        timer = None
        if launcher is not None:
            self._register_hooks()
            timer = threading.Timer(self.seconds, self._expire, [launcher])
            timer.name, timer.daemon = "shiplap standby", True
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            (earlier, self._waiting), self._timer = (self._waiting, launcher), timer
            if timer is not None:
                timer.start()
        return earlier

    def _expire(self, launcher: IdleLauncher) -> None:
        """End ``launcher`` if it still waits when its time is over."""
        with self._lock:
            if self._waiting is not launcher:  # another thread has taken it
                return
            self._waiting = self._timer = None
        launcher.close()

    def _register_hooks(self) -> None:
        """Make Python end the waiting launcher with the program and drop it in forks of the program. Only the first
        call has an effect.
        """
        if not self._known:
            self._known = True
            atexit.register(self.end)
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Empty the pool in a fork of this program, and replace its lock. The launcher's process is not ended."""
        waiting, self._waiting, self._timer, self._lock = self._waiting, None, None, threading.Lock()
        if waiting is not None:
            waiting.forget()


standby = LauncherPool()
