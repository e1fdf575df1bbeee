"""Run untrusted code in a child process under limits, and keep every event that the child sent before it ended.

``stream(work)`` forks a child that runs ``work(send)``. Events arrive as JSON lines. A child that crashes, exits, waits
for ever, computes for ever or fills the memory ends in a ``ChildDeath`` with the cause. The fork is cheap, since torch
is imported already. The work runs on a thread of the child's own, because the OpenMP threads that served the forking
thread do not exist there.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from shiplap import torch_private
from shiplap.sandbox.fork import fork_process
from shiplap.sandbox.proc_filesystem import has_ended, resident_bytes, stat_fields, thread_states

ChildEvent = dict[str, Any]
SendEvent = Callable[[ChildEvent], None]
# Short enough for a prompt end, long enough not to take time from the child.
POLL_SECONDS = 0.02
PR_SET_PDEATHSIG = 1  # of prctl of Linux: the signal that a process gets when the thread that forked it ends
LONGEST_POLL_SECONDS = 1.0  # of a longer sleep of the watcher no more counts: the whole machine may have stood still
SLOW_SHARE = 8  # times the processor time between two events, after which calls that end are too slow for a check
STACK_BYTES = 64 << 20  # bytes: as much as a main thread usually has, and some
NOT_STARTED = "no process can be started"
STOPPED = "a signal ended the audit of the op"


_stopped = False


def stop_children() -> None:
    """End all child processes of this process that run work, and let none begin until ``allow_children`` is called."""
    global _stopped
    _stopped = True  # with no lock, which a second signal would find locked by the handler of the first


def allow_children() -> None:
    """Let child processes begin again."""
    global _stopped
    _stopped = False


@dataclass(frozen=True)
class ChildLimits:
    """The resources that a child process may use.

    Attributes:
        busy_s: the seconds of processor time between two events, or between the ends of two calls that the work
            counts. An event may set more (``"patience"``).
        idle_s: the seconds in which neither the child nor a process that it started computes anything. An event may set
            more (``"quiet"``).
        memory: the bytes of resident memory beyond those with which the child began.
    """

    busy_s: float = 15.0
    idle_s: float = 10.0
    memory: int = 2 << 30


@dataclass(frozen=True)
class ChildDeath:
    """The end of a child process that had not finished its work. ``how`` says in words how it ended, and ``output`` is
    the last line that it wrote to stdout or stderr.
    """

    how: str
    output: str = ""

    @property
    def is_slow(self) -> bool:
        """Whether the child was stopped because its calls took long, although each of them had ended."""
        return self.how.startswith("slow")

    @property
    def machine_fault(self) -> str:
        """Return the advice for an end that the machine or its user caused, and an empty text for an end by the child's
        work.
        """
        if self.how == STOPPED:
            return self.how
        if self.how.startswith(NOT_STARTED):
            return f"{self.how}: allow more processes and open files, or free some memory and disk"
        killed = self.how == "crashed with SIGKILL"
        return "the process was killed from outside, as by a machine without free memory: audit again" if killed else ""

    def __str__(self) -> str:
        """Return how the child ended, with the last line of its output if there is one."""
        return f"{self.how} ({self.output})" if self.output else self.how


def can_isolate(device: str = "cpu") -> bool:
    """Return whether samples can run on ``device`` in a fork of this process, so that a crash of a kernel does not end
    the audit.

    They can only on the CPU of a Linux machine, and only if this process has not initialised CUDA. If torch was built
    for CUDA, a fork must also be able to run a backward.
    """
    # CUDA does not work in a fork of a process that has as much as counted its devices (H100, torch 2.11, 2026-11-22).
    # Autograd of a torch for CUDA does not work in a fork once a compiled function has been differentiated here.
    if not hasattr(os, "fork") or not Path("/proc/self/stat").exists():
        return False
    if torch.cuda.is_initialized() or torch.device(device).type != "cpu":
        return False
    return torch.version.cuda is None or _can_differentiate_in_fork()


def _can_differentiate_in_fork() -> bool:
    """Return whether autograd works in a fork of this process. A fork is started, and runs a backward. Return True if
    the machine starts no fork: the child process of the audit, which is started next, then reports that.
    """
    try:
        child = fork_process()
    except OSError:
        return True
    if child == 0:
        status = 1
        try:
            # The backward may also hang in a fork, or end it with a long message of torch's on the standard error.
            os.close(2)
            signal.alarm(10)
            with torch.enable_grad():
                torch.ones(1, requires_grad=True).sum().backward()
            status = 0
        finally:
            # _exit runs none of the parent's handlers, which the fork has copied.
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def stream_events(
    work: Callable[[SendEvent], None], limits: ChildLimits | None = None, ended: Callable[[], int] = int
) -> Iterator[ChildEvent | ChildDeath]:
    """Yield the events that ``work(send)`` sends from a forked child. An event is a dict of values that JSON can
    represent.

    If the child cannot be started, raises an exception, exceeds one of ``limits`` or ends before ``work`` has returned,
    a ``ChildDeath`` is yielded last. If ``limits`` is None, they are those of ``ChildLimits()``. ``ended`` returns a
    number that changes whenever a call of the work has ended. A child in which calls end does not hang, and is slow at
    worst.
    """
    limits = limits or ChildLimits()
    if _stopped:
        yield ChildDeath(STOPPED)
        return
    with contextlib.ExitStack() as stack:
        ends: tuple[int, ...] = ()
        try:
            output = stack.enter_context(tempfile.TemporaryFile())
            reading, writing = ends = os.pipe()
            parent, child = os.getpid(), fork_process()
        except OSError as e:
            for end in ends:
                os.close(end)
            yield ChildDeath(f"{NOT_STARTED}: {e.strerror}")
            return
        if child == 0:
            os.close(reading)
            _run_child(work, writing, output, parent)
        # The reader only sees the end of the pipe once every copy of its writing end is closed.
        os.close(writing)
        try:
            yield from _ChildWatch(child, reading, limits, output, ended).events()
        finally:
            _kill_child(child)
            os.close(reading)


def run_isolated(
    work: Callable[[SendEvent], Any], limits: ChildLimits | None = None, ended: Callable[[], int] = int
) -> Any:
    """Return the result of ``work(send)`` in a forked child, after a round trip through JSON. If the child dies, raises
    an exception or exceeds one of ``limits``, return its ``ChildDeath``. If ``limits`` is None, they are those of
    ``ChildLimits()``. ``ended`` is as in ``stream_events``.
    """
    for event in stream_events(lambda send: send({"kind": "answer", "answer": work(send)}), limits, ended):
        if isinstance(event, ChildDeath):
            return event
        if event["kind"] == "answer":
            return event["answer"]
    return ChildDeath("no answer came")


def _run_child(work: Callable[[SendEvent], None], writing: int, output: IO[bytes], parent: int) -> None:
    """Run ``work`` in the forked child and end the process, so that this function never returns. Events are written to
    the file descriptor ``writing`` of a pipe. What the process prints is written to the file ``output``. The child ends
    with the thread of the process ``parent`` that has forked it.
    """
    status = 1
    try:
        gc.freeze()  # garbage of the program stays: a destructor could wait for a thread that the fork does not have
        os.setsid()  # its own children end with it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a call without an end must not stay
        if os.getppid() != parent:  # which was killed before that call
            return
        # Crashes are expected here, and a core file of each would take space.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for stream_ in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream_.flush()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        with contextlib.suppress(Exception):
            faulthandler.disable()  # a parent's handler writes to the parent's file
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        torch_private.forget_compile_threads()
        lock = threading.Lock()

        def send(event: ChildEvent) -> None:
            """Write one event as a line of JSON to the pipe that the parent process reads."""
            line = json.dumps(event).encode() + b"\n"
            # Threads of the work may send at the same time.
            with lock:
                while line:
                    # A write to a pipe may be cut short.
                    line = line[os.write(writing, line) :]

        def run() -> None:
            """Run ``work``. At its end, send an event that says that it is done or which exception it raised."""
            nonlocal status
            try:
                work(send)
                send({"kind": "done"})
                status = 0
            except BaseException as e:
                send({"kind": "raised", "text": f"{type(e).__name__}: {e}"[:400]})

        # The setting is for this thread alone. Threads that the work starts get the usual stack.
        before = threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=run)
        thread.start()
        threading.stack_size(before)
        thread.join()
    finally:
        os._exit(status)


class _ChildWatch:
    """The parent's view of a child process. It reads the events of the child, and measures its processor time and its
    memory.
    """

    def __init__(
        self,
        child: int,
        reading: int,
        limits: ChildLimits,
        output: IO[bytes],
        ended: Callable[[], int] = int,
    ) -> None:
        """Start to watch the process ``child``, whose events come through the pipe ``reading`` and whose output is in
        the file ``output``. ``limits`` are the limits of its time and memory. The number that ``ended`` returns
        changes whenever a call of its work has ended.
        """
        self.ended, self.seen_ended = ended, ended()
        self.child, self.reading, self.limits, self.output = child, reading, limits, output
        self.rest = b""
        self.base = resident_bytes(child)
        self.busy_s, self.idle_s = limits.busy_s, limits.idle_s
        self.looked_at, self.still_s = time.monotonic(), 0.0  # the last look, and the time without any work until then
        self.began = self.used = self.event_began = 0.0

    def events(self) -> Iterator[ChildEvent | ChildDeath]:
        """Yield the events of the child as they arrive. If it exceeds a limit, raises an exception or exits before it
        is done, a ``ChildDeath`` is yielded last.
        """
        while True:
            ready, _, _ = select.select([self.reading], [], [], POLL_SECONDS)
            if _stopped:
                _kill_child(self.child)
                yield ChildDeath(STOPPED)
                return
            if not ready:
                if self._has_ended():  # a process that another thread has forked may hold the pipe open
                    yield ChildDeath(self._describe_end(), self._last_output_line())
                    return
                if reason := self._exceeded_limit():
                    _kill_child(self.child)
                    yield ChildDeath(reason, self._last_output_line())
                    return
                continue
            chunk = os.read(self.reading, 1 << 16)
            if not chunk:
                yield ChildDeath(self._describe_end(), self._last_output_line())
                return
            for line in self._lines(chunk):
                event = json.loads(line)
                if event["kind"] == "done":
                    return
                if event["kind"] == "raised":
                    yield ChildDeath(f"raised {event['text']}", self._last_output_line())
                    return
                self._apply_event_limits(event)
                yield event
                self.looked_at, self.still_s = time.monotonic(), 0.0  # without the time that the reader took meanwhile

    def _has_ended(self) -> bool:
        """Return whether the child has ended and everything that it has sent was read."""
        stat = stat_fields(self.child)
        return (not stat or has_ended(stat)) and not select.select([self.reading], [], [], 0)[0]

    def _lines(self, chunk: bytes) -> list[bytes]:
        """Return the complete lines among the bytes that have arrived, of which ``chunk`` are the latest. An incomplete
        line is kept for the next call.
        """
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        return lines

    def _apply_event_limits(self, event: ChildEvent) -> None:
        """Set the time limits for the next event to those in ``event`` (``patience`` and ``quiet``, in seconds), or to
        the usual ones. The measurement of processor time starts again.
        """
        self.busy_s = float(event.get("patience", self.limits.busy_s))
        self.idle_s = float(event.get("quiet", self.limits.idle_s))
        self.began = self.used = self.event_began = _processor_seconds(self.child)

    def _exceeded_limit(self) -> str:
        """Return a message that names the limit of memory or time that the child has exceeded, or an empty string if it
        exceeds none.
        """
        # The child shares the parent's pages, so only its growth counts.
        if resident_bytes(self.child) - self.base > self.limits.memory:
            return f"memory exhausted: more than {self.limits.memory / 2**30:.3g} GiB resident"
        now = time.monotonic()
        self.still_s += min(now - self.looked_at, LONGEST_POLL_SECONDS)
        self.looked_at = now
        used = _processor_seconds(self.child)
        if (ended := self.ended()) != self.seen_ended:
            self.seen_ended, self.began = ended, used
        if used - self.event_began > SLOW_SHARE * self.busy_s:
            return f"slow: {SLOW_SHARE * self.busy_s:g} s of processor time for one sample"
        if used - self.began > self.busy_s:
            return f"hangs: {self.busy_s:g} s of processor time and no end"
        if used > self.used:
            self.used, self.still_s = used, 0.0
        # Reading all of /proc is slow, so it is done only when the child itself stands still.
        elif self.still_s > self.idle_s / 2:
            if (others := _session_seconds(self.child)) > self.used:
                self.used, self.still_s = others, 0.0
            elif "R" in thread_states(self.child):  # it waits for a processor of a busy machine
                self.still_s = 0.0
            elif self.still_s > self.idle_s:
                return f"deadlock: nothing has run for {self.idle_s:g} s"
        return ""

    def _describe_end(self) -> str:
        """Wait for the end of the child. Return a message that names the signal or the exit status with which
        it ended.
        """
        _, status = os.waitpid(self.child, 0)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return f"crashed with {signal.Signals(number).name}"
        return f"the process exited with status {os.WEXITSTATUS(status)}"

    def _last_output_line(self) -> str:
        """Return the last non-empty line of the child's output, cut after 200 characters. Return an empty string if
        there is no output.
        """
        size = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, size - 2000))
        lines = [x.strip() for x in self.output.read().decode(errors="replace").splitlines() if x.strip()]
        return lines[-1][:200] if lines else ""


def _kill_child(child: int) -> None:
    """Kill the child and its process group, and wait until the child has ended."""
    # The group first. The child alone is left if it died before it could make a session of its own.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def _processor_seconds(pid: int | str) -> float:
    """Return the processor time in seconds that a process has used, or 0.0 if the process does not exist."""
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _session_seconds(leader: int) -> float:
    """Return the processor time in seconds of the processes in the session of ``leader`` and of all their descendants.
    Descendants such as compilers may have sessions of their own.
    """
    fields = {int(entry): stat for entry in os.listdir("/proc") if entry.isdigit() and (stat := stat_fields(entry))}
    family = {pid for pid, stat in fields.items() if pid == leader or int(stat[3]) == leader}
    grown = family
    while grown:
        grown = {pid for pid, stat in fields.items() if int(stat[1]) in family} - family
        family |= grown
    ticks = sum(sum(map(int, fields[pid][11:15])) for pid in family)
    return ticks / os.sysconf("SC_CLK_TCK")
