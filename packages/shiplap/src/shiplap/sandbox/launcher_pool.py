"""A launcher that waits for the next tuning of this program, since each takes a second or two to import torch.

A launcher never runs code that is not trusted: it forks, and the fork does, once it is locked in. One is kept where
nothing was refused and nothing was missing while it served, and is used again only by a program that would start it in
the same way. It ends when nobody has needed it for a minute, with this program however that ends, and never serves a
fork of this program.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import socket
import sys
import tempfile
import threading
import time

from shiplap.sandbox.launcher_start import environment
from shiplap.sandbox.scratch_files import remove
from shiplap.sandbox.supervisor import Ended, Launcher

IDLE_S = 60.0  # seconds that it waits
GRACE_S = 30.0  # seconds after which it ends by itself, where nobody has ended it
PROMPT_S = 2.0  # seconds in which it answers, as there is nothing that it could be doing
LIMITS = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]
Surroundings = tuple[object, ...]


def _surroundings() -> Surroundings:
    """What a launcher inherits from this program when it starts."""
    here = ""
    with contextlib.suppress(OSError):  # a folder that was removed
        here = os.getcwd()
    limits = tuple(resource.getrlimit(limit) for limit in LIMITS)
    processors, nice = frozenset(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)
    users = os.getresuid(), os.getresgid(), tuple(os.getgroups())
    return sys.executable, environment(), here, limits, processors, nice, users


class Staying(Launcher):
    """A launcher that may rest between two tunings.

    Attributes:
        resting: whether it waits for somebody who needs it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.resting = False
        self._surroundings: Surroundings = ()

    def _start(self) -> socket.socket:
        self._surroundings = _surroundings()
        return super()._start()

    def _ready(self) -> socket.socket:
        if self.resting:
            self.resting = False
            self.folder = tempfile.mkdtemp(prefix="shiplap-judge-")
            with contextlib.suppress(Ended):
                self.ask({"do": "wake"}, until=time.monotonic() + PROMPT_S)
                return super()._ready()
            self.close()
        return super()._ready()

    def fits(self) -> bool:
        """Whether it runs, and was started as it would be now."""
        return self._process is not None and self._process.poll() is None and self._surroundings == _surroundings()

    def rest(self, seconds: float) -> bool:
        """End what it started, and let it wait for as long. False where it must not be used again."""
        if self.resting:
            return True
        if self._process is None or self._over or self._unread or not self.sealed:
            return False
        self._end_all()
        try:
            alone = self.ask({"do": "rest", "seconds": seconds}, until=time.monotonic() + PROMPT_S)["alone"]
        except Ended:
            return False
        self.prisoners.clear()
        remove(self.folder)
        self.folder = ""
        self.resting = bool(alone)
        return self.resting

    def forget(self) -> None:
        """In a fork of the program that started it: it is the business of that program alone."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.returncode = 0  # nobody here waits for it
        self._process = self._connection = None
        self.folder = ""


class Standby:
    """Keeps at most one launcher. Its threads and forks, and the end of the program, are taken care of."""

    def __init__(self, seconds: float = IDLE_S) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._waiting: Staying | None = None
        self._timer: threading.Timer | None = None
        self._known = False  # to the interpreter

    @property
    def pid(self) -> int:
        """The process that waits, or -1."""
        waiting = self._waiting
        return waiting.pid if waiting is not None else -1

    def take(self) -> Staying:
        """The one that waits, if it is what would be started now; or else one that starts when it is needed."""
        launcher = self._swap(None)
        if launcher is not None and launcher.fits():
            return launcher
        if launcher is not None:
            launcher.close()
        return Staying()

    def leave(self, launcher: Staying) -> None:
        """Keep it for whoever needs one next, or end it."""
        if not launcher.rest(self.seconds + GRACE_S):
            launcher.close()
        elif (other := self._swap(launcher)) is not None:
            other.close()

    def end(self) -> None:
        """End the one that waits."""
        if (launcher := self._swap(None)) is not None:
            launcher.close()

    def _swap(self, launcher: Staying | None) -> Staying | None:
        """Keep this one, and return the one that waited."""
        timer = None
        if launcher is not None:
            self._tell()
            timer = threading.Timer(self.seconds, self._expire, [launcher])
            timer.name, timer.daemon = "shiplap standby", True
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            (earlier, self._waiting), self._timer = (self._waiting, launcher), timer
            if timer is not None:
                timer.start()
        return earlier

    def _expire(self, launcher: Staying) -> None:
        with self._lock:
            if self._waiting is not launcher:  # somebody took it just now
                return
            self._waiting = self._timer = None
        launcher.close()

    def _tell(self) -> None:
        if not self._known:
            self._known = True
            atexit.register(self.end)
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        waiting, self._waiting, self._timer, self._lock = self._waiting, None, None, threading.Lock()
        if waiting is not None:
            waiting.forget()


standby = Standby()
