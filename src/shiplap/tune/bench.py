"""Where candidates run: the search drives a ``Bench``, here in this process, or in another one (``isolate.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Protocol

import torch

from shiplap.tune.candidate import Candidate
from shiplap.tune.inputs import Inputs
from shiplap.tune.measure import Plan, Timing, Uncapturable, clock_for, race
from shiplap.tune.verify import Outcome, Verifier, is_fatal, synchronize
from shiplap.verify.run import last_line

__all__ = ["BEAT", "Bench", "LocalBench"]

BEAT = Struct("=qd")  # in memory shared with a worker: index of the candidate that runs (-1: none), and since when


class Bench(Protocol):
    """Verifies and times candidates by their index."""

    def verify(self, index: int) -> Outcome: ...

    def race(self, indices: Sequence[int], plan: Plan) -> tuple[dict[int, Timing], dict[int, str]]:
        """Timings, and why others have none."""
        ...


class LocalBench:
    """In this process: a candidate that crashes takes it along."""

    def __init__(
        self, inputs: Inputs, candidates: Sequence[Candidate], capture: str = "auto",
        at: Callable[[int], None] = lambda index: None,
    ) -> None:  # fmt: skip
        self.inputs, self.candidates, self.capture, self.at = inputs, candidates, capture, at
        self._verifier = Verifier(inputs)

    def verify(self, index: int) -> Outcome:
        self.at(index)
        return self._verifier.check(self.candidates[index])

    def race(self, indices: Sequence[int], plan: Plan) -> tuple[dict[int, Timing], dict[int, str]]:
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
