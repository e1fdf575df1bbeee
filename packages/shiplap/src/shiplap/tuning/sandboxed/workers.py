"""The processes of an op that is tuned, and the messages to them.

Each kernel has a locked process of its own, which starts when it is needed, and again after it has ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Thread

from msgspec import field

from shiplap.sandbox.candidate import CandidateError, TargetProcess
from shiplap.sandbox.protocol import Done, ImportModule, Message, Number, Reply, Request
from shiplap.sandbox.request_errors import ProcessEnded
from shiplap.sandbox.supervisor import Bounds, SandboxLauncher
from shiplap.tuning.measure import RacePlan, Timing
from shiplap.tuning.verify import VerifyOutcome

CHILD = "shiplap.tuning.child"  # the module that serves the messages


class CandidateName(Message, frozen=True):
    """The name of a candidate, which consists of its kernel and its config."""

    kernel: str
    config: dict[str, bool | int | float | str]


class OpenTask(Request[Done], frozen=True):
    """A request to import an op, draw the inputs of a task and find its candidates.

    ``environment`` and ``folder`` are the environment variables and the working folder of a worker, which is not
    sandboxed. They may hold secrets, and are empty for a sandboxed process.
    """

    op: str
    identity: str
    modules: list[str]
    file: str
    path: list[str]
    recipe: str
    device: str
    provider: str
    capture: str
    threads: int
    candidates: list[CandidateName]
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = ""


class CompileCandidates(Request[Number], frozen=True):
    """A request to start compiling the candidates at ``indices`` in parallel. The reply is the number of compilations
    that were started.
    """

    indices: list[int]


class FinishCompiling(Request[Done], frozen=True):
    """A request to start no further compilation, and to wait for the running ones."""


class Verified(Reply, frozen=True):
    """The reply with the outcome of a verification."""

    outcome: VerifyOutcome


class VerifyCandidate(Request[Verified], frozen=True):
    """A request to compare the candidate at ``index`` with the reference."""

    index: int


class Raced(Reply, frozen=True):
    """The reply with the timings of candidates by index, and the reason for each candidate that has none."""

    timings: dict[int, Timing]
    failed: dict[int, str]


class RaceCandidates(Request[Raced], frozen=True):
    """A request to time the candidates at ``indices`` alternately, within the limits of ``plan``."""

    indices: list[int]
    plan: RacePlan


class ProcessUnavailable(Exception):
    """The error that a process cannot be started, or that it cannot import the op."""


class KernelProcesses:
    """The sandboxed processes of one op, one for each of its kernels. They are killed when another op is opened."""

    def __init__(self, launcher: SandboxLauncher, seconds: float) -> None:
        """Make an object without processes. ``launcher`` starts them later. ``seconds`` is the time limit for one
        request to a process.
        """
        self.launcher, self.seconds = launcher, seconds
        self.started, self._ready = 0, False
        self.doubted = False  # whether anything was refused, or ended by itself
        self._opening: OpenTask | None = None
        self._running: dict[str, tuple[TargetProcess, OpenTask | None]] = {}
        self._failed: dict[str, str] = {}  # kernel → why its process was not made ready

    def open(self, opening: OpenTask, libraries: list[str]) -> None:
        """Set the task whose candidates the processes run. If it has the op of the earlier task, the processes are
        kept, and load the new task when they are next used. Otherwise they are killed. ``libraries`` are folders that
        the processes may read.
        """
        if self._opening is None or self._opening.identity != opening.identity:
            self.close()
        self._opening = opening
        self._failed.clear()
        places = [*(p for p in opening.path if p), *libraries]
        self._places = [*places, *([str(Path(opening.file).parent)] if opening.file else [])]

    def close(self) -> None:
        """Kill the processes of all kernels. Other threads may start or load some meanwhile."""
        for kernel in tuple(self._running):
            self._kill(kernel)

    def end_process(self, kernel: str) -> None:
        """Kill the process of this kernel after an error. If the kernel has no process, none is killed."""
        self.doubted = True
        self._kill(kernel)

    def _kill(self, kernel: str) -> None:
        """Kill the process of this kernel, if it has one."""
        witness, _ = self._running.pop(kernel, (None, None))
        if witness is not None:
            witness.prisoner.kill()

    def prepare(self, patience: Mapping[str, float]) -> None:
        """Start processes for as many of the kernels in ``patience`` as there are processors, and load the op in them
        in parallel.

        ``patience`` maps names of kernels to the factor by which the time limit of their process is multiplied. An
        error is stored, and is raised when the process of that kernel is requested.
        """
        first, *others = list(patience)[: len(os.sched_getaffinity(0))]
        for kernel in (first, *others):
            self._try(partial(self._start, kernel, patience[kernel]), kernel)
        beside = [Thread(target=self._try, args=(partial(self._load, k), k), daemon=True) for k in others]
        for thread in beside:
            thread.start()
        # The first kernel is loaded in this thread, which would otherwise only wait.
        self._try(partial(self._load, first), first)
        for thread in beside:
            thread.join()

    def _try(self, step: Callable[[], object], kernel: str) -> None:
        """Run ``step``, which starts or loads the process of a kernel. Do nothing if a step for this kernel has failed
        before.

        If the step fails, the process is killed and the reason is stored, which ``process_for`` raises.
        """
        if kernel in self._failed:
            return
        try:
            step()
        except (ProcessEnded, CandidateError) as e:
            self.end_process(kernel)
            self._failed[kernel] = str(e)

    def process_for(self, kernel: str, patience: float = 1.0) -> TargetProcess:
        """Return the process of the kernel ``kernel``, in which the task is open. Start it if necessary. Raise
        ``ProcessUnavailable`` if that fails.

        ``patience`` is the factor by which the time limit of a newly started process is multiplied.
        """
        if kernel in self._failed:
            # Raised once: the next request tries again.
            raise ProcessUnavailable(self._failed.pop(kernel))
        try:
            self._start(kernel, patience)
            return self._load(kernel)
        except (ProcessEnded, CandidateError) as e:
            self.end_process(kernel)
            raise ProcessUnavailable(str(e)) from None

    def _start(self, kernel: str, patience: float) -> None:
        """Start the sandboxed process in which this kernel's candidates run. Do nothing if it runs already. Its time
        limit is multiplied by ``patience``.
        """
        if kernel in self._running:
            return
        assert self._opening is not None
        if not self._ready:
            # Processes are forked from the launcher, so one import there serves all of them.
            self.launcher.ask(ImportModule(CHILD))
            self._ready = True
        bounds = Bounds(seconds=max(self.seconds * patience, 1.0))
        self._running[kernel] = (
            TargetProcess(self.launcher.start(self._places, bounds, threads=self._opening.threads), declines=True),
            None,
        )
        self.started += 1

    def _load(self, kernel: str) -> TargetProcess:
        """Make the process of a kernel import the op and open the present task, unless it has this task open, and
        return the process. Raise ``ProcessEnded`` if another thread has ended it.
        """
        witness, opened = self._running.get(kernel, (None, None))
        if witness is None:
            raise ProcessEnded("the budget was spent")
        if (opening := self._opening) is not None and opened != opening:
            witness.request(opening, "import")
            self._running[kernel] = witness, opening
        return witness
