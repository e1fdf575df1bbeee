"""The supervisor of sandboxed processes: sends requests, enforces limits, stops processes, and reads their memory."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeVar

import torch

from shiplap.safe_io import work_folders
from shiplap.sandbox import memory_bound, protocol
from shiplap.sandbox.launcher_environment import launcher_environment
from shiplap.sandbox.proc_filesystem import (
    RequestTime,
    SchedulerUsage,
    is_ending,
    list_descendants,
    list_session,
    list_stopped_descendants,
    read_scheduler_usage,
    thread_states,
)
from shiplap.sandbox.process_memory import read_process_memory
from shiplap.sandbox.protocol import (
    MESSAGE_HEAD,
    BrokenMessage,
    Reply,
    Request,
    pack_message,
    parse_message,
    parse_message_length,
    printable_text,
    receive_message,
    reply_of,
    send_message,
)
from shiplap.sandbox.request_errors import ProcessEnded, RequestFailed, Timeout, UnsupportedArguments
from shiplap.sandbox.resource_use import ResourceUse
from shiplap.sandbox.scratch_folder import open_unnamed_file, read_last_line, require_text_path, scratch_environment

# Seconds until the limits are checked first, what is added for each second of a request, and at most. A check reads the
# files of all processes, which takes milliseconds.
POLL_S, POLL_SHARE, LONGEST_POLL_S = 0.05, 0.1, 0.25
SOCKET_BUFFER_BYTES = 32 << 10  # bytes of a message that a socket buffers without a reader
# Share of a request's time, and seconds, without a reply at the deadline that are a fault.
HANGS, SILENT_S = 0.8, 5.0
# Processor seconds that a stopped process may gain, since it leaves a busy processor late: without and with a GPU.
STIRRING_S, DEVICE_STIRRING_S = 1e-3, 20e-3
MAX_WAITING_FACTOR = 4.0  # a process that waited for a processor gets at most this multiple of its limit
STOPPING_S = 0.2e-3  # processor seconds of a process that is not stopped at once that count for nothing
REAPING_S = 1.0  # seconds until a launcher has waited for the ended processes that it has adopted
ENDING_S = 0.3  # seconds until a process that has closed its connection is ending
LACKS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS}  # errors of this process
ReplyT = TypeVar("ReplyT", bound=Reply)

# Imported objects stay, so collecting garbage meanwhile is wasted time. An interrupt from the shared terminal is for
# the program that uses the launcher, and must not end the launcher.
LAUNCHER_PROGRAM = (
    "import gc, signal; gc.disable(); signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from shiplap.sandbox.launcher import main; main()"
)


@dataclass(frozen=True)
class Bounds:
    """The limits of a process on seconds of a request, further bytes of memory and as many of all its files together,
    child processes, and bytes of a file.
    """

    seconds: float = 120.0
    memory: int = 8 << 30
    processes: int = 32
    file_size: int = 1 << 30


class LauncherProcess(Protocol):
    """The part of ``subprocess.Popen`` by which a launcher's process is watched, killed and waited for."""

    pid: int
    returncode: Any

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int | None: ...


