"""Run candidates in a worker process. A crash, a hang or an illegal access ends the worker, and a new one starts.

The op is named by module or file, never pickled. An op that cannot be imported, such as one declared in a function or a
notebook, is tuned in this process, with a notice.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from shiplap import safe_io
from shiplap.cached_property import cached_property
from shiplap.dispatch import Op
from shiplap.errors import error, notice
from shiplap.sandbox.launcher_pool import IdleLauncher, standby
from shiplap.tuning.bench import BEAT, COMPILERS, Bench, ConfirmedClaim, LocalBench
from shiplap.tuning.measure import RacePlan, Timing
from shiplap.tuning.sandboxed.bench import JudgedBench, can_send_arguments
from shiplap.tuning.sandboxed.workers import KernelProcesses
from shiplap.tuning.verify import VerifyOutcome

if TYPE_CHECKING:
    from shiplap.tuning.selector import SelectionTask

REPLY = safe_io.ParseLimits(size=1 << 20)
TIMEOUT = 60.0  # seconds that one run, with its compilation, may take; the reference may take ten times as long


T = TypeVar("T")


class WorkerDied(Exception):
    """Raised when the worker ended while candidate ``index`` ran (-1: while none ran)."""

    def __init__(self, index: int, how: str) -> None:
        super().__init__(how)
        self.index, self.how = index, how


class RaceReply(msgspec.Struct):
    """The reply of a worker to a race, by the indices of candidates."""

    timings: dict[int, Timing] = {}
    failed: dict[int, str] = {}
    error: str = ""


def convert_reply(data: Any, form: type[T]) -> T:
    """Return ``data`` of a worker, converted to this type. Raises Died if it does not fit."""
    try:
        return msgspec.convert(data, form, str_keys=True)
    except msgspec.ValidationError as e:
        raise WorkerDied(-1, f"its process answered what is no answer: {e}") from None


class WorkerProcess:
    """A context with a worker process, which starts when it is needed and starts again after it has died."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self.launcher = IdleLauncher()
        self.hosts = KernelProcesses(self.launcher, timeout)
        self.started, self._closed = 0, False
        self._process: subprocess.Popen[bytes] | None = None
        self._open = ""
        self._stderr: IO[bytes] | None = None
        self._beat: mmap.mmap | None = None

    def __enter__(self) -> WorkerProcess:
        self.launcher = standby.take()
        self.hosts = KernelProcesses(self.launcher, self.timeout)
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.stop()
        # A worker is not sandboxed, and its candidates could reach other processes of the user.
        if failure is None and not self._closed and not self.started and not self.hosts.doubted:
            self.hosts.close()
            standby.leave(self.launcher)
        else:
            self.launcher.close()

    def bench(self, provider: str = "") -> Callable[[SelectionTask], Bench]:
        """Return a maker of benches for :func:`shiplap.tuning.select`."""

        def make(task: SelectionTask) -> Bench:
            reason = why_not_importable(task.op, provider)
            if not reason:
                bench = (
                    self._judged(task)
                    if not provider and can_send_arguments(task.inputs)
                    else RemoteBench(self, task, provider)
                )
                reason = bench.open()
                if not reason:
                    return bench
            notice(
                f"tune in process {task.op.spec.name}",
                f"{task.op.spec.name} is tuned in this process, where a kernel that crashes takes it along: {reason}",
            )
            return LocalBench(task.inputs, task.candidates, task.options.capture)

        return make

    def _judged(self, task: SelectionTask) -> JudgedBench:
        return JudgedBench(self.hosts, task.op, task.inputs, task.candidates, _opening_message(task, ""))

    def ask(self, opening: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to ``request``, from a worker that was opened with ``opening``. Raises Died."""
        text = json.dumps(opening)
        if self._process is None or self._process.poll() is not None:
            self._start()
        if self._open != text:
            reply = self._exchange(text)
            if "error" in reply:
                return {"closed": reply["error"]}
            self._open = text
        return self._exchange(json.dumps(request)) if request else {}

    def _start(self) -> None:
        self.stop()
        if self._closed:
            raise WorkerDied(-1, "the budget was spent")
        handle = os.memfd_create("shiplap-tune")
        os.ftruncate(handle, BEAT.size)
        self._beat = mmap.mmap(handle, BEAT.size)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        # The worker must neither record the calls of a measurement nor use the choices that are about to be replaced.
        environment = {**os.environ, "SHIPLAP_RECORD": "", "SHIPLAP_TUNED": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shiplap.tuning.worker", str(handle)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            pass_fds=[handle],
            env=environment,
        )
        os.close(handle)
        self._reset_beat()
        self.started += 1

    def close(self) -> None:
        """End the worker and start no other. A thread that waits for the worker gets Died."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        self.launcher.finish()

    def stop(self) -> None:
        """End the worker if it runs."""
        process, self._process, self._open = self._process, None, ""
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, self._stderr):
                if stream is not None:
                    stream.close()

    def _reset_beat(self) -> None:
        assert self._beat is not None
        BEAT.pack_into(self._beat, 0, -1, time.monotonic())

    def _exchange(self, text: str) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        self._reset_beat()
        try:
            process.stdin.write(text.encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._describe_death() from None
        reply = self._reply(process.stdout.fileno())
        if reply.get("fatal"):
            self.stop()
            if "error" in reply:
                raise WorkerDied(convert_reply(reply.get("index"), int), convert_reply(reply["error"], str))
        return reply

    def _reply(self, pipe: int) -> dict[str, Any]:
        """Return the next line of the worker, which has to be one JSON object. Raises Died otherwise.

        A candidate in the worker may have written to the same pipe, so the line is not trusted.
        """
        line = bytearray()
        while not line.endswith(b"\n") and len(line) <= REPLY.size:
            while not select.select([pipe], [], [], 0.2)[0]:
                self._check_time_limit()
            part = os.read(pipe, 1 << 16)
            if not part:
                raise self._describe_death()
            line += part
        try:
            return convert_reply(safe_io.parse_json(bytes(line), REPLY), dict[str, Any])
        except (ValueError, WorkerDied) as e:
            index, _ = self._read_beat()
            self.stop()
            raise WorkerDied(index, f"its process answered what is no answer: {e}") from None

    def _read_beat(self) -> tuple[int, float]:
        assert self._beat is not None
        index, since = BEAT.unpack_from(self._beat, 0)
        return index, since

    def _check_time_limit(self) -> None:
        index, since = self._read_beat()
        # Imports and the reference (index 0) take longer than a kernel.
        limit = self.timeout * (10 if index in (-1, 0) else 1)
        late = time.monotonic() - since
        if late > limit or not late > -limit:  # a time that is not over yet was not written by the worker
            self.stop()
            raise WorkerDied(index, f"no answer for {limit:g} s: it hangs, or is hopelessly slow")

    def _describe_death(self) -> WorkerDied:
        index, _ = self._read_beat()
        assert self._process is not None
        code = self._process.wait()
        how = f"ended the process ({signal.Signals(-code).name if code < 0 else f'exit status {code}'})"
        assert self._stderr is not None
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        self.stop()
        return WorkerDied(index, ": ".join([how, *(line[:200] for line in last)]))


class RemoteBench:
    """A bench whose candidates run in the worker of an ``WorkerProcess``."""

    @property
    def confirms(self) -> tuple[str, str]:
        if can_send_arguments(self.task.inputs):
            return "ok", ""
        return (
            "skip",
            "these arguments cannot be sent to a locked process: the worker is a process of its own, unlocked",
        )

    def __init__(self, isolation: WorkerProcess, task: SelectionTask, provider: str) -> None:
        self.isolation, self.task = isolation, task
        self._beside = True  # candidates may be compiled side by side
        self._begun = 0  # which worker, counted as they are started, was the last to begin that
        self._opening = _opening_message(task, provider)

    def open(self) -> str:
        """Return the reason why the worker cannot serve the task, or an empty text. SL611 if the worker died."""
        try:
            return str(self.isolation.ask(self._opening, {}).get("closed", ""))
        except WorkerDied as e:
            raise self._lost_worker_error(e) from e

    def compile(self, indices: Sequence[int]) -> int:
        begun = 0
        if self._beside:
            with suppress(WorkerDied):
                begun = convert_reply(self._ask({"do": "compile", "indices": list(indices)}).get("begun", 0), int)
        if begun:
            self._begun = self.isolation.started
        return begun

    @property
    def _compiling(self) -> bool:
        """Whether the current worker may be compiling candidates that are not verified yet."""
        return self._begun == self.isolation.started

    def quiet(self) -> None:
        if self._compiling:
            with suppress(WorkerDied):  # a dead worker compiles nothing
                self._ask({"do": "quiet"})
            self._begun = 0

    def verify(self, index: int) -> VerifyOutcome:
        try:
            reply = self._ask({"do": "verify", "index": index})
            return convert_reply({"problem": reply["error"]} if "error" in reply else reply, VerifyOutcome)
        except WorkerDied as e:
            if not self._compiling:
                return VerifyOutcome(e.how)
            self._beside, self._begun = False, 0  # it may have been another one's compiler: now one after another
            return self.verify(index)

    def race(self, indices: Sequence[int], plan: RacePlan) -> tuple[dict[int, Timing], dict[int, str]]:
        left, failed = list(indices), {}
        while left:
            try:
                reply = self._ask({"do": "race", "indices": left, "plan": asdict(plan)})
                raced = convert_reply(reply, RaceReply)
            except WorkerDied as e:
                if e.index == COMPILERS:  # of candidates that are not in this race, or are right all the same
                    self._beside, self._begun = False, 0
                    continue
                if e.index not in left:
                    raise self._lost_worker_error(e) from e
                failed[e.index] = e.how
                left.remove(e.index)
                continue
            if raced.error:
                raise error("SL611", where=self.task.op.spec.name, got=raced.error, expected="timings")
            return {i: t for i, t in raced.timings.items() if i in left}, failed | raced.failed
        return {}, failed

    def confirm(
        self, claims: Mapping[int, float], seconds: float, believed: Set[int] = frozenset()
    ) -> dict[int, ConfirmedClaim]:
        if not can_send_arguments(self.task.inputs):
            return dict.fromkeys(claims, ConfirmedClaim())
        return self._judged.confirm(claims, seconds, believed)

    def duel(self, indices: Sequence[int], claimed: float, seconds: float) -> tuple[dict[int, float], dict[int, str]]:
        return self._judged.duel(indices, claimed, seconds) if can_send_arguments(self.task.inputs) else ({}, {})

    @cached_property
    def _judged(self) -> JudgedBench:
        task = self.task
        return JudgedBench(self.isolation.hosts, task.op, task.inputs, task.candidates, self._opening)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        reply = self.isolation.ask(self._opening, request)
        if "closed" in reply:
            raise error("SL611", where=self.task.op.spec.name, got=reply["closed"], expected="the op, as before")
        return reply

    def _lost_worker_error(self, e: WorkerDied) -> Exception:
        expected = "a worker that imports the op and draws its inputs"
        return error("SL611", where=self.task.op.spec.name, got=e.how, expected=expected)


def _opening_message(task: SelectionTask, provider: str) -> dict[str, Any]:
    """Return the message that opens a task in another process."""
    op = task.op
    return {
        "do": "open",
        "op": op.spec.name,
        "identity": op.identity,
        "modules": _declaring_modules(op),
        "file": op.file,
        "path": sys.path,
        "recipe": str(task.inputs.recipe),
        "device": task.inputs.device,
        "provider": provider,
        "capture": task.options.capture,
        "threads": torch.get_num_threads(),
        "candidates": [{"kernel": c.kernel, "config": c.config.as_dict()} for c in task.candidates],
    }


def why_not_importable(op: Op, provider: str) -> str:
    if "<locals>" in op.reference.__qualname__ or "<locals>" in provider:
        return "it is declared inside a function"
    if not (_declaring_modules(op) or os.path.isfile(op.file)):
        return "it is not declared in a file"
    return ""


def _declaring_modules(op: Op) -> list[str]:
    """Return the modules that declare the op, its kernels and its sampler."""
    functions: list[Any] = [op.reference, op.sampler]
    functions += [k.function for kernels in op.kernels.values() for k in kernels]
    functions += [getattr(f, "fn", f) for f in functions]  # a Triton kernel wraps its function
    names = (getattr(f, "__module__", None) for f in functions if f is not None)
    return [n for n in dict.fromkeys(names) if n and n != "__main__" and not n.startswith("shiplap_target_")]
