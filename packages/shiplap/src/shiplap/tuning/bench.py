"""A ``Bench`` verifies and times candidates for the search: in this process, or in another one (``isolate.py``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import Any, Protocol

import torch

from shiplap.sampling.run import last_line
from shiplap.tuning.candidate import Candidate
from shiplap.tuning.inputs import Inputs
from shiplap.tuning.measure import Plan, Timing, Uncapturable, clock_for, race
from shiplap.tuning.verify import Outcome, Verifier, cases_of, is_fatal, synchronize

BEAT = Struct("=qd")  # in memory shared with a worker: index of the candidate that runs (-1: none), and since when
COMPILERS = -2  # instead of an index: compilers of any candidates are waited for


@dataclass(frozen=True)
class Belief:
    """What is believed of a winner.

    Attributes:
        problem: why the candidate is not believed; empty where it is, or cannot be asked.
        factor: how many times the time that it claimed its kernel takes on new values.
    """

    problem: str = ""
    factor: float = 1.0


class Bench(Protocol):
    """Verifies and times candidates by their index."""

    def compile(self, indices: Sequence[int]) -> int:
        """Start compiling candidates in parallel, and return how many. Verification of a candidate waits only for that
        candidate.
        """
        ...

    def quiet(self) -> None:
        """Stop starting compilations, and return when all running ones have ended."""
        ...

    def verify(self, index: int) -> Outcome: ...

    def race(self, indices: Sequence[int], plan: Plan) -> tuple[dict[int, Timing], dict[int, str]]:
        """The timings of candidates, and the reasons why other candidates have none."""
        ...

    def duel(self, indices: Sequence[int], claimed: float, seconds: float) -> tuple[dict[int, float], dict[int, str]]:
        """Seconds of confirmed candidates, measured side by side, and the reasons why others have none; ``seconds``:
        about how long to look at them.
        """
        ...

    def confirm(
        self, claims: Mapping[int, float], seconds: float, believed: Set[int] = frozenset()
    ) -> dict[int, Belief]:
        """What is believed of a winner and of candidates near it, side by side; ``claims``: the seconds that they took.

        ``seconds``: about how long to look at each. ``believed``: those that are only timed once more.
        """
        ...


class LocalBench:
    """A bench in this process. A candidate that crashes ends the process."""

    def __init__(
        self,
        inputs: Inputs,
        candidates: Sequence[Candidate],
        capture: str = "auto",
        at: Callable[[int], None] = lambda index: None,
    ) -> None:
        self.inputs, self.candidates, self.capture, self.at = inputs, candidates, capture, at
        self._verifier = Verifier(inputs)
        self._compiling: dict[int, Future[None]] = {}

    def compile(self, indices: Sequence[int]) -> int:
        able = [i for i in indices if self.candidates[i].compiles]
        if len(able) < 2:
            return 0
        if torch.device(self.inputs.device).type != "cpu":  # where the clock does not see compilers that go on
            for index in able:
                with suppress(Exception):  # of a rendering, which says so when its turn comes
                    self.candidates[index].compile_apart()
        for index in able:
            cases_of(self.inputs, self.candidates[index])  # drawn once, here
        pool = ThreadPoolExecutor(min(len(able), os.cpu_count() or 1), "shiplap compile")
        self._compiling |= {i: pool.submit(self._precompile, self.candidates[i]) for i in able}
        pool.shutdown(wait=False)
        return len(able)

    def _precompile(self, candidate: Candidate) -> None:
        """What the cases of its verification need. Nothing is launched, so nobody writes to them."""
        for case in cases_of(self.inputs, candidate)[1:]:  # the first two have the same sizes
            candidate.precompile(case.args)

    def _compiled(self, index: int) -> None:
        """What went wrong there goes wrong again, with its reason, in ``prepare``."""
        if (compiling := self._compiling.pop(index, None)) is not None:
            wait([compiling])

    def quiet(self) -> None:
        self.at(COMPILERS)
        left = [c for c in self._compiling.values() if not c.cancel()]
        self._compiling.clear()
        wait(left)
        self.at(-1)

    def verify(self, index: int) -> Outcome:
        self.at(index)
        self._compiled(index)
        return self._verifier.check(self.candidates[index])

    def race(self, indices: Sequence[int], plan: Plan) -> tuple[dict[int, Timing], dict[int, str]]:
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
                    synchronize(self.inputs.device)
                except Exception as e:
                    if is_fatal(e) and not isinstance(e, Uncapturable):
                        raise
                    failed[index] = last_line(e)
            return (race(ready, clock, plan, self.at) if ready else {}), failed

    def duel(self, indices: Sequence[int], claimed: float, seconds: float) -> tuple[dict[int, float], dict[int, str]]:
        return {}, {}  # they raced side by side

    def confirm(
        self, claims: Mapping[int, float], seconds: float, believed: Set[int] = frozenset()
    ) -> dict[int, Belief]:
        return dict.fromkeys(claims, Belief())  # what runs here shares this process with whoever would confirm it
