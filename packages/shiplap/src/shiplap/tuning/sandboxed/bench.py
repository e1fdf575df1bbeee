"""A bench for kernels that are not trusted: each runs in a locked process of its own.

Seeds, inputs, clock and comparison are in this process. Damage that a kernel does to its interpreter affects that
kernel alone: the other candidates race in processes of their own, which are stopped while it runs. A race uses the
times that the processes report, which may be wrong. The time of the winner is therefore compared with the clock of this
process before it counts.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import torch

from shiplap.dispatch import Op
from shiplap.dispatch.tuned_choices import REFERENCE
from shiplap.errors import error, error_line
from shiplap.sampling.case import SampleCase, tensors_among
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.call_batch import CallBatch
from shiplap.sandbox.candidate import CandidateError, ExpectedEffects
from shiplap.sandbox.request_errors import UnsupportedArguments
from shiplap.sandbox.source_scan import suspicious_names_of_function
from shiplap.sandbox.unsteady_source import unsteady_decisions_of_function
from shiplap.tuning.bench import ConfirmedClaim
from shiplap.tuning.candidate import Candidate, KernelCandidate
from shiplap.tuning.inputs import Inputs
from shiplap.tuning.measure import RacePlan, Timing, race_runs
from shiplap.tuning.sandboxed.confirm import Confirmation, FreshValueTimes, expected_effects
from shiplap.tuning.sandboxed.fresh_inputs import ConfirmationInputs
from shiplap.tuning.sandboxed.workers import KernelProcesses, OpenTask, ProcessUnavailable
from shiplap.tuning.verify import VerifyOutcome, verification_cases

POISON = (0xFF, 0x55, 0xAA)
DUELS = 6  # rounds
LARGE = 4 << 20  # bytes of arguments that deserve more than one thread here
CLAIM, EXCHANGE = 0.3, 5e-3  # least share of this process's clock that a claim may have, after the seconds of a message


def can_send_arguments(inputs: Inputs) -> bool:
    """Return whether the candidates can run on ``inputs`` in a sandboxed process. The inputs must be on the CPU of a
    Linux machine, and all arguments must be of types that can be sent to another process.
    """
    if torch.device(inputs.device).type != "cpu" or not sys.platform.startswith("linux"):
        return False  # a locked process has not been tried with a device
    try:
        ArgumentArena().pack(list(inputs.call.args if inputs.op.sampler is not None else inputs.real[0].args))
    except TypeError:  # a random generator, for example
        return False
    return True


class _Lost(Exception):
    """The error that a candidate cannot continue in a race, since its process failed or cannot run it."""

    def __init__(self, index: int, why: str) -> None:
        """Make the error for the candidate at ``index``, which cannot continue for the reason ``why``."""
        super().__init__(why)
        self.index, self.why = index, why


class _Runner:
    """A candidate in a race. It holds the candidate's index and the call that is timed in the candidate's process."""

    def __init__(self, index: int, batch: CallBatch) -> None:
        """Make a runner for the candidate at ``index``, which times the call in ``batch``."""
        self.index, self.batch = index, batch

    def __call__(self) -> Any:
        """Make one call in the candidate's process, and return an empty tuple in place of its results."""
        self.sample(1)
        return ()

    def sample(self, repeats: int) -> float:
        """Make ``repeats`` calls in the candidate's process and return the seconds of one call, as that process
        measures them.

        If the process claims too short a time, the result is 0.3 of the time that this process measures for the calls,
        after 5 ms for messages are subtracted. Raise ``_Lost`` if the process fails.
        """
        try:
            spell = self.batch.sample(repeats)
        except CandidateError as e:
            raise _Lost(self.index, str(e)) from None
        # A claim may not be so low that a race is planned around it for nothing; whether it is true shows later.
        return max(spell.claimed, CLAIM * (spell.took.quiet - EXCHANGE)) / repeats


class _Clock:
    """The clock of a race between candidates in sandboxed processes. It uses the times that these processes report."""

    def ready(self, run: Any) -> Any:
        """Return ``run`` itself, since its process has already prepared the call."""
        return run

    def sample(self, run: Any, repeats: int) -> float:
        """Make ``repeats`` calls of ``run``, which must be a ``_Runner``. Return the seconds of one call that its
        process reports.
        """
        assert isinstance(run, _Runner)
        return run.sample(repeats)


@contextmanager
def _few_threads(inputs: Inputs) -> Iterator[None]:
    """Return a context manager in whose body torch uses one thread of this process. If the arguments take more than 4
    MiB, it changes nothing.

    An idle thread of OpenMP could otherwise occupy a processor that the kernel needs.
    """
    # A thread of OpenMP spins while it waits for its next work, for longer than a small kernel takes.
    if sum(t.numel() * t.itemsize for t in tensors_among(inputs.real[0].args)) > LARGE:
        yield
        return
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


