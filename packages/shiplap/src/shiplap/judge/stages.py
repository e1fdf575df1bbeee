"""The stages of a judgement, and the time that each of them took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shiplap.sandbox.supervisor import SandboxedProcess


@dataclass(frozen=True)
class StageTime:
    """The time of one stage of a judgement.

    Attributes:
        stage: the name of the stage, such as ``"values"``.
        seconds: how long the stage took.
        sandboxed: the seconds of it in which sandboxed processes worked, as candidates do that compile. Processes that
            work side by side count separately.
    """

    stage: str
    seconds: float
    sandboxed: float


@dataclass
class StageClock:
    """A clock that adds up the times of the stages of one judgement.

    ``prisoners`` are the sandboxed processes that the judgement has started. ``waited`` are the seconds that the
    judgement has waited for others, which belong to no stage.
    """

    prisoners: list[SandboxedProcess] = field(default_factory=list)
    waited: float = 0.0
    _taken: dict[str, tuple[float, float]] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Return a context manager for one stage called ``name``. Its time is added to that of earlier stages of the
        name, also if the body raises an error.
        """
        before = self._now()
        try:
            yield
        finally:
            seconds, sandboxed = (b - a for a, b in zip(before, self._now(), strict=True))
            earlier = self._taken.get(name, (0.0, 0.0))
            self._taken[name] = earlier[0] + seconds, earlier[1] + sandboxed

    def _now(self) -> tuple[float, float]:
        """Return the time by ``time.monotonic`` without ``waited``, and the sum of the seconds in which the sandboxed
        processes have worked so far.
        """
        return time.monotonic() - self.waited, sum(prisoner.answering for prisoner in self.prisoners)

    def times(self) -> tuple[StageTime, ...]:
        """Return the time of each stage so far, in the order in which they first ended."""
        return tuple(StageTime(name, *taken) for name, taken in self._taken.items())