class SandboxLauncher:
    """A context manager with a process that has imported torch and forks the sandboxed processes.

    Attributes:
        sealed: whether each forked process is restricted by every facility of the sandbox, without access to a device.
        prisoners: the ids of the sandboxed processes. Other threads add to it and remove from it at any time.
        harmful: modules after whose import no fork of the process could use a GPU.
    """

    def __init__(self) -> None:
        """Make a launcher without a process. The process starts at the first request."""
        self._process: LauncherProcess | None = None
        self._connection: socket.socket | None = None
        self.folder, self._lock = "", work_folders.NO_LOCK
        self._count = 0
        self._over = False
        self._turn = threading.Lock()  # one request at a time
        self._guard = threading.RLock()  # held while the process starts or is ended: none is left behind
        self._forking = threading.Lock()  # held until a new fork is listed in ``prisoners``
        self._unread = False  # whether a reply is outstanding, which the next request would read
        self.sealed = True
        self.prisoners: set[int] = set()
        self._preloaded: set[str] = set()  # modules that the process imported on request
        self.harmful: set[str] = set()

    def __enter__(self) -> SandboxLauncher:
        """Return the launcher."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the launcher."""
        self.close()

    def close(self) -> None:
        """Kill the launcher's process, also one that another thread starts now, its forks, and remove their folder."""
        with self._guard:
            self._close()

    def _close(self) -> None:
        """Do what ``close`` does. The caller holds ``_guard``."""
        if self._process is not None:
            try:
                self._end_all()
            except (OSError, MemoryError):  # none can be looked at; the launcher ends them with the connection
                if self._connection is not None:
                    self._connection.close()
                ends = time.monotonic() + work_folders.REMOVAL_PATIENCE_S
                while self._process.poll() is None and time.monotonic() < ends:
                    time.sleep(0.005)
            self._let_reap()
            self._process.kill()
            self._process.wait()
            with contextlib.suppress(OSError, MemoryError):
                self._end_all()  # by sessions: had it ended while they were listed, its descendants had another parent
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
        self._preloaded.clear()
        self._remove_folder()

    def _let_reap(self) -> None:
        """Let the launcher's process end by itself if it has children that have ended and that nobody has waited for.
        It waits for them first. Without it they would belong to the first process of the machine, which in a container
        often waits for none, and they would use up its processes.
        """
        with contextlib.suppress(OSError):
            ended = list_descendants(self.pid, dead=True).keys() - list_descendants(self.pid).keys() - self.prisoners
            if ended and self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)
                ends = time.monotonic() + REAPING_S
                while self._process is not None and self._process.poll() is None and time.monotonic() < ends:
                    time.sleep(0.005)

    def _remove_folder(self) -> None:
        """Remove the launcher's folder, if it has one. The caller holds ``_guard``."""
        if self.folder:
            work_folders.remove_folder(self.folder)
        work_folders.release_work_folder(self._lock)
        self._lock = work_folders.NO_LOCK

    def _end_all(self) -> None:
        """Kill the groups of all sandboxed processes, which no descendant of theirs can leave, and what else descends
        from the launcher's process, children before parents.
        """
        if self._process is None:
            return
        leaders, family = tuple(self.prisoners), dict[int, int]()
        if self._process.poll() is None:
            family = list_descendants(self.pid)
        else:  # the ids may belong to other processes now
            leaders = tuple(leader for leader in leaders if list_session(leader))
        # A process that forks and ends again and again is in no list, but Linux ends all of a group at once.
        for kill, pid in [*((os.killpg, pid) for pid in leaders), *((os.kill, pid) for pid in reversed(family))]:
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def finish(self) -> None:
        """Kill the launcher and all its processes. Later requests, and one that waits now, raise ``ProcessEnded``."""
        with self._guard:
            self._over = True
            self._close()

    def _ready(self) -> socket.socket:
        """Return the socket that is connected to the launcher's process. The process is started if necessary."""
        with self._guard:
            return self._connection or self._start()

    def preload(self, modules: Sequence[str] = (), until: float = math.inf) -> None:
        """Start the launcher's process, and import the ``modules`` that exist there. Raise the errors of ``ask``."""
        self._ready()
        for module in modules:
            if module not in self._preloaded:
                self.ask(protocol.ImportModule(module), until=until)
                self._preloaded.add(module)

    @property
    def _libraries(self) -> str:
        """The folder for what imported libraries have made, which sandboxed processes may read. It may not exist."""
        return os.path.join(self.folder, "libraries")

    def import_libraries(self, modules: Sequence[str], until: float = math.inf) -> None:
        """Import those of the ``modules`` of torch and Triton that exist in the launcher's process, unless that was
        done before. Raise the errors of ``ask``.

        If processes that are forked after the import of a module could not use a GPU, another process is started, and
        the module is added to ``harmful`` and is not imported again.
        """
        self._ready()
        while new := [module for module in modules if module not in self._preloaded | self.harmful]:
            with self._guard:  # else another thread could remove the folder of the launcher meanwhile
                if self._connection is None:
                    raise ProcessEnded("the launcher was ended")
                folder = self._libraries
                os.makedirs(folder, 0o700, exist_ok=True)
            harmless = self.ask(protocol.ImportLibraries(new, folder), until=until).value
            self._preloaded |= set(new[:harmless])
            if harmless < len(new):
                self.harmful.add(new[harmless])
                self.close()
                self._ready()

    def _start(self) -> socket.socket:
        """Start the launcher's process and return the socket to it. Raise ``ProcessEnded`` after ``finish``."""
        if self._over:
            raise ProcessEnded("the time is over")
        self.folder, self._lock = work_folders.make_work_folder("judge")
        require_text_path(self.folder)
        ours, theirs = socket.socketpair()
        self._start_process(theirs)
        theirs.close()
        memory_bound.lift(self.pid)
        self._connection = ours
        return ours

    def _start_process(self, connection: socket.socket) -> None:
        """Start the launcher's process, which serves requests on ``connection``. The caller holds ``_guard``."""
        handle = connection.fileno()
        command = [sys.executable, "-P", "-c", LAUNCHER_PROGRAM, str(handle)]
        # A signal to the group of this program must leave it alive, so that it ends what it has forked.
        self._process = subprocess.Popen(
            command, pass_fds=[handle], env=launcher_environment(), cwd=self.folder, start_new_session=True
        )

    @property
    def pid(self) -> int:
        """The id of the launcher's process, or -1 if none was started."""
        return process.pid if (process := self._process) is not None else -1  # read once: others may end it

    def ask(self, message: Request[ReplyT], handles: Sequence[int] = (), until: float = math.inf) -> ReplyT:
        """Send ``message`` and the file descriptors ``handles`` to the launcher's process, and return its reply.

        Raise ``ProcessEnded`` if the connection ends. If there is no reply by the time ``until`` of ``time.monotonic``,
        kill the process and raise ``Timeout``. The next request then starts a new process.
        """
        connection = self._ready()
        try:
            with self._turn:
                connection.settimeout(max(0.01, until - time.monotonic()) if until < math.inf else None)
                self._unread = True
                send_message(connection, pack_message(message), handles)
                reply: ReplyT = receive_message(connection, reply_of(type(message)))[0]
                self._unread = False
                return reply
        except TimeoutError:
            self.close()
            raise Timeout("the time of the judgement is over, and no process has started") from None
        except (BrokenMessage, OSError) as e:
            raise ProcessEnded(f"the launcher ended: {e}", lack=True) from None

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
    ) -> SandboxedProcess:
        """Return a new sandboxed process, which is stopped. It may read only system files and ``readable``, and write
        only to a folder of its own. ``bounds`` are its limits.

        Args:
            hidden: files and folders that it must not read although ``sys.path`` shows them.
            locked: whether the process is restricted. Otherwise it has all rights of this program.
            device: whether it may use the machine's accelerators.
            threads: the number of torch's threads. 0 stands for as many as in this process.
            until: the time of ``time.monotonic`` after which it must not run any more.
        """
        bounds = bounds or Bounds()
        self._ready()
        scratch, output = self._make_scratch()
        places, threads = scratch_environment(scratch), threads or torch.get_num_threads()
        readable = [*readable, *([self._libraries] if os.path.isdir(self._libraries) else [])]
        order = protocol.Fork(scratch, readable, [*hidden], locked, device, threads, places, bounds.file_size)
        ours, theirs = socket.socketpair()
        # A process that does not read, or a little at a time, must not let this one wait.
        ours.settimeout(bounds.seconds)
        sealed, self.sealed = self.sealed, False
        try:
            with theirs, self._forking:
                pid = self.ask(order, [theirs.fileno(), output.fileno()], until).value
                self.prisoners.add(pid)
            prisoner = SandboxedProcess(self, pid, ours, output, bounds, scratch, until=until, device=device)
        except BaseException:  # a fork that nobody holds ends with its connection
            ours.close()
            output.close()
            raise
        self.sealed = sealed and locked and not device and not prisoner.missing
        return prisoner

    @contextlib.contextmanager
    def settled_prisoners(self) -> Iterator[frozenset[int]]:
        """Return a context manager whose value is the set of the ids of the sandboxed processes. No other one is forked
        in its body. Otherwise a fork that is not listed yet would be taken for a child of another process.
        """
        with self._forking:
            yield frozenset(self.prisoners)

    def _make_scratch(self) -> tuple[str, io.FileIO]:
        """Make a folder for a new sandboxed process and the file into which it prints. Return the path and the open
        file. Raise ``ProcessEnded`` if another thread has ended the launcher.
        """
        with self._guard:  # else the folder could be removed meanwhile
            if self._connection is None:
                raise ProcessEnded("the launcher was ended")
            self._count += 1
            scratch = os.path.join(self.folder, str(self._count))
            os.mkdir(scratch, 0o700)
            return scratch, open_unnamed_file(self.folder)