class JudgedBench:
    """A bench that verifies and times candidates, which it identifies by their index. The candidates of each kernel run
    in a sandboxed process of their own.
    """

    confirms = "ok", ""

    def __init__(
        self, hosts: KernelProcesses, op: Op, drawn: Inputs, candidates: Sequence[Candidate], opening: OpenTask
    ) -> None:
        """Make the bench of a tuning task whose candidates run in the processes ``hosts``. Its inputs are those of
        ``drawn`` with a new secret seed.
        """
        self.hosts, self.op, self.candidates, self.opening = hosts, op, candidates, opening
        self.inputs = replace(drawn, seed=secrets.randbits(40))  # no candidate can predict these values
        self._expected: dict[int, ExpectedEffects] = {}
        self._drawn: ConfirmationInputs | None = None
        self._broken = ""  # why the reference does not run
        self.hosts.open(opening, _library_folders(op))

    def open(self) -> str:
        """Start the processes of the candidates, and return an empty string. If the op or a candidate is missing in
        them, return the reason instead. Raise ``SL611`` if the reference's process does not start.
        """
        try:
            # Starting the processes takes seconds in which this process has nothing to do, so it draws inputs
            # meanwhile.
            with self._ahead():
                self.hosts.prepare({REFERENCE: 10.0} | {c.kernel: 1.0 for c in self.candidates[1:]})
            self.hosts.process_for(REFERENCE, 10.0)
        except ProcessUnavailable as e:
            if "LookupError" in str(e):
                return str(e)
            expected = "a process that imports the op and draws its inputs"
            raise error("SL611", where=self.op.spec.name, got=str(e), expected=expected) from e
        return ""

    @contextmanager
    def _ahead(self) -> Iterator[None]:
        """Return a context manager during whose body a thread draws the arguments with which the winner of a race will
        be confirmed. Nothing may be timed in the body.
        """
        drawn, over = ConfirmationInputs(self.op, self.inputs), Event()

        def draw() -> None:
            """Draw arguments into ``drawn`` until the body of the context has ended. An exception is ignored, since the
            next draw raises it again.
            """
            with suppress(Exception):  # the next draw raises the same error
                drawn.draw_ahead(over.is_set)

        thread = Thread(target=draw, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
        thread.join()
        self._drawn = drawn

    def drawn(self) -> ConfirmationInputs:
        """Return the source of the arguments for one confirmation. The first call after a draw ahead returns what was
        drawn, and later calls return a new source.
        """
        drawn, self._drawn = self._drawn, None
        return drawn or ConfirmationInputs(self.op, self.inputs)

    def compile(self, indices: Sequence[int]) -> int:
        """Return 0, since no candidate is compiled in advance. Each candidate is compiled in its own process when it is
        verified.
        """
        return 0  # each compiles in its own process, when it is verified

    def quiet(self) -> None:
        """Do nothing. Every process is stopped unless it serves a request, so nothing disturbs the clock."""

    def batch(self, index: int, sets: Sequence[Sequence[Any]], poison: int | None = None) -> CallBatch:
        """Return a batch of calls of the candidate at ``index``, one on each list of arguments in ``sets``, ready to
        run in its process.

        With index -1, the calls compute nothing. If ``poison`` is not None, memory that a call allocates is filled with
        this byte first. Raise ``CandidateError``, ``UnsupportedArguments`` or ``ProcessUnavailable`` if the calls
        cannot be prepared.
        """
        name = self.candidates[max(index, 0)].kernel
        witness = self.hosts.process_for(name, 10.0 if index <= 0 else 1.0)
        return CallBatch(witness, index, sets, poison)

    def verify(self, index: int) -> VerifyOutcome:
        """Compare the candidate at ``index`` with the reference on all verification cases, in its own process. The
        returned outcome holds a problem, a refusal or neither.
        """
        # Without results of the reference nothing can be compared, and each candidate would fail for this one reason.
        if index and self._broken:
            return VerifyOutcome(f"the reference does not run: {self._broken}")
        if names := self._suspicions(index):
            return VerifyOutcome("; ".join(names[:3]))
        for number, case in enumerate(verification_cases(self.inputs, self.candidates[index])):
            try:
                with _few_threads(self.inputs):
                    problem = self._look(index, number, case)
            except UnsupportedArguments as e:
                if number > 1:  # of other sizes, addresses or values than the call
                    continue
                return VerifyOutcome(str(e), refused=True)
            if problem:
                self._broken = problem if index == 0 else self._broken
                return VerifyOutcome(f"{problem} on {case.label}")
        return VerifyOutcome()

    def _suspicions(self, index: int) -> list[str]:
        """Return the reasons why the source code of the candidate at ``index`` is suspicious, such as names that read
        frames of other code, or decisions by a count of calls. The list is empty for candidates that are not kernels of
        the op.
        """
        candidate = self.candidates[index]
        if not isinstance(candidate, KernelCandidate):
            return []
        function = candidate.bound.function
        what = "it decides by what later calls have otherwise"
        decisions = [f"{what}, {at}" for at in unsteady_decisions_of_function(function)]
        return suspicious_names_of_function(function) + decisions

    def _look(self, index: int, number: int, case: SampleCase) -> str:
        """Run the candidate at ``index`` on verification case ``number`` in its process. Return a message with its
        error or its difference from the reference, or an empty string if it is right.

        The results of the reference itself, which is the candidate of index 0, are not compared.
        """
        try:
            with self.batch(index, [case.args], POISON[number % len(POISON)]) as batch:
                batch.run_calls([self.expected(number, case)] if index else None)
        except (CandidateError, ProcessUnavailable) as e:
            return self.ended(index, e)
        return ""

    def ended(self, index: int, e: Exception) -> str:
        """Return the message of the exception ``e``. End the process of the candidate at ``index`` if the exception
        shows that it can no longer be used.
        """
        self.hosts.doubted = True
        if isinstance(e, CandidateError) and e.check in ("process", "memory", "answer", "machine"):
            self.hosts.end_process(self.candidates[max(index, 0)].kernel)
        return str(e)

    def expected(self, number: int, case: SampleCase) -> ExpectedEffects:
        """Return the effects of the reference on the verification case ``number``, which a right candidate has, too.
        They are computed once, in this process. Raise ``CandidateError`` if the reference fails.
        """
        if number not in self._expected:
            try:
                self._expected[number] = expected_effects(self.op, case)
            except Exception as e:  # the reference ran in its own process: memory, perhaps
                raise CandidateError("reference", f"the reference does not run here: {error_line(e)}") from e
        return self._expected[number]

    def race(self, indices: Sequence[int], plan: RacePlan) -> tuple[dict[int, Timing], dict[int, str]]:
        """Measure the candidates at ``indices`` alternately, by the times that their processes report. Return two dicts
        by index, with the timings and with the reason for each candidate that has none. If a process fails, the
        remaining candidates are measured again.
        """
        left, failed = list(indices), dict[int, str]()
        while left:
            batches: dict[int, CallBatch] = {}
            try:
                for index in left:
                    with _few_threads(self.inputs):
                        batches[index] = self._entered(index)
                runs: dict[int, Callable[[], Any]] = {i: _Runner(i, b) for i, b in batches.items()}
                return race_runs(runs, _Clock(), plan), failed
            except _Lost as e:
                failed[e.index] = e.why
                # A race compares all candidates in the same rounds, so it starts again without this one.
                left.remove(e.index)
                self.hosts.end_process(self.candidates[e.index].kernel)
            finally:
                for batch in batches.values():
                    batch.close()
        return {}, failed

    def _entered(self, index: int) -> CallBatch:
        """Return a batch with one call of the candidate at ``index``, prepared in its process for a race. Raise
        ``_Lost`` if the call cannot be prepared.
        """
        try:
            return self.batch(index, [self.inputs.real[0].args])
        except (CandidateError, UnsupportedArguments, ProcessUnavailable) as e:
            raise _Lost(index, str(e)) from None

    def confirm(
        self, claims: Mapping[int, float], seconds: float, believed: Set[int] = frozenset()
    ) -> dict[int, ConfirmedClaim]:
        """Check ``claims``, the seconds of candidates in a race, by the clock of this process and on values that the
        candidates have not seen. Return the result for each index. ``seconds`` is about how long each candidate is
        examined. Candidates in ``believed`` are only timed.
        """
        with _few_threads(self.inputs):
            return Confirmation(self, claims, seconds, believed).confirm_claims()

    def duel(self, indices: Sequence[int], claimed: float, seconds: float) -> tuple[dict[int, float], dict[int, str]]:
        """Measure the candidates at ``indices`` alternately by this process's clock on new values. Return two dicts by
        index, with the seconds of a call and with the reason for each candidate that failed. The first dict is empty
        unless at least two candidates were measured. ``claimed`` is the time of the fastest one in the race.
        """
        left, failed = list(indices), dict[int, str]()
        while len(left) > 1:
            with _few_threads(self.inputs):
                times = FreshValueTimes(self, dict.fromkeys(left, claimed)).measure(DUELS, seconds)
            lost = {i: t for i, t in times.items() if isinstance(t, str)}
            if not lost:
                return {i: float(t) for i, t in times.items()}, failed
            failed |= {i: why for i, why in lost.items() if i >= 0}
            # Without the time of an empty batch, no other can be corrected.
            if -1 in lost:
                break
            left = [i for i in left if i not in lost]
        return {}, failed


def _library_folders(op: Op) -> list[str]:
    """Return the folders of the native libraries of an op's kernels, which the sandboxed processes must be allowed to
    read.
    """
    kernels = [k for listed in op.kernels.values() for k in listed]
    return [str(k.native.library.parent) for k in kernels if k.native is not None]
