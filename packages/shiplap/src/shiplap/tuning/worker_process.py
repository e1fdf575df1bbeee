"""Run candidates in a worker process. A crash, a hang or an illegal access ends the worker, and a new one starts.

The op is named by module or file, never pickled. An op that cannot be imported, such as one declared in a function or a
notebook, is tuned in locked forks of this process. Where that is not possible it is tuned in this process, with a
notice, and the choice is unverified.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from shiplap.cached_property import cached_property
from shiplap.dispatch import Op
from shiplap.errors import ShiplapError, error, notice
from shiplap.sandbox.forked_launcher import ForkedLauncher
from shiplap.sandbox.launcher_pool import IdleLauncher, standby
from shiplap.sandbox.protocol import Heartbeat, ImportModule, Reply, Request
from shiplap.sandbox.request_errors import ProcessEnded, RequestFailed
from shiplap.sandbox.supervisor import Bounds, SandboxedProcess
from shiplap.tuning.bench import COMPILERS, Bench, ConfirmedClaim, LocalBench
from shiplap.tuning.measure import RacePlan, Timing
from shiplap.tuning.sandboxed import workers
from shiplap.tuning.sandboxed.bench import JudgedBench, can_send_arguments
from shiplap.tuning.sandboxed.workers import CHILD, KernelProcesses, OpenTask
from shiplap.tuning.verify import VerifyOutcome

if TYPE_CHECKING:
    from shiplap.tuning.selector import SelectionTask

TIMEOUT = 60.0  # seconds that one run, with its compilation, may take
PATIENCE = 10.0  # times as long for imports and for the reference
ReplyT = TypeVar("ReplyT", bound=Reply)


class WorkerDied(Exception):
    """The error that the worker ended while the candidate ``index`` ran. The index is -1 if none ran, and -2 if
    compilers ran.
    """

    def __init__(self, index: int, how: str) -> None:
        """Make the error for the candidate at ``index``. ``how`` is a text that says how the worker ended."""
        super().__init__(how)
        self.index, self.how = index, how


class WorkerProcess:
    """A context manager that owns a worker process, in which candidates run. The worker starts when it is needed, and a
    new one starts after it has died. Sandboxed processes of kernels belong to it, too.

    When a budget is spent, one thread ends all of them while another one still uses them or starts further ones.
    """

    def __init__(self, timeout: float = TIMEOUT) -> None:
        """Make the owner of a worker process, which is not started yet. ``timeout`` is the limit in seconds for one run
        of a candidate, including its compilation.
        """
        self.timeout = timeout
        self.launcher = IdleLauncher()
        self.hosts = KernelProcesses(self.launcher, timeout)
        self._fork: tuple[ForkedLauncher, KernelProcesses] | None = None
        self.started, self._closed = 0, False
        self._worker: SandboxedProcess | None = None
        self._heartbeat: Heartbeat | None = None
        self._opened: OpenTask | None = None
        # Held while the fork, the worker and what belongs to them change, and never while a process is awaited.
        self._guard = threading.Lock()

    def __enter__(self) -> WorkerProcess:
        """Take a launcher of processes from the pool of idle ones, and return this object."""
        self.launcher = standby.take()
        self.hosts = KernelProcesses(self.launcher, self.timeout)
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """End all processes. If no code of candidates can have changed the launcher of processes, it is given back to
        the pool. Otherwise it is ended, too.
        """
        self.end_worker()
        self._end_fork()
        # A worker is not sandboxed, and its candidates could reach other processes of the user.
        if failure is None and not self._closed and not self.started and not self.hosts.doubted:
            self.hosts.close()
            standby.leave(self.launcher)
        else:
            self.close()  # for good: an interrupted tuning may go on in a thread of its own

    def bench(self, provider: str = "") -> Callable[[SelectionTask], Bench]:
        """Return a function that makes the bench for a task. A bench verifies and times candidates.

        The bench uses sandboxed processes or a worker if these can import the op. ``provider`` names a function that
        lists candidates, as ``module:name``, or is empty for the op's own kernels. If the op or this function cannot be
        imported, the bench uses sandboxed forks of this program. If that fails as well, it uses this process and issues
        a notice.
        """

        def make(task: SelectionTask) -> Bench:
            """Return the bench for ``task`` that isolates candidates best. It uses sandboxed processes or the worker if
            possible, and otherwise sandboxed forks of this program. If these cannot be started either, it uses this
            process.
            """
            reason = why_not_importable(task.op, provider)
            if not reason:
                bench = (
                    self._judged(task, self.hosts)
                    if not provider and can_send_arguments(task.inputs)
                    else RemoteBench(self, task, provider)
                )
                reason = bench.open()
                if not reason:
                    return bench
            if not provider and can_send_arguments(task.inputs):
                try:
                    forked = self._judged(task, self._forked_hosts())
                    if not (why := forked.open()):
                        return forked
                except (ShiplapError, ProcessEnded, OSError) as e:
                    why = " ".join(str(e).split())
                reason += f", and no fork serves it: {why}"[:200]
            notice(
                f"tune in process {task.op.spec.name}",
                f"{task.op.spec.name} is tuned in this process, where a kernel that crashes takes it along, and its "
                f"choice is unverified: {reason}",
            )
            return LocalBench(task.inputs, task.candidates, task.options.capture)

        return make

    def _judged(self, task: SelectionTask, hosts: KernelProcesses) -> JudgedBench:
        """Return a bench that runs each kernel of the task in a sandboxed process, which ``hosts`` starts.

        Such a process may read only system files and the folders of the op, and write only to its own folder.
        """
        return JudgedBench(hosts, task.op, task.inputs, task.candidates, _opening_message(task, ""))

    def _forked_hosts(self) -> KernelProcesses:
        """Make a new fork of this program as it is now, and return the set of sandboxed processes that start from it.
        An earlier fork is ended. Raise ``ProcessEnded`` if this object is closed.
        """
        self._end_fork()
        launcher = ForkedLauncher()
        hosts = KernelProcesses(launcher, self.timeout)
        with self._guard:
            if self._closed:
                raise ProcessEnded("the budget was spent")
            self._fork = launcher, hosts
        return hosts

    def _end_fork(self) -> None:
        """End the fork of this program and the processes that started from it. Do nothing if there is no fork."""
        with self._guard:
            fork, self._fork = self._fork, None
        if fork is not None:
            launcher, hosts = fork
            hosts.close()
            launcher.finish()

    def open_task(self, opening: OpenTask) -> None:
        """Make the worker import the op of a task and draw its inputs. Start the worker if necessary. Raise
        ``WorkerDied`` if the worker ends, and ``RequestFailed`` if it cannot open the task.
        """
        if self._worker is None:
            self._start()
        heartbeat = self._heartbeat
        if self._opened != opening and heartbeat is not None:
            self.ask(opening, heartbeat.handle)
            with self._guard:
                if self._heartbeat is heartbeat:  # else another thread has ended it, and the next one opens the task
                    self._opened = opening

    def ask(self, message: Request[ReplyT], handle: int = -1) -> ReplyT:
        """Send a message to the worker and return its reply. ``handle`` is a file descriptor to send with it, or -1. If
        the worker ends, raise ``WorkerDied`` with the index of the candidate that ran. Raise ``RequestFailed`` for an
        error in the worker.
        """
        with self._guard:
            worker, heartbeat = self._worker, self._heartbeat
        if worker is None or heartbeat is None:
            raise WorkerDied(-1, "the budget was spent" if self._closed else "it was ended")
        heartbeat.begin_run(-1)
        try:
            return worker.request_reply(message, handle)[0]
        except ProcessEnded as e:
            index, _ = heartbeat.read_run()
            self.end_worker()
            raise WorkerDied(index, str(e)) from None

    def _start(self) -> None:
        """Start the worker, a process with the rights of the user and without a sandbox. Raise ``WorkerDied`` if it
        does not start.

        The worker writes the start of each run to shared memory, by which this process finds candidates that hang.
        """
        bounds = Bounds(PATIENCE * self.timeout, memory=sys.maxsize, processes=sys.maxsize)
        try:
            self.launcher.ask(ImportModule(CHILD))
            worker = self.launcher.start(bounds=bounds, locked=False)
        except ProcessEnded as e:
            raise WorkerDied(-1, "the budget was spent" if self._closed else str(e)) from None
        heartbeat = Heartbeat()

        def current_run() -> tuple[float, float]:
            """Return the seconds that the present run in the worker may take, and the time (by ``time.monotonic``) at
            which it began.
            """
            index, since = heartbeat.read_run()
            # Imports and the reference (index 0) take longer than a kernel.
            return self.timeout * (PATIENCE if index in (-1, 0) else 1), since

        worker.run = current_run
        with self._guard:
            self._worker, self._heartbeat = worker, heartbeat
            self.started += 1

    def close(self) -> None:
        """End the worker and the launchers of sandboxed processes for good. A thread that waits for the worker gets
        ``WorkerDied``.
        """
        with self._guard:
            self._closed, fork = True, self._fork
        self.launcher.finish()
        if fork is not None:
            fork[0].finish()

    def end_worker(self) -> None:
        """End the worker and release its shared memory. Do nothing if there is no worker."""
        with self._guard:
            worker, heartbeat = self._worker, self._heartbeat
            self._worker = self._heartbeat = self._opened = None
        if worker is not None:
            worker.kill()
        if heartbeat is not None:
            os.close(heartbeat.handle)

    def stop(self) -> None:
        """End the worker, the launcher of sandboxed processes, and all processes that it started."""
        self.end_worker()
        self.launcher.close()


class RemoteBench:
    """A bench whose candidates run in the worker of a ``WorkerProcess``."""

    @property
    def confirms(self) -> tuple[str, str]:
        """Whether times can be confirmed in sandboxed processes, as a pair of verdict and reason. The verdict is
        ``"ok"`` or ``"incomplete"``.
        """
        if can_send_arguments(self.task.inputs):
            return "ok", ""
        why = "these arguments cannot be sent to a locked process: the worker is a process of its own, unlocked"
        return "incomplete", why

    def __init__(self, isolation: WorkerProcess, task: SelectionTask, provider: str) -> None:
        """Make the bench of a task in the worker of ``isolation``. ``provider`` names the function that lists the
        candidates there, as ``module:name``. If it is empty, they are the op's own kernels.
        """
        self.isolation, self.task, self.provider = isolation, task, provider
        self._beside = True  # candidates may be compiled side by side
        self._begun = 0  # which worker, counted as they are started, was the last to begin that
        # The worker must neither record the calls of a measurement nor use the choices that are about to be replaced.
        environment = {**os.environ, "SHIPLAP_RECORD": "", "SHIPLAP_TUNED": ""}
        opening = _opening_message(task, provider)
        self._opening = msgspec.structs.replace(opening, environment=environment, folder=os.getcwd())

    def open(self) -> str:
        """Open the task in the worker. Return an empty string, or the reason if the worker cannot open it. Raise
        ``SL611`` if the worker died.
        """
        try:
            self.isolation.open_task(self._opening)
        except RequestFailed as e:
            return str(e)
        except WorkerDied as e:
            raise self._lost_worker_error(e) from e
        return ""

    def compile(self, indices: Sequence[int]) -> int:
        """Start to compile the candidates at ``indices`` in the worker, without waiting for them. Return how many were
        started, which is 0 if that fails.
        """
        begun = 0
        if self._beside:
            with suppress(WorkerDied, RequestFailed):
                begun = self._ask(workers.CompileCandidates(list(indices))).value
        if begun:
            self._begun = self.isolation.started
        return begun

    @property
    def _compiling(self) -> bool:
        """Whether compilations were started in the present worker. Those of an earlier worker, which has died, do not
        count.
        """
        return self._begun == self.isolation.started

    def quiet(self) -> None:
        """Wait until all compilers of the worker have ended."""
        if self._compiling:
            with suppress(WorkerDied):  # a dead worker compiles nothing
                self._ask(workers.FinishCompiling())
            self._begun = 0

    def verify(self, index: int) -> VerifyOutcome:
        """Compare the candidate at ``index`` with the reference in the worker, and return the outcome. If the worker
        dies, the candidate counts as wrong, unless compilers were running. In that case it is verified again in a new
        worker.
        """
        try:
            outcome = self._ask(workers.VerifyCandidate(index)).outcome
        except RequestFailed as e:
            return VerifyOutcome(str(e))
        except WorkerDied as e:
            if not self._compiling:
                return VerifyOutcome(e.how)
            self._beside, self._begun = False, 0  # it may have been another one's compiler: now one after another
            return self.verify(index)
        if outcome.fatal:
            self.isolation.end_worker()
        return outcome

    def race(self, indices: Sequence[int], plan: RacePlan) -> tuple[dict[int, Timing], dict[int, str]]:
        """Measure the candidates at ``indices`` alternately in the worker. Return two dicts by index, with the timings
        and with the reason for each candidate that has none.

        If the worker dies while a candidate runs, that candidate has failed, and the remaining ones are measured again.
        Raise ``SL611`` if the worker cannot measure at all.
        """
        left, failed = list(indices), {}
        while left:
            try:
                raced = self._ask(workers.RaceCandidates(left, plan))
            except RequestFailed as e:
                raise error("SL611", where=self.task.op.spec.name, got=str(e), expected="timings") from None
            except WorkerDied as e:
                if e.index == COMPILERS:  # of candidates that are not in this race, or are right all the same
                    self._beside, self._begun = False, 0
                    continue
                if e.index not in left:
                    raise self._lost_worker_error(e) from e
                failed[e.index] = e.how
                left.remove(e.index)
                continue
            return {i: t for i, t in raced.timings.items() if i in left}, failed | raced.failed
        return {}, failed

    def confirm(
        self, claims: Mapping[int, float], seconds: float, believed: Set[int] = frozenset()
    ) -> dict[int, ConfirmedClaim]:
        """Check ``claims``, the seconds of candidates in a race, again in sandboxed processes. Return the result for
        each index. ``seconds`` is about how long each candidate is examined. Candidates in ``believed`` are only timed.
        If the arguments cannot be sent to a sandboxed process, nothing is checked.
        """
        if not can_send_arguments(self.task.inputs):
            return dict.fromkeys(claims, ConfirmedClaim())
        return self._judged.confirm(claims, seconds, believed)

    def duel(self, indices: Sequence[int], claimed: float, seconds: float) -> tuple[dict[int, float], dict[int, str]]:
        """Measure the confirmed candidates at ``indices`` alternately in sandboxed processes, for about ``seconds``.
        Return two dicts by index, with the seconds of a call and with the reason for each candidate that failed. Both
        are empty if the arguments cannot be sent to a sandboxed process.
        """
        return self._judged.duel(indices, claimed, seconds) if can_send_arguments(self.task.inputs) else ({}, {})

    @cached_property
    def _judged(self) -> JudgedBench:
        """The bench that runs the candidates of this task in sandboxed processes, and checks the times that
        they claim.
        """
        task = self.task
        opening = _opening_message(task, self.provider)  # without the environment, which may hold secrets
        return JudgedBench(self.isolation.hosts, task.op, task.inputs, task.candidates, opening)

    def _ask(self, message: Request[ReplyT]) -> ReplyT:
        """Send ``message`` to the worker and return its reply.

        A newly started worker first imports the op and draws its inputs. Raise ``SL611`` if it can no longer do so, and
        ``WorkerDied`` if it ends.
        """
        try:
            self.isolation.open_task(self._opening)
        except RequestFailed as e:
            raise error("SL611", where=self.task.op.spec.name, got=str(e), expected="the op, as before") from None
        return self.isolation.ask(message)

    def _lost_worker_error(self, e: WorkerDied) -> Exception:
        """Return the error ``SL611``, not raised, for a worker that ended as ``e`` says."""
        expected = "a worker that imports the op and draws its inputs"
        return error("SL611", where=self.task.op.spec.name, got=e.how, expected=expected)


def _opening_message(task: SelectionTask, provider: str) -> OpenTask:
    """Return the message that makes another process import the op of a task, draw its inputs and find its candidates.
    ``provider`` names the function that lists them, or is empty for the op's own kernels.
    """
    op = task.op
    return OpenTask(
        op.spec.name,
        op.identity,
        _declaring_modules(op),
        op.file,
        # The worker has to find the op's modules where this process has found them.
        list(sys.path),
        str(task.inputs.recipe),
        task.inputs.device,
        provider,
        task.options.capture,
        torch.get_num_threads(),
        [workers.CandidateName(c.kernel, c.config.as_dict()) for c in task.candidates],
    )


def why_not_importable(op: Op, provider: str) -> str:
    """Return why another process cannot import the op or the function that ``provider`` names, or an empty string if it
    can.
    """
    if "<locals>" in op.reference.__qualname__ or "<locals>" in provider:
        return "it is declared inside a function"
    if not (_declaring_modules(op) or os.path.isfile(op.file)):
        return "it is not declared in a file"
    return ""


def _declaring_modules(op: Op) -> list[str]:
    """Return the names of the modules that define the op's reference, its kernels and its builder of samples, without
    ``__main__``.
    """
    functions: list[Any] = [op.reference, op.sampler]
    functions += [k.function for kernels in op.kernels.values() for k in kernels]
    functions += [getattr(f, "fn", f) for f in functions]  # a Triton kernel wraps its function
    names = (getattr(f, "__module__", None) for f in functions if f is not None)
    return [n for n in dict.fromkeys(names) if n and n != "__main__" and not n.startswith("shiplap_target_")]
