"""The confirmation of a race's winner: on new values, by the clock of this process, and on other inputs.

In a race the same call runs again and again, timed by the process that runs it. A candidate may win by that alone,
because it caches results, inspects its caller or changes the clock. Such a candidate is rejected here, or gets its real
time.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import replace
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor

from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase, tensors_among
from shiplap.sampling.compare import Difference, agrees_without_float64, compare_within_tolerance, derive_reduction
from shiplap.sampling.fresh_arguments import FreshArguments
from shiplap.sampling.perturb import swap_stretches
from shiplap.sampling.run import reference_effects, reference_effects64
from shiplap.sandbox.call_batch import CallBatch
from shiplap.sandbox.candidate import CandidateError, ExpectedEffects
from shiplap.sandbox.proc_filesystem import RequestTime
from shiplap.sandbox.request_errors import UnsupportedArguments
from shiplap.tuning.bench import ConfirmedClaim
from shiplap.tuning.candidate import Candidate
from shiplap.tuning.inputs import Inputs
from shiplap.tuning.sandboxed.fresh_inputs import MOST, ROOM, ConfirmationInputs, argument_bytes
from shiplap.tuning.sandboxed.workers import KernelProcesses, ProcessUnavailable

ROUNDS, ATTEMPTS = 3, 3
PATIENCE = 4  # times as many rounds on a busy machine
LONG = 2e-3  # seconds that the calls of a batch should take
TIMES, SLACK, COLD = 4.0, 10e-6, 10e9  # of the claim; seconds; bytes in a second of arguments that are in no cache
NEARLY = 1.1  # times its claim: such a time is accepted even if other processes had the processors
LEAST = 200e-9  # seconds: no call from Python takes less
BATCHES = 4  # of calls of a small size
LATER, PAUSE, LONGEST = 500, 15e-3, 0.1  # calls without a comparison, their seconds, and at most those of small ones
FIRST = 2  # batches of other inputs that are tried however long they take


class ConfirmingBench(Protocol):
    """The protocol of the bench that a confirmation uses. It has the op, the inputs, the candidates, and the sandboxed
    processes that run them.
    """

    op: Op
    inputs: Inputs
    candidates: Sequence[Candidate]
    hosts: KernelProcesses

    def batch(self, index: int, sets: Sequence[Sequence[Any]], poison: int | None = None) -> CallBatch:
        """Return a batch of calls of the candidate at ``index``, one on each list of arguments in ``sets``, ready to
        run in its process. With index -1, the calls compute nothing. If ``poison`` is not None, memory that a call
        allocates is filled with this byte first.
        """
        ...

    def ended(self, index: int, e: Exception) -> str:
        """Return the message of the exception ``e``. End the process of the candidate at ``index`` if the exception
        shows that it can no longer be used.
        """
        ...

    def drawn(self) -> ConfirmationInputs:
        """Return the source of the arguments for one confirmation. Some of its arguments may have been drawn in
        advance.
        """
        ...


def expected_effects(op: Op, case: SampleCase) -> ExpectedEffects:
    """Return the effects of the op's reference on ``case``, with a function that compares the effects of a candidate
    with them.

    The effects are the results and the arguments that the op writes to. The reference is computed in float64 only if a
    candidate's effects do not agree with them otherwise.
    """
    with torch.no_grad():
        own = reference_effects(op, case.args)
    sums = derive_reduction(op.spec, case.env)
    flat = tensors_among(case.args)
    written = [t for a, v in zip(op.spec.args, case.args, strict=True) if a.mutated for t in tensors_among([v])]
    changed = tuple(i for i, t in enumerate(flat) if any(t is w for w in written))

    def against(got: Sequence[Tensor]) -> Difference:
        """Return how ``got``, the results and changed arguments of a candidate, differ from those of the reference
        beyond rounding errors. The reference is computed in float64 only if they do not agree with ``own``, its results
        in the dtypes of the case.
        """
        with torch.no_grad():
            if agrees_without_float64(got, own, sums, wide_sums=True):
                return Difference()
            return compare_within_tolerance(got, own, reference_effects64(op, case.args), sums, wide_sums=True)

    return ExpectedEffects(own, against, changed, aliased=True)


class FreshValueTimes:
    """A measurement of candidates on new values, alternately and by the clock of this process.

    ``claims`` maps the index of each candidate to the seconds of a call that it claims. The number of calls in a batch
    follows from them.
    """

    def __init__(
        self, bench: ConfirmingBench, claims: Mapping[int, float], fresh: FreshArguments | None = None
    ) -> None:
        """Prepare to time candidates on values from ``fresh``, or from a new source if it is None. ``claims`` maps the
        index of each candidate to the seconds of a call that it claims.
        """
        self.bench, self.claims = bench, claims
        self.op, self.inputs = bench.op, bench.inputs
        self.fresh = fresh or FreshArguments(self.op, self.inputs.recipe, self.inputs.device)
        claimed, size = max(1e-9, min(claims.values())), max(1, argument_bytes(self.inputs.real[0]))
        self._count = max(1, min(MOST, int(LONG / claimed), ROOM // size))
        # Index -1 makes calls that compute nothing, whose time is subtracted.
        self._took: dict[int, list[RequestTime]] = {i: [] for i in (-1, *claims)}

    def measure(self, rounds: int, seconds: float) -> dict[int, float | str]:
        """Time the candidates alternately on new values. Return a dict from index to the seconds of one call.

        A time is the least wall time of a candidate, minus that of a batch that computes nothing, and at least 0. If a
        candidate fails, the dict has only its index, with a message that describes the failure. At least ``rounds``
        rounds are made. More follow until ``seconds`` have passed, while load on the machine may explain a long time.
        """
        ends = monotonic() + seconds
        for number in range(PATIENCE * rounds):
            if number >= rounds and (monotonic() > ends or all(map(self._is_known, self._took))):
                break
            if lost := self._round():
                return lost
        return {index: max(0.0, self._least(index)) for index in self.claims}

    def undisturbed_seconds(self, index: int) -> float:
        """Return the seconds of one call of the candidate at ``index``. The time in which its process waited for a
        processor and the time of a batch that computes nothing are subtracted.
        """
        return (min(t.quiet for t in self._took[index]) - min(t.wall for t in self._took[-1])) / self._count

    def _least(self, index: int) -> float:
        """Return the least seconds of one call of the candidate at ``index`` in all rounds. The time of a batch that
        computes nothing is subtracted.
        """
        return (min(t.wall for t in self._took[index]) - min(t.wall for t in self._took[-1])) / self._count

    def _is_known(self, index: int) -> bool:
        """Return whether the candidate at ``index`` needs no further round.

        It always needs one if its least time is not above 0. Otherwise it needs none if its process hardly waited for a
        processor in one round, or if its least time is at most 1.1 times the claimed one.
        """
        claimed = self.claims.get(index, 0.0)
        if index >= 0 and self._least(index) <= 0.0:  # the empty batch was held up, and took longer
            return False
        return any(t.undisturbed for t in self._took[index]) or self._least(index) <= NEARLY * claimed

    def _round(self) -> dict[int, float | str]:
        """Run one batch of each candidate on the same new values, in separate memory, and record the times. Do so for
        each set of values. Return a dict with the index of the first candidate that fails and a message that describes
        the failure, or an empty dict.
        """
        with ExitStack() as stack:
            known, values = self._values()
            batches = {}
            for index in self._took:
                try:
                    batches[index] = stack.enter_context(self.bench.batch(index, known))
                except (CandidateError, UnsupportedArguments, ProcessUnavailable) as e:
                    return {index: self._describe_failure(index, e)}
            for cases in values:
                expected = [expected_effects(self.op, case) for case in cases] if any(self.claims) else []
                for index, batch in batches.items():
                    try:
                        self._took[index].append(self._time_batch(index, batch, cases, expected))
                    except CandidateError as e:
                        return {index: self._describe_failure(index, e)}
        return {}

    def _describe_failure(self, index: int, e: Exception) -> str:
        """Return a message that describes the error ``e``, with which the candidate at ``index`` failed on new values.
        End its process if it can no longer be used.
        """
        why = self.bench.ended(index, e)
        return f"{why} ({e.check}) on new values" if isinstance(e, CandidateError) else why

    def _time_batch(
        self, index: int, batch: CallBatch, cases: list[SampleCase], expected: list[ExpectedEffects]
    ) -> RequestTime:
        """Run one batch of the candidate at ``index`` on ``cases`` while its process is the only one that runs, and
        compare the results with ``expected``. Return the time. Raise ``CandidateError`` if the candidate fails. The
        results of the reference (index 0) are not compared.
        """
        prisoner = batch.witness.prisoner
        # Processes that the candidate has started are ended, as they could compute during other candidates' turns.
        prisoner.end_strays()
        if index >= 0:
            batch.fill([c.args for c in cases])
        prisoner.alone = True
        try:
            return batch.run_calls(expected if index > 0 else None).took
        finally:
            prisoner.alone = False

    def _values(self) -> tuple[list[Any], list[list[SampleCase]]]:
        """Return the arguments with which calls are prepared, and one or two lists of samples.

        For each list, the values of its samples are written into the prepared calls before they run.
        """
        first = self.fresh.cases(self._count)
        near = [replace(c, args=swap_stretches(c.args)) for c in first]
        if self.op.sampler is not None:  # its values may decide on sizes
            return [c.args for c in first], [near]
        return [self.inputs.real[0].args] * self._count, [first, near]


class Confirmation:
    """The checks of the candidate that won a race, and of those that were nearly as fast, before one of them is chosen.

    ``claims`` maps the index of each candidate to the seconds that it claimed in the race. ``seconds`` limits the time
    for further inputs and the wait for a busy machine. Candidates in ``believed`` were confirmed before and are only
    timed.
    """

    def __init__(
        self, bench: ConfirmingBench, claims: Mapping[int, float], seconds: float, believed: Set[int] = frozenset()
    ) -> None:
        """Prepare to confirm ``claims``, which maps the index of each candidate to the claimed seconds of a call. About
        ``seconds`` may be used for each. The candidates in ``believed`` are only timed.
        """
        self.bench, self.claims, self.seconds, self.believed = bench, claims, seconds, believed
        self.inputs = bench.inputs
        self._drawn = bench.drawn()
        self.fresh = self._drawn.fresh
        self._least: dict[int, float] = {}
        self._kindest: dict[int, float] = {}

    def confirm_claims(self) -> dict[int, ConfirmedClaim]:
        """Return a dict from the index of each candidate to the result of its confirmation.

        A result holds the problem that was found, or the measured time as a multiple of the time that the candidate
        claimed in the race. The reference (index 0) is only timed.
        """
        asked = [i for i in self.claims if i and i not in self.believed]
        told = {i: ConfirmedClaim(problem) for i in asked if (problem := self._problem(i))}
        self._time([i for i in self.claims if i not in told], told)
        # Last, so that whatever the calls have changed in the interpreter is seen.
        for index in [i for i, belief in told.items() if i and not belief.problem]:
            try:
                self.bench.hosts.process_for(self.bench.candidates[index].kernel).check_interpreter()
            except (CandidateError, ProcessUnavailable) as e:
                told[index] = ConfirmedClaim(self._evidence(index, e))
        return told

    def _problem(self, index: int) -> str:
        """Run the candidate at ``index`` on the same tensors with other values, many times, and on other inputs. Return
        a message that describes the first problem, or an empty string if there is none.

        A claimed time of less than 200 ns is a problem, too, since no call is that short.
        """
        if self.claims[index] < LEAST:
            return f"won with {self.claims[index] * 1e9:.3g} ns, which no call takes"
        drawn, self._drawn = self._drawn, self.bench.drawn()  # of each candidate its own
        looks = _CandidateChecks(self.bench, index, self.claims[index], drawn, self.fresh, monotonic() + self.seconds)
        try:
            looks.check_same_tensors()
            looks.check_many_calls()
            looks.check_other_inputs()
        except (UnsupportedArguments, CandidateError, ProcessUnavailable) as e:
            return self._evidence(index, e)
        return ""

    def _evidence(self, index: int, e: Exception) -> str:
        """Return a message that says why the candidate at ``index`` was not confirmed, given the exception ``e`` of a
        check. End its process if it can no longer be used.
        """
        if isinstance(e, UnsupportedArguments):
            return f"does not serve other values of this size: {e}"
        if isinstance(e, CandidateError):
            self.bench.ended(index, e)
            return f"{e.evidence} ({e.check}) on new values"
        return str(e)

    def _time(self, left: list[int], told: dict[int, ConfirmedClaim]) -> None:
        """Time the candidates with the indices ``left`` by this process's clock, and store a result for each in
        ``told``.

        The result is a problem if the candidate is much slower than it claimed, even without the time that its process
        waited for a processor. Otherwise it is the measured time as a multiple of the claimed one.
        """
        slow: list[int] = []
        # Load on the machine may slow a right claim down, but hardly in each attempt.
        for _ in range(ATTEMPTS):
            left = self._measure(left, told)
            slow = [i for i in left if i and self._kindest[i] > self._longest(self.claims[i])]
            if not slow:
                break
        for index in left:
            claimed, took = self.claims[index], self._kindest[index]
            problem = f"won with {claimed * 1e6:.3g} us, and takes {took * 1e6:.3g} us on new values"
            factor = self._least[index] / max(claimed, 1e-9)
            told[index] = ConfirmedClaim(problem) if index in slow else ConfirmedClaim(factor=factor)

    def _longest(self, claimed: float) -> float:
        """Return the longest time of a call, in seconds, that is accepted for a claim of ``claimed`` seconds. It is
        four times the claim and 10 us more, plus the time to read the arguments from memory.
        """
        return TIMES * claimed + SLACK + argument_bytes(self.inputs.real[0]) / COLD

    def _measure(self, left: list[int], told: dict[int, ConfirmedClaim]) -> list[int]:
        """Time the candidates with the indices ``left`` on new values, one call of each candidate after another. Store
        their least times by index in ``self._least`` and ``self._kindest``.

        Return the indices of the candidates that are correct on all values. For each other index, set ``told[index]``
        to a claim with the candidate's problem.
        """
        while left:
            spells = FreshValueTimes(self.bench, {i: self.claims[i] for i in left}, self.fresh)
            times = spells.measure(ROUNDS, self.seconds)
            lost = {i: t for i, t in times.items() if isinstance(t, str)}
            if not lost:
                for index, seconds in times.items():
                    self._least[index] = min(float(seconds), self._least.get(index, float("inf")))
                    self._kindest[index] = min(
                        spells.undisturbed_seconds(index), self._kindest.get(index, float("inf"))
                    )
                break
            told |= {i: ConfirmedClaim(lost.get(i) or lost[-1]) for i in left if i in lost or -1 in lost}
            left = [i for i in left if i not in told]
        return left


class _CandidateChecks:
    """The checks of one candidate on values and sizes that it cannot predict. Optional checks are not begun after the
    time ``ends`` (by ``time.monotonic``).
    """

    def __init__(
        self,
        bench: ConfirmingBench,
        index: int,
        claimed: float,
        drawn: ConfirmationInputs,
        fresh: FreshArguments,
        ends: float,
    ) -> None:
        """Prepare the checks of the candidate at ``index``, which claims ``claimed`` seconds for a call. Arguments come
        from ``drawn``, and those with the sizes of the call from ``fresh``. Optional checks are not begun after the
        time ``ends`` (by ``time.monotonic``).
        """
        self.bench, self.index, self.claimed, self.ends = bench, index, claimed, ends
        self.op, self.inputs, self.drawn, self.fresh = bench.op, bench.inputs, drawn, fresh
        self.fixed = bench.candidates[index].fixed

    def check_same_tensors(self) -> None:
        """Make calls on the same tensors with other values each time. Raise ``CandidateError`` for a wrong result, as
        from a candidate that caches results by address.

        The last call follows many calls whose results are not compared, because a candidate may become wrong after some
        calls.
        """
        cases = self.fresh.cases(2 if self.op.sampler is None else 1)
        known = self.inputs.real[0] if self.op.sampler is None else cases[0]  # a builder's values may decide on sizes
        cases += [replace(cases[-1], args=swap_stretches(cases[-1].args)) for _ in range(2)]
        with self.bench.batch(self.index, [known.args]) as batch:
            for number, case in enumerate(cases):
                if number == len(cases) - 1:
                    batch.sample(max(MOST, min(LATER, int(PAUSE / self.claimed))))
                batch.fill([case.args])
                batch.run_calls([expected_effects(self.op, case)])

    def check_many_calls(self) -> None:
        """Compare the candidate's results before and after many calls, on the smallest available size. Raise
        ``CandidateError`` for a wrong result.

        The first and the last batch have new values. Those between have the values of the first one in another order.
        Do nothing if there is no small size or the candidate refuses it.
        """
        if (fresh := self.drawn.small) is None or self.fixed:
            return
        pairs: list[tuple[SampleCase, ExpectedEffects]] = []
        for number in range(BATCHES):
            if number in (0, BATCHES - 1):
                pairs = [(case, expected_effects(self.op, case)) for case in fresh.cases(MOST)]
            secrets.SystemRandom().shuffle(pairs)
            try:
                with self.bench.batch(self.index, [case.args for case, _ in pairs]) as batch:
                    spell = batch.run_calls([expected for _, expected in pairs])
                    # What a kernel does differently after many calls shows in the last batch.
                    if number == BATCHES - 2:
                        each = max(spell.took.quiet / MOST, 1e-6)
                        batch.sample(max(MOST, min(LATER, int(LONGEST / each))))
            except UnsupportedArguments:
                return
            if monotonic() > self.ends:
                return

    def check_other_inputs(self) -> None:
        """Check the candidate on sizes near those of the call, on small sizes and on other kinds of values. Raise
        ``CandidateError`` for a wrong result. The candidate may refuse such inputs. Inputs that the reference does not
        take are left out.
        """
        for number, cases in enumerate(self.drawn.batches_of_others() if not self.fixed else ()):
            if number >= FIRST and monotonic() > self.ends:
                return
            pairs = []
            for case in cases:
                with suppress(Exception):  # the reference does not take every number
                    pairs.append((case, expected_effects(self.op, case)))
            self._check_batch(pairs)

    def _check_batch(self, pairs: Sequence[tuple[SampleCase, ExpectedEffects]]) -> None:
        """Call the candidate on each sample in one batch, and compare its effects with the expected ones in the same
        pair. If it refuses a call or raises an exception, check the pairs one by one. Raise ``CandidateError`` for a
        wrong result.
        """
        if not pairs:
            return
        try:
            with self.bench.batch(self.index, [case.args for case, _ in pairs]) as batch:
                batch.run_calls([expected for _, expected in pairs])
                return
        except UnsupportedArguments:
            pass
        except CandidateError as e:
            if e.check != "raised":
                at = pairs[0] if len(pairs) == 1 else pairs[e.call] if e.call >= 0 else None
                raise CandidateError(e.check, e.evidence + (f" on {at[0].label}" if at else "")) from None
        # A batch ends at the first call that is declined or raises, so the other pairs are still to be checked.
        for pair in pairs if len(pairs) > 1 else ():
            self._check_batch([pair])
