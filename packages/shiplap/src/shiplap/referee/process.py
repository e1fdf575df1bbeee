"""The referee's side of a process that is not trusted: it asks, watches, stops the process, and reads its memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shiplap.referee.proc import Usage, below, resident, threads, usage
from shiplap.referee.wire import Broken, Message, receive, send

__all__ = ["Bounds", "Ended", "Launcher", "Prisoner", "Took"]

POLL_S = 0.05
PATIENCE = 4.0  # times the limit that a process may take which had to wait for a processor
QUIET = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "SHIPLAP_RECORD": "",
    "SHIPLAP_TUNED": "",
}
_libc = ctypes.CDLL(None, use_errno=True)


class Ended(Exception):
    """Raised when the process ended, or was ended for what it did."""


@dataclass(frozen=True)
class Bounds:
    """What a process may use: seconds of one request, bytes of memory beyond the first, processes that it starts."""

    seconds: float = 120.0
    memory: int = 8 << 30
    processes: int = 32
    file_size: int = 1 << 30


@dataclass(frozen=True)
class Took:
    """Seconds of one request.

    Attributes:
        wall: by the referee's clock.
        quiet: what it would have taken with the machine to itself, at the least: without the time in which either side
            was ready and had no processor, but never less than its processor time shared out over all cores.
    """

    wall: float
    quiet: float

    @classmethod
    def of(cls, wall: float, waited: float, ran: float) -> Took:
        return cls(wall, min(wall, max(wall - waited, ran / (os.cpu_count() or 1))))


class _Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Launcher:
    """A context with a process that holds torch and nothing else. It forks the processes that are not trusted."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self.folder = ""
        self._count = 0
        self._over = False
        self.prisoners: set[int] = set()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the launcher and all that it started."""
        if self._process is not None:
            for pid in reversed(below(self._process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self) -> None:
        """End everything, and start nothing more; another thread may be waiting for an answer, and gets Ended."""
        self._over = True
        self.close()

    def _start(self) -> socket.socket:
        if self._over:
            raise Ended("the time is over")
        self.folder = tempfile.mkdtemp(prefix="shiplap-judge-")
        ours, theirs = socket.socketpair()
        environment = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shiplap.referee.launcher", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=self.folder,
        )
        theirs.close()
        self._connection = ours
        return ours

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else -1

    def ask(self, message: Message, handles: Sequence[int] = ()) -> Message:
        connection = self._connection or self._start()
        try:
            send(connection, message, handles)
            return receive(connection)[0]
        except (Broken, OSError) as e:
            raise Ended(f"the launcher ended: {e}") from None

    def start(
        self, readable: Sequence[str] = (), bounds: Bounds | None = None, *, locked: bool = True, device: bool = False
    ) -> Prisoner:
        """A new process, locked in. It may read the files ``readable``, and write into a folder of its own.

        ``device``: it may use the machine's accelerators, too.
        """
        bounds = bounds or Bounds()
        if self._process is None:
            self._start()
        self._count += 1
        scratch = os.path.join(self.folder, str(self._count))
        os.mkdir(scratch, 0o700)
        places = {"TMPDIR": scratch, "HOME": scratch, "TRITON_CACHE_DIR": f"{scratch}/triton"}
        places |= {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", "SHIPLAP_CACHE_DIR": f"{scratch}/shiplap"}
        ours, theirs = socket.socketpair()
        order = {
            "do": "fork",
            "scratch": scratch,
            "readable": list(readable),
            "locked": locked,
            "device": device,
            "threads": torch.get_num_threads(),
            "environment": places,
            "file_size": bounds.file_size,
        }
        try:
            pid = self.ask(order, [theirs.fileno()])["pid"]
        finally:
            theirs.close()
        self.prisoners.add(pid)
        return Prisoner(self, pid, ours, scratch, bounds)


@dataclass
class Prisoner:
    """One process that is not trusted. It runs while it is asked something, and is stopped otherwise.

    Attributes:
        missing: facility of the sandbox → why it is not in force; only those that are not.
        alone: whether a process that it started and left running is the end of it.
    """

    launcher: Launcher
    pid: int
    connection: socket.socket
    scratch: str
    bounds: Bounds
    missing: dict[str, str] = field(default_factory=dict)
    alone: bool = False

    def __post_init__(self) -> None:
        self._base = 0
        self._asked = Usage()
        self._delays: dict[int, float] = {}  # process → seconds without a processor
        told = self._receive(self.bounds.seconds)
        self._base = resident(self.pid)
        self.missing = {str(k): str(v) for k, v in dict(told.get("missing", {})).items() if v}
        self.freeze()

    def ask(self, message: Message, handle: int = -1, seconds: float | None = None) -> tuple[Message, Took]:
        """The reply, and the time from the moment at which the process could know the message to the reply.

        The process is stopped again when this returns. Raises Ended.
        """
        self.thaw()
        self._asked, self._delays = usage(self.pid, self.pid), {}
        here = usage(os.getpid(), threading.get_native_id()).waited
        started = time.perf_counter()
        try:
            send(self.connection, message, [handle] if handle >= 0 else [])
            reply = self._receive(seconds or self.bounds.seconds)
        except OSError as e:
            raise self._ended(str(e)) from None
        wall = time.perf_counter() - started
        used = usage(self.pid, self.pid)
        here = usage(os.getpid(), threading.get_native_id()).waited - here
        took = Took.of(wall, used.waited - self._asked.waited + here, used.ran - self._asked.ran)
        self.freeze()
        if self.alone and (helpers := self.sweep()):  # before its memory is read: they may write there
            raise Ended(f"{helpers} processes were running beside a timed call")
        return reply, took

    def _receive(self, seconds: float) -> Message:
        ends = time.monotonic() + seconds
        while not select.select([self.connection], [], [], POLL_S)[0]:
            if reason := self._exceeds(ends, seconds):
                self.kill()
                raise Ended(reason)
        self.connection.settimeout(max(60.0, ends - time.monotonic()))
        try:
            return receive(self.connection)[0]
        except Broken as e:
            raise self._ended(str(e)) from None

    def _exceeds(self, ends: float, seconds: float) -> str:
        family = self.strays()
        self._delays |= {pid: usage(pid, pid).waited for pid in (self.pid, *family)}
        late = time.monotonic() - ends
        # On a busy machine it and its compilers wait for a processor. It is given that time, and no more than that.
        if late > 0 and late > min(PATIENCE * seconds, sum(self._delays.values()) - self._asked.waited):
            return f"no answer for {seconds:g} s"
        used = resident(self.pid) - self._base
        if self._base and used > self.bounds.memory:
            return f"more than {self.bounds.memory / 2**30:.3g} GiB of memory"
        if len(family) > self.bounds.processes:
            return f"more than {self.bounds.processes} processes"
        return ""

    def _ended(self, how: str) -> Ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        status = 0
        with contextlib.suppress(Ended):
            status = int(self.launcher.ask({"do": "wait", "pid": self.pid})["status"])
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
            how = f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
        elif os.WIFEXITED(status) and os.WEXITSTATUS(status):
            how = f"ended with exit status {os.WEXITSTATUS(status)}"
        words = self._last_words()
        return Ended(f"{how} ({words})" if words else how)

    def _last_words(self) -> str:
        try:
            text = Path(self.scratch, "output").read_bytes()[-2000:].decode(errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:200] if lines else ""

    def thaw(self) -> None:
        """Let it run, and give it time to wait for the next message: nothing that it could work on is there yet."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        time.sleep(0.0005)

    def freeze(self) -> None:
        """Stop every thread of it, and return when they stand. Raises Ended."""
        try:
            os.kill(self.pid, signal.SIGSTOP)
        except ProcessLookupError:
            raise self._ended("it ended after its answer") from None
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            state = threads(self.pid)
            if state and state <= {"T", "t", "Z", "X"}:
                return
            if not state:
                raise self._ended("it ended after its answer")
            time.sleep(0.0001)  # a thread stops when it next has a processor
        self.kill()
        raise Ended("it cannot be stopped")

    def read(self, address: int, length: int) -> bytes:
        """Bytes of its memory. Raises OSError for memory that it has not, and where the kernel does not permit it."""
        buffer = ctypes.create_string_buffer(length)
        done = 0
        while done < length:
            step = min(length - done, 1 << 30)
            into, out = _Span(ctypes.addressof(buffer) + done, step), _Span(address + done, step)
            got = _libc.process_vm_readv(self.pid, ctypes.byref(into), 1, ctypes.byref(out), 1, 0)
            if got <= 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            done += got
        return buffer.raw

    def strays(self) -> list[int]:
        """Processes that it started, and those whose parent ended and left them to the launcher."""
        return [p for p in below(self.launcher.pid) if p not in self.launcher.prisoners]

    def sweep(self) -> int:
        """End the processes that it started, and say how many there were."""
        strays = self.strays()
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(strays)

    def kill(self) -> None:
        """End it and what it started."""
        self.sweep()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(Ended):
            self.launcher.ask({"do": "wait", "pid": self.pid})
        self.connection.close()
