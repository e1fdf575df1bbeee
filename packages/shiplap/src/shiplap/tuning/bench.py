"""The ``Bench`` protocol, by which the search verifies and times candidates, and its form for this process.

The form for another process is ``RemoteBench`` in ``worker_process.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shiplap.errors import error_line
from shiplap.tuning.candidate import Candidate
from shiplap.tuning.inputs import Inputs
from shiplap.tuning.measure import RacePlan, Timing, Uncapturable, clock_for, race_runs
from shiplap.tuning.verify import Verifier, VerifyOutcome, is_device_lost, verification_cases, wait_for_device

COMPILERS = -2  # instead of an index: compilers of any candidates are waited for


@dataclass(frozen=True)
class ConfirmedClaim:
    """The result of confirming the time that a candidate had in a race.

    Attributes:
        problem: the reason why the candidate is rejected. It is empty if the candidate is confirmed, or if it cannot be
            confirmed.
        factor: the candidate's time on new values, as a multiple of the time that its own process reported.
    """

    problem: str = ""
    factor: float = 1.0


class Bench(Protocol):
    """An object that verifies and times candidates, which it identifies by their index in a list.

    A candidate is a kernel with a config (values for its tuning parameters).
    """

    @property
    def confirms(self) -> tuple[str, str]:
        """Whether this bench can check the times of candidates by a clock that they cannot influence, as a pair of
        verdict and reason.

        The verdict is ``"ok"`` if the fastest candidate is called again on secret values in a sandboxed process. It is
        ``"skip"`` if that does not apply, and ``"incomplete"`` if it cannot be done.
        """
        ...

    def compile(self, indices: Sequence[int]) -> int:
        """Start to compile the candidates at ``indices`` in parallel, and return how many were started. Do not wait for
        them.

        ``verify`` waits for the compilation of its own candidate only.
        """
        ...

    def quiet(self) -> None:
        """Start no more compilations, and wait until all running ones have ended, so that they do not disturb the
        clock.
        """
        ...

    def verify(self, index: int) -> VerifyOutcome:
        """Run the candidate at ``index`` on samples with the sizes of the call and with other sizes, and compare it
        with the reference. The returned outcome holds a problem, a refusal or neither.
        """
        ...

    def race(self, indices: Sequence[int], plan: RacePlan) -> tuple[dict[int, Timing], dict[int, str]]:
        """Measure the candidates at ``indices`` alternately, within the limits of ``plan``. Return two dicts by index,
        with the timings and with the reason for each candidate that has no timing.
        """
        ...

    def duel(self, indices: Sequence[int], claimed: float, seconds: float) -> tuple[dict[int, float], dict[int, str]]:
        """Measure candidates whose times in the race were confirmed, alternately by one clock. Return two dicts by
        index, with the seconds of a call and with the reason for each candidate that has no time. Both are empty if the
        race has already measured them by one clock.

        Args:
            indices: the candidates to compare.
            claimed: the seconds that the fastest of them took in the race.
            seconds: about how long the comparison may take.
        """
        ...

    def confirm(
        self, claims: Mapping[int, float], seconds: float, believed: Set[int] = frozenset()
    ) -> dict[int, ConfirmedClaim]:
        """Check the times of a race's winner and of the candidates near it, by a clock that they cannot influence and
        on other values. Return a dict from index to the result, which holds the problem or the factor by which the time
        differs.

        Args:
            claims: the seconds of each candidate in the race.
            seconds: about how long each candidate is examined.
            believed: candidates that were confirmed before. They are timed again and not examined.
        """
        ...


class LocalBench:
    """A bench that verifies and times candidates in this process. A candidate that crashes ends the process."""

    confirms = "incomplete", "tuned in the calling process, without the sandbox"

    def __init__(
        self,
        inputs: Inputs,
        candidates: Sequence[Candidate],
        capture: str = "auto",
        at: Callable[[int], None] = lambda index: None,
    ) -> None:
        """Make a bench that runs ``candidates`` in this process on ``inputs``. ``capture`` is the setting of the CUDA
        clock (see ``CudaClock``). ``at`` is called with the index of the candidate that runs next, with -1 if none
        runs, or with -2 while compilers are waited for.
        """
        self.inputs, self.candidates, self.capture, self.at = inputs, candidates, capture, at
        self._verifier = Verifier(inputs)
        self._compiling: dict[int, Future[None]] = {}

    def compile(self, indices: Sequence[int]) -> int:
        """Start to compile the candidates at ``indices`` in threads, and in worker processes on a GPU. Return how many
        were started, which is 0 if fewer than two can be.
        """
        able = [i for i in indices if self.candidates[i].compiles]
        if len(able) < 2:
            return 0
        if torch.device(self.inputs.device).type != "cpu":  # where the clock does not see compilers that go on
            for index in able:
                with suppress(Exception):  # an error of a rendering is raised again in verify()
                    self.candidates[index].compile_apart()
        for index in able:
            verification_cases(self.inputs, self.candidates[index])  # drawn once, here
        # Python's lock is released while an external compiler runs, so threads suffice to run compilers in parallel.
        pool = ThreadPoolExecutor(min(len(able), os.cpu_count() or 1), "shiplap compile")
        self._compiling |= {i: pool.submit(self._precompile, self.candidates[i]) for i in able}
        pool.shutdown(wait=False)
        return len(able)

    def _precompile(self, candidate: Candidate) -> None:
        """Compile a candidate for all sizes and layouts on which it will be verified.

        Nothing is launched, so arguments that several candidates share are not written to.
        """
        # The first two have the same sizes, and values are no matter of compilation.
        cases = {str(c.recipe.but(values="normal")): c for c in verification_cases(self.inputs, candidate)[1:]}
        for case in cases.values():
            candidate.precompile(case.args)

    def _compiled(self, index: int) -> None:
        """Wait until the compilation of the candidate at ``index`` has ended. Return at once if none was started.

        A failed compilation is not reported, since ``prepare`` compiles again and raises the same error.
        """
        if (compiling := self._compiling.pop(index, None)) is not None:
            wait([compiling])

    def quiet(self) -> None:
        """Cancel compilations that have not begun, and wait for those that run."""
        # A compiler that hangs here is reported to the supervising process under this index, as no single candidate is
        # at fault.
        self.at(COMPILERS)
        left = [c for c in self._compiling.values() if not c.cancel()]
        self._compiling.clear()
        wait(left)
        self.at(-1)

    def verify(self, index: int) -> VerifyOutcome:
        """Compare the candidate at ``index`` with the reference on all verification cases, after its compilation has
        ended. The returned outcome holds a problem, a refusal or neither.
        """
        self.at(index)
        self._compiled(index)
        return self._verifier.check(self.candidates[index])

    def race(self, indices: Sequence[int], plan: RacePlan) -> tuple[dict[int, Timing], dict[int, str]]:
        """Measure the candidates at ``indices`` alternately, after all compilers have ended. Return two dicts by index,
        with the timings and with the reason for each candidate that could not be prepared.
        """
        self.quiet()  # the clock is for candidates alone
        clock = clock_for(self.inputs.device, self.capture)
        ready: dict[int, Any] = {}
        failed: dict[int, str] = {}
        args = self.inputs.real[0].fresh()  # one copy for all: a large call fits once, not once per candidate
        with torch.no_grad():
            for index in indices:
                self.at(index)
                try:
                    ready[index] = clock.ready(self.candidates[index].prepare(args))
                    wait_for_device(self.inputs.device)
                except Exception as e:
                    # After a fatal CUDA error every later candidate would fail as well, so the whole process has to be
                    # replaced.
                    if is_device_lost(e) and not isinstance(e, Uncapturable):
                        raise
                    failed[index] = error_line(e)
            return (race_runs(ready, clock, plan, self.at) if ready else {}), failed

    def duel(self, indices: Sequence[int], claimed: float, seconds: float) -> tuple[dict[int, float], dict[int, str]]:
        """Return two empty dicts, since the race has already measured the candidates side by side by one clock. No
        argument is read.
        """
        return {}, {}  # they raced side by side

    def confirm(
        self, claims: Mapping[int, float], seconds: float, believed: Set[int] = frozenset()
    ) -> dict[int, ConfirmedClaim]:
        """Return, for each index in ``claims``, a result without a problem and with the factor 1. Nothing is checked,
        and ``seconds`` and ``believed`` are not read.

        Candidates run in this process and could influence its clock.
        """
        return dict.fromkeys(claims, ConfirmedClaim())  # candidates share this process, which cannot check them
