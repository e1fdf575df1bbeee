"""The requests of a tuning that a child process serves: to open a task, and to prepare, verify and time its candidates.

A locked process serves the candidates of one kernel. The tuner does not rely on anything here then, because the
candidate shares this interpreter. A worker, which is not locked, serves all candidates of a task.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from shiplap.cached_property import cached_property
from shiplap.declare.config import Config
from shiplap.dispatch import Op, registry
from shiplap.dispatch.launch import poisoned_workspace
from shiplap.errors import error_line
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sandbox.child import ArgumentsDeclined, Child, handles
from shiplap.sandbox.load_candidate import run_file
from shiplap.sandbox.protocol import Done, Heartbeat, Number
from shiplap.tuning.allowed import WORKER
from shiplap.tuning.bench import LocalBench
from shiplap.tuning.candidate import Candidate, CandidateRefused, CandidateRun, kernel_candidates
from shiplap.tuning.inputs import Inputs, draw_inputs
from shiplap.tuning.poison_memory import Poison
from shiplap.tuning.sandboxed import workers
from shiplap.tuning.verify import is_device_lost


class DeviceLost(BaseException):
    """The error that this process can no longer use its device. It is a BaseException that ends the process at once,
    since cleaning up would need the device.
    """


class OpenedTask:
    """The tuning task of this process. It holds an op, its inputs, and its candidates in the order of the request."""

    def __init__(self, order: workers.OpenTask, heartbeat: Heartbeat | None) -> None:
        """Import the op that ``order`` names, draw its inputs, and find its candidates. Raise ``LookupError`` if the op
        or a candidate differs from the one of the process that sent the order. ``heartbeat`` reports which candidate
        runs, or is None.
        """
        self.order, self.heartbeat = order, heartbeat
        self.op = import_op(order)
        if self.op.identity != order.identity:
            # A kernel that was attached by the caller's own code is missing here, and its times would be those of
            # another op.
            raise LookupError(f"{self.op.spec.name} differs there: kernels attached elsewhere, or changed files")
        self.inputs = draw_inputs(self.op, SampleRecipe.parse(order.recipe), order.device)
        listed = {(c.kernel, c.config): c for c in candidates_by_provider(order.provider, self.op, self.inputs)}
        wanted = [(c.kernel, Config.of(c.config)) for c in order.candidates]
        if missing := [w for w in wanted if w not in listed]:
            raise LookupError(f"candidate {missing[0]} is unknown here")
        self.candidates = [listed[w] for w in wanted]

    @cached_property
    def bench(self) -> LocalBench:
        """The bench that verifies and times the candidates of the task in this process."""
        begin_run = self.heartbeat.begin_run if self.heartbeat is not None else lambda index: None
        return LocalBench(self.inputs, self.candidates, self.order.capture, begin_run)

    def prepare(self, index: int, poison: int | None, args: list[Any]) -> CandidateRun:
        """Return a function without arguments that calls the candidate at ``index`` on ``args``.

        For index -1, check the arguments against the declaration and return a function that computes nothing. The time
        of such a function is subtracted from the times of candidates. If ``poison`` is not None, memory that the
        candidate allocates is filled with this byte first, so that reads of uninitialised memory give wrong results.
        Raise ``ArgumentsDeclined`` if the candidate refuses the arguments.
        """
        if index < 0:
            self.op.bind(tuple(args))
            return lambda: ()
        candidate = self.candidates[index]
        try:
            with nullcontext() if poison is None else poisoned_workspace(poison):
                run = candidate.prepare(tuple(args))
        except CandidateRefused as e:
            raise ArgumentsDeclined(str(e)) from None
        return run if poison is None else _poisoned(run, candidate, poison)


def _poisoned(run: CandidateRun, candidate: Candidate, byte: int) -> CandidateRun:
    """Return a function without parameters that calls ``run`` and returns its outputs as a tuple. During the call, all
    memory that the candidate allocates is filled with ``byte``. Reads of uninitialised memory then give wrong results.
    """

    def run_poisoned() -> Any:
        """Run the candidate and return its outputs as a tuple. All memory that it allocates is filled with ``byte``
        first.
        """
        with poisoned_workspace(byte), nullcontext() if candidate.opaque else Poison(byte):
            return tuple(run())

    return run_poisoned


_opened: OpenedTask | None = None


def opened_task() -> OpenedTask:
    """Return the task that the request ``open_task`` has opened in this process. A task is an op with its candidates
    and its inputs. It is an error to call this function before the request.
    """
    assert _opened is not None
    return _opened


@handles(workers.OpenTask)
def open_task(child: Child, order: workers.OpenTask, file: int) -> Done:
    """Handle the request that opens a task. Set the environment variables of a worker and the number of threads, import
    the op and draw its inputs. ``file`` is the descriptor of the shared memory through which a worker reports the
    candidate that runs, or -1.
    """
    global _opened
    if order.environment:  # of a worker, which is a process of the user like any other
        os.environ.clear()
        os.environ.update(order.environment)
        os.chdir(order.folder)
        # It is cached, and was found by the old environment.
        tempfile.tempdir = None
    os.environ[WORKER] = str(os.getpid())  # a module that tunes when it is imported does not tune here
    torch.set_num_threads(order.threads)
    _opened = OpenedTask(order, Heartbeat(file) if file >= 0 else None)
    child.prepare = _opened.prepare
    child.accept_modules()
    return Done()


@handles(workers.CompileCandidates)
def compile_candidates(child: Child, message: workers.CompileCandidates, file: int) -> Number:
    """Handle the request to start compiling candidates in parallel. Return how many were started. ``child`` and
    ``file`` are not used.
    """
    return Number(opened_task().bench.compile(message.indices))


@handles(workers.FinishCompiling)
def finish_compiling(child: Child, message: workers.FinishCompiling, file: int) -> Done:
    """Handle the request to start no more compilations and to wait for the running ones."""
    opened_task().bench.quiet()
    return Done()


@handles(workers.VerifyCandidate)
def verify_candidate(child: Child, message: workers.VerifyCandidate, file: int) -> workers.Verified:
    """Handle the request to compare a candidate with the reference. Return the outcome in a message."""
    return workers.Verified(opened_task().bench.verify(message.index))


@handles(workers.RaceCandidates)
def race_candidates(child: Child, message: workers.RaceCandidates, file: int) -> workers.Raced:
    """Handle the request to time candidates alternately. Return a message with the timings and the failures. Raise
    ``DeviceLost`` if the device can no longer be used.
    """
    try:
        return workers.Raced(*opened_task().bench.race(message.indices, message.plan))
    except Exception as e:
        if is_device_lost(e):
            raise DeviceLost(error_line(e)) from e
        raise


def candidates_by_provider(provider: str, op: Op, drawn: Inputs) -> Sequence[Candidate]:
    """Return the candidates that the function ``provider``, named as ``module:name``, returns for the op and its
    inputs.

    If ``provider`` is empty, return the op's own kernels with their configs. The process that sent the task calls the
    same function.
    """
    if not provider:
        return kernel_candidates(op, drawn.device, drawn.call.env)
    module, _, name = provider.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    offered: Sequence[Candidate] = value(op, drawn)
    return offered


def import_op(order: workers.OpenTask) -> Op:
    """Import the modules that declare the op and its kernels, and return the op. If they do not declare it, import the
    file that does. Raise ``LookupError`` if the op is still not declared. An error of an import is ignored if the op is
    declared nevertheless.
    """
    sys.path[:] = [*order.path, *(p for p in sys.path if p not in order.path)]
    problem: Exception | None = None
    for module in order.modules:
        try:
            importlib.import_module(module)
        except Exception as e:  # it may fail after the declaration, for example because it tunes
            problem = e
    if registry.find_declared_op(order.op) is None and order.file:
        try:
            run_file(Path(order.file), f"_shiplap_tuned_{Path(order.file).stem}")
        except Exception as e:
            problem = e
    op = registry.find_declared_op(order.op)
    if op is None:
        raise LookupError(f"no {order.op} in {order.modules or order.file}") from problem
    return op
