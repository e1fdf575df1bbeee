"""The referee's side of a process that is not trusted: it asks, watches, stops the process, and reads its memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shiplap.sandbox.launcher_start import START, environment
from shiplap.sandbox.proc_filesystem import Took, Usage, below, below_still, resident, threads, usage
from shiplap.sandbox.protocol import HEAD, Broken, Message, length_of, packed, parsed, plain, receive, send
from shiplap.sandbox.scratch_files import nameless, remove

__all__ = ["Bounds", "Ended", "Late", "Launcher", "Prisoner", "Took"]

POLL_S = 0.05
AT_ONCE = 32 << 10  # bytes of a message that a socket takes although nobody reads it
HANGS, SILENT_S = 0.8, 5.0  # share of the time of a request, and seconds, that are a fault when everything is over
STIRS = 1e-4  # seconds of a processor that a process may have had since it was seen to stand
PATIENCE = 4.0  # times the limit that a process may take which had to wait for a processor
_libc = ctypes.CDLL(None, use_errno=True)


class Ended(Exception):
    """Raised when the process ended, or was ended for what it did."""

    def __init__(self, how: str) -> None:
        super().__init__(plain(how))


class Late(Ended):
    """Raised when the process was ended because the time of the whole judgement is over."""


@dataclass(frozen=True)
class Bounds:
    """What a process may use: seconds of one request, bytes of memory beyond the first, processes that it starts."""

    seconds: float = 120.0
    memory: int = 8 << 30
    processes: int = 32
    file_size: int = 1 << 30


class _Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Launcher:
    """A context with a process that holds torch and nothing else. It forks the processes that are not trusted.

    Attributes:
        sealed: whether each of them was locked in with every facility, and none reached a device.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self.folder = ""
        self._count = 0
        self._over = False
        self._turn = threading.Lock()  # one question at a time
        self._unread = False  # an answer: what was read next would be this one
        self.sealed = True
        self.prisoners: set[int] = set()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the launcher and all that it started."""
        if self._process is not None:
            self._end_all()
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        if self.folder:
            remove(self.folder)

    def _end_all(self) -> None:
        if self._process is None or self._process.poll() is not None:  # its number may be that of another by now
            return
        for pid in reversed(list(below(self.pid))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def finish(self) -> None:
        """End everything, and start nothing more; another thread may be waiting for an answer, and gets Ended."""
        self._over = True
        self.close()

    def _ready(self) -> socket.socket:
        """The connection to its process, which starts if it does not run."""
        return self._connection or self._start()

    def _start(self) -> socket.socket:
        if self._over:
            raise Ended("the time is over")
        self.folder = tempfile.mkdtemp(prefix="shiplap-judge-")
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment(),
            cwd=self.folder,
        )
        theirs.close()
        self._connection = ours
        return ours

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else -1

    def ask(self, message: Message, handles: Sequence[int] = (), until: float = math.inf) -> Message:
        """Its reply. Raises Ended, and Late where it has not answered by ``until``: a new one is started then."""
        connection = self._ready()
        try:
            with self._turn:
                connection.settimeout(max(0.01, until - time.monotonic()) if until < math.inf else None)
                self._unread = True
                send(connection, message, handles)
                reply = receive(connection)[0]
                self._unread = False
                return reply
        except TimeoutError:
            self.close()
            raise Late("the time of the judgement is over, and no process has started") from None
        except (Broken, OSError) as e:
            raise Ended(f"the launcher ended: {e}") from None

    def start(
        self,
        readable: Sequence[str] = (),
        bounds: Bounds | None = None,
        *,
        hidden: Sequence[str] = (),
        locked: bool = True,
        device: bool = False,
        threads: int = 0,
        until: float = math.inf,
    ) -> Prisoner:
        """A new process, locked in. It may read the files ``readable``, and write into a folder of its own.

        ``hidden``: folders in which Python finds modules, and that it may not read. ``device``: it may use the
        machine's accelerators, too. ``threads``: those of torch, as many as here by default. ``until``: see
        ``Prisoner``.
        """
        bounds = bounds or Bounds()
        self._ready()
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
            "hidden": list(hidden),
            "locked": locked,
            "device": device,
            "threads": threads or torch.get_num_threads(),
            "environment": places,
            "file_size": bounds.file_size,
        }
        output = nameless(self.folder)
        sealed, self.sealed = self.sealed, False
        try:
            pid = self.ask(order, [theirs.fileno(), output], until)["pid"]
        finally:
            theirs.close()
        self.prisoners.add(pid)
        prisoner = Prisoner(self, pid, ours, output, bounds, until=until)
        self.sealed = sealed and locked and not device and not prisoner.missing
        return prisoner


@dataclass
class Prisoner:
    """One process that is not trusted, with all that it starts. It runs while it is asked something, and only then.

    Attributes:
        output: the open file that it prints into.
        missing: facility of the sandbox → why it is not in force; only those that are not.
        alone: whether a process that it started and left running is the end of it.
        until: the time (``time.monotonic``) after which it may not run any more.
        answering: seconds that it took for all its answers.
    """

    launcher: Launcher
    pid: int
    connection: socket.socket
    output: int
    bounds: Bounds
    missing: dict[str, str] = field(default_factory=dict)
    alone: bool = False
    until: float = math.inf
    answering: float = 0.0

    def __post_init__(self) -> None:
        self._base = 0
        self._asked, self._stood = Usage(), math.inf
        self._delays: dict[int, float] = {}  # process → seconds without a processor
        try:
            told = parsed(self._receive(self.bounds.seconds))
        except Broken as e:
            raise self._ended(str(e)) from None
        self._base = resident(self.pid)
        self.missing = {str(k): str(v) for k, v in dict(told.get("missing", {})).items() if v}
        self._signal(signal.SIGSTOP)
        self._stand()

    def ask(self, message: Message, handle: int = -1, seconds: float | None = None) -> tuple[Message, Took]:
        """The reply, and the time from before the process runs to the moment at which it is stopped again.

        No instruction of it, of its threads and of the processes that it started runs outside of that time. Raises
        Ended.
        """
        self._in_time()
        data, handles = packed(message), [handle] if handle >= 0 else []
        self._asked, self._delays = usage(self.pid, self.pid), {}
        if self._asked.ran > self._stood + STIRS:
            self.kill()
            raise Ended("it ran while it was stopped")
        here = usage(os.getpid(), threading.get_native_id()).waited
        started = time.perf_counter()
        try:
            if len(data) <= AT_ONCE:  # it finds the message when it wakes
                self._post(data, handles)
            self._signal(signal.SIGCONT)
            if len(data) > AT_ONCE:
                self._post(data, handles)
            body = self._receive(seconds or self.bounds.seconds)
            self._signal(signal.SIGSTOP)
            wall = time.perf_counter() - started
            self.answering += wall
            self._stand()
            reply = parsed(body)
        except (Broken, OSError) as e:
            raise self._ended(str(e)) from None
        used = usage(self.pid, self.pid)
        self._stood = used.ran
        here = usage(os.getpid(), threading.get_native_id()).waited - here
        took = Took.of(wall, used.waited - self._asked.waited + here, used.ran - self._asked.ran)
        if self.alone and (helpers := self.sweep()):  # before its memory is read: they may have written there
            raise Ended(f"{helpers} processes were running beside a timed call")
        return reply, took

    def _post(self, data: bytes, handles: Sequence[int]) -> None:
        sent = socket.send_fds(self.connection, [data], list(handles)) if handles else 0
        self.connection.sendall(data[sent:])

    def _receive(self, seconds: float) -> bytes:
        """The body of a reply. However slowly it arrives, it has these seconds, and the limits are looked at."""
        ends, looked = time.monotonic() + seconds, time.monotonic()
        data, wanted = bytearray(), HEAD.size
        while len(data) < wanted:
            ready = select.select([self.connection], [], [], POLL_S)[0]
            if time.monotonic() - looked >= POLL_S:
                looked = time.monotonic()
                self._keep_within(ends, seconds)
            if ready:
                part = self.connection.recv(wanted - len(data))
                if not part:
                    raise Broken("the connection has ended")
                data += part
                if wanted == len(data) == HEAD.size:
                    wanted += length_of(bytes(data))
        return bytes(data[HEAD.size :])

    def _in_time(self) -> None:
        if time.monotonic() > self.until:
            self.kill()
            raise Late("the time of the judgement is over")

    def _keep_within(self, ends: float, seconds: float) -> None:
        """End it if it exceeds a limit. Raises Ended."""
        if reason := self._exceeds(ends, seconds):
            self.kill()
            raise Ended(reason)
        self._in_time()

    def _exceeds(self, ends: float, seconds: float) -> str:
        family = [self.pid, *self.strays()]
        self._delays |= {pid: usage(pid, pid).waited for pid in family}
        late = time.monotonic() - ends
        # On a busy machine it and its compilers wait for a processor. It is given that time, and no more than that.
        waited = min(PATIENCE * seconds, sum(self._delays.values()) - self._asked.waited)
        over = time.monotonic() > self.until and seconds + late - waited > max(HANGS * seconds, SILENT_S)
        if over or (late > 0 and late > waited):
            return f"no answer for {seconds + late:.3g} s"
        # Each process that it starts begins with its pages, and shares them until it writes.
        used = sum(max(0, resident(pid) - self._base) for pid in family)
        if self._base and used > self.bounds.memory:
            return f"more than {self.bounds.memory / 2**30:.3g} GiB of memory"
        if len(family) > 1 + self.bounds.processes:
            return f"more than {self.bounds.processes} processes"
        return ""

    def _ended(self, how: str) -> Ended:
        self._signal(signal.SIGKILL)
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
            text = os.pread(self.output, 2000, max(0, os.fstat(self.output).st_size - 2000)).decode(errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:200] if lines else ""

    def _signal(self, number: int) -> None:
        """Send a signal to it and to all that it started, at once: they cannot leave its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _stand(self) -> None:
        """Return when every thread of it stands. Raises Ended."""
        now = time.monotonic()
        ends = max(now + 1, min(now + 60, self.until))
        while time.monotonic() < ends:
            state = threads(self.pid)
            if state and state <= {"T", "t", "Z", "X"}:
                return
            if not state:
                raise self._ended("it ended after its answer")
            time.sleep(0.0001)  # a thread stops when it next has a processor
        self.kill()
        raise Ended("it cannot be stopped")

    def read(self, address: int, length: int) -> bytearray:
        """Bytes of its memory. Raises OSError for memory that it has not, and where the kernel does not permit it."""
        content = bytearray(length)
        start = ctypes.addressof(ctypes.c_char.from_buffer(content)) if length else 0
        done = 0
        while done < length:
            step = min(length - done, 1 << 30)
            into, out = _Span(start + done, step), _Span(address + done, step)
            got = _libc.process_vm_readv(self.pid, ctypes.byref(into), 1, ctypes.byref(out), 1, 0)
            if got <= 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            done += got
        return content

    def strays(self, *, still: bool = False) -> list[int]:
        """Processes that it started, also those whose parent ended and left them to the launcher."""
        others = self.launcher.prisoners - {self.pid}
        family = below_still(self.launcher.pid) if still else below(self.launcher.pid)
        return [p for p, group in family.items() if p not in self.launcher.prisoners and group not in others]

    def sweep(self, *, still: bool = True) -> int:
        """End the processes that it started, and say how many there were. ``still``: it is not asked anything now."""
        strays = self.strays(still=still)
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(strays)

    def kill(self) -> None:
        """End it and what it started; what has ended already stays as it is."""
        if self.pid not in self.launcher.prisoners:  # its number may be that of another by now
            return
        self._signal(signal.SIGKILL)
        self.sweep(still=False)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(Ended):
            self.launcher.ask({"do": "wait", "pid": self.pid})
        self.launcher.prisoners.discard(self.pid)
        self.connection.close()
        with contextlib.suppress(OSError):
            os.close(self.output)