@dataclass
class SandboxedProcess:
    """One process that is not trusted, with all its descendants. It runs only while a request is in progress.

    Attributes:
        output: the file into which it prints.
        scratch: the folder that it may write.
        missing: the facilities of the sandbox that are not in force, with the reason.
        alone: whether a request fails if child processes still run after it.
        until: the time of ``time.monotonic`` after which it must not run any more.
        device: whether it may use an accelerator.
        answering: the sum of the seconds of its requests.
        run: a function that returns (time limit in seconds, start) of the run in progress, or None for no such limit.
    """

    launcher: SandboxLauncher
    pid: int
    connection: socket.socket
    output: io.FileIO
    bounds: Bounds
    scratch: str
    missing: dict[str, str] = field(default_factory=dict)
    alone: bool = False
    until: float = math.inf
    device: bool = False
    answering: float = 0.0
    run: Callable[[], tuple[float, float]] | None = None

    def __post_init__(self) -> None:
        """Wait for the process's report of its restrictions, then stop it. Raise ``ProcessEnded`` if it ends."""
        self._base, self._asked, self._stood = ResourceUse(self.scratch), SchedulerUsage(), math.inf
        self._delays: dict[int, float] = {}  # process → seconds without a processor
        try:
            locked: protocol.Locked = parse_message(self._receive(), protocol.Locked)
        except BrokenMessage as e:
            raise self._end_with_reason(str(e)) from None
        self._base = ResourceUse.of(self.pid, self.scratch, device=self.device)
        self.missing = {k: v for k, v in locked.missing.items() if v}
        self._signal(signal.SIGSTOP)
        self._wait_until_stopped()

    def request_reply(
        self, message: Request[ReplyT], *files: int, waiting: Callable[[float], None] | None = None
    ) -> tuple[ReplyT, RequestTime]:
        """Make the process run until it replies to ``message``. Return the reply and the time of the request, from
        before the process runs until it is stopped again.

        ``files`` are open files that are sent with the message. ``waiting`` is called with the seconds waited so far,
        many times a second while there is no reply.

        No instruction of the process or its descendants runs outside that time. Raise ``ProcessEnded`` if it ends,
        ``RequestFailed`` if it reports an error, and ``UnsupportedArguments`` if it declines arguments.
        """
        self._in_time()
        data, handles = pack_message(message), [file for file in files if file >= 0]
        self._asked, self._delays = read_scheduler_usage(self.pid, self.pid), {}
        if (gained := self._asked.ran - self._stood) > (DEVICE_STIRRING_S if self.device else STIRRING_S):
            # Who was killed while it stood has run as well: its end takes longer than that.
            raise self._end_with_reason(f"it ran while it was stopped, for {gained * 1e3:.0f} ms")
        here = read_scheduler_usage(os.getpid(), threading.get_native_id()).waited
        started = time.perf_counter()
        try:
            if len(data) <= SOCKET_BUFFER_BYTES:  # sent before the process continues, so it does not wait for it
                send_message(self.connection, data, handles)
            self._signal(signal.SIGCONT)
            if len(data) > SOCKET_BUFFER_BYTES:
                send_message(self.connection, data, handles)
            body = self._receive(waiting)
            self._signal(signal.SIGSTOP)
            wall, until = time.perf_counter() - started, read_scheduler_usage(self.pid, self.pid).ran
            at_once = self._wait_until_stopped()
            reply: protocol.Message = parse_message(body, reply_of(type(message)), protocol.Failed, protocol.Declined)
        except (BrokenMessage, OSError) as e:
            raise self._end_with_reason(str(e), lack=isinstance(e, OSError) and e.errno in LACKS) from None
        used = read_scheduler_usage(self.pid, self.pid)
        # A system call, such as a copy of memory, ends before the process stops.
        if not at_once and used.ran - until > STOPPING_S:
            wall = time.perf_counter() - started
        self.answering += wall
        self._stood = used.ran
        here = read_scheduler_usage(os.getpid(), threading.get_native_id()).waited - here
        took = RequestTime.of(wall, used.waited - self._asked.waited + here, used.ran - self._asked.ran)
        # Before results are read, since these processes could still write them.
        if self.alone and (helpers := self.end_strays()):
            raise ProcessEnded(f"{helpers} processes were running beside a timed call")
        if isinstance(reply, protocol.Failed):
            raise RequestFailed(printable_text(reply.text))
        if isinstance(reply, protocol.Declined):
            raise UnsupportedArguments(printable_text(reply.text))
        assert isinstance(reply, reply_of(type(message)))
        return reply, took

    def _receive(self, waiting: Callable[[float], None] | None = None) -> bytes:
        """Wait for a reply and return its body. Until then call ``waiting`` repeatedly with the seconds waited, which
        may raise ``bounds.seconds``. Raise ``BrokenMessage`` if the connection ends. If a limit of ``bounds`` is
        exceeded, kill the process and raise ``ProcessEnded``, or ``Timeout`` if programs of the process still run.
        """
        began = looked = time.monotonic()
        arrived, data, wanted = select.poll(), bytearray(), MESSAGE_HEAD.size
        try:
            arrived.register(self.connection, select.POLLIN)
        except ValueError:  # another thread has closed it. Later a poll allows that, which ``select`` does not.
            raise BrokenMessage("the connection is closed") from None
        while len(data) < wanted:
            ready = arrived.poll(POLL_S * 1e3)
            if time.monotonic() - looked >= min(POLL_S + POLL_SHARE * (looked - began), LONGEST_POLL_S):
                looked = time.monotonic()
                self._keep_within(began + self.bounds.seconds, self.bounds.seconds)
                if waiting is not None:
                    waiting(looked - began)
            if ready:
                if not (part := self.connection.recv(wanted - len(data))):
                    raise BrokenMessage("the connection has ended")
                data += part
                if wanted == len(data) == MESSAGE_HEAD.size:
                    wanted += parse_message_length(bytes(data))
        return bytes(data[MESSAGE_HEAD.size :])

    def _in_time(self) -> None:
        """Kill the process and raise ``Timeout`` if it is later than ``until``."""
        if time.monotonic() > self.until:
            self.kill()
            raise Timeout("the time of the judgement is over")

    def _keep_within(self, ends: float, seconds: float) -> None:
        """Kill the process and raise ``ProcessEnded`` or ``Timeout`` if it exceeds a limit. Raise ``BrokenMessage`` if
        it has ended. ``ends`` is the time at which the reply is due, which is ``seconds`` after the request.
        """
        if thread_states(self.pid) <= {"Z", "X"}:  # a child of it may hold the connection
            raise BrokenMessage("it has ended")
        if reason := self._exceeded_limit(ends, seconds):
            # Outside of a judgement there is no verdict that could be incomplete.
            late = self.until < math.inf and time.monotonic() > min(ends, self.until)
            programs = len(self.strays()) if late else 0
            self.kill()
            if programs:
                raise Timeout(f"{reason}, while {programs} programs that it has started run")
            raise ProcessEnded(reason)
        self._in_time()

    def _exceeded_limit(self, ends: float, seconds: float) -> str:
        """Return a text that describes the limit on time, memory, files, processes or threads that the process exceeds,
        or an empty string if it exceeds none. ``ends`` is the time at which the reply is due, which is ``seconds``
        after the request.
        """
        if self.run is not None:
            allowed, since = self.run()
            # A time that is not over yet was not written by code of ours, and the request as a whole is limited then.
            began = since if since <= time.monotonic() else ends - seconds
            seconds, ends = allowed, began + allowed
            if time.monotonic() <= ends:  # such a process is the user's own, and has no other limits
                return ""
        family = [self.pid, *self.strays(dead=True)]
        self._delays |= {pid: read_scheduler_usage(pid, pid).waited for pid in family}
        late = time.monotonic() - ends
        # On a busy machine the process and its compilers wait for a processor. That time is added to the limit.
        waited = min(MAX_WAITING_FACTOR * seconds, sum(self._delays.values()) - self._asked.waited)
        over = time.monotonic() > self.until and seconds + late - waited > max(HANGS * seconds, SILENT_S)
        if over or (late > 0 and late > waited):
            return f"no answer for {seconds + late:.3g} s"
        return self._base.excess(family, self.bounds.memory, self.bounds.processes)

    def _end_with_reason(self, how: str, *, lack: bool = False) -> ProcessEnded:
        """Kill the process, wait for it, and return the error that says how it ended. The error names the signal or the
        exit status, or else the reason ``how``. ``lack`` says that the machine lacks a resource.
        """
        ends = time.monotonic() + ENDING_S
        while not (gone := is_ending(self.pid)) and time.monotonic() < ends:
            time.sleep(0.001)
        self._signal(signal.SIGKILL)
        status = int(signal.SIGKILL)  # with the launcher, the process was killed
        with contextlib.suppress(ProcessEnded):
            status = self.launcher.ask(protocol.AwaitExit(self.pid)).value
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
            how = f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
        elif os.WIFEXITED(status):
            how = f"ended with exit status {os.WEXITSTATUS(status)}"
        elif gone:  # it cannot send SIGKILL itself
            return ProcessEnded("it was killed from outside: the memory of the machine may be used up", lack=True)
        words = read_last_line(self.output)[:200]
        return ProcessEnded(f"{how} ({words})" if words else how, lack=lack)

    def _signal(self, number: int) -> None:
        """Send the signal ``number`` to the process group, which no descendant can leave."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _wait_until_stopped(self) -> bool:
        """Wait until all threads of the process are stopped. Return whether they were stopped already at the first
        test. Raise ``ProcessEnded`` if the process has ended or cannot be stopped.
        """
        now = time.monotonic()
        ends = max(now + 1, min(now + 60, self.until))
        for look in count():
            if time.monotonic() > ends:
                break
            state = thread_states(self.pid)
            if state <= {"Z", "X"}:
                raise self._end_with_reason("it ended after its answer")
            if state <= {"T", "t", "Z", "X"}:
                return not look
            time.sleep(0.0001)  # a thread stops only when it next has a processor
        self.kill()
        raise ProcessEnded("it cannot be stopped")

    def read(self, address: int, length: int) -> bytearray:
        """Return ``length`` bytes of the process's memory at ``address``. Raise ``OSError`` if they cannot be read."""
        return read_process_memory(self.pid, address, length)

    def strays(self, *, still: bool = False, dead: bool = False) -> list[int]:
        """Return the process ids of the descendants of the sandboxed process, including those whose parent has ended.

        If ``still`` is true, all of them must be stopped, which allows a faster search. Otherwise ``dead`` says whether
        descendants that have ended, and for which nobody has waited, are listed as well.
        """
        with self.launcher.settled_prisoners() as prisoners:
            root = self.launcher.pid
            family = list_stopped_descendants(root) if still else list_descendants(root, dead=dead)
        others = prisoners - {self.pid}
        return [p for p, group in family.items() if p not in prisoners and group not in others]

    def end_strays(self, *, still: bool = True) -> int:
        """Kill the descendants of the sandboxed process, and return how many there were.

        ``still`` must be false if they may be running. If it is true, they are found faster.
        """
        strays = self.strays(still=still)
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(strays)

    def kill(self) -> None:
        """Kill the process and its descendants, and close its connection. Do nothing if it was killed before."""
        if self.pid not in self.launcher.prisoners:  # its id may belong to another process now
            return
        self._signal(signal.SIGKILL)
        with contextlib.suppress(OSError, MemoryError):  # no process can be looked at, or it has ended
            self.end_strays(still=False)
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessEnded):
            self.launcher.ask(protocol.AwaitExit(self.pid))
        self.launcher.prisoners.discard(self.pid)
        self.connection.close()
        self.output.close()
