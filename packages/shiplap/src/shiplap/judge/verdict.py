"""``Ruling``: the verdict on a candidate, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["EXIT_CODES", "Reason", "Ruling", "Timed", "Word"]

Word = Literal["accepted", "refused", "incomplete"]
EXIT_CODES: dict[str, int] = {"accepted": 0, "refused": 1, "incomplete": 3}


@dataclass(frozen=True)
class Reason:
    """One thing that is wrong with the candidate, and the input that shows it."""

    check: str
    evidence: str
    input: str = ""


@dataclass(frozen=True)
class Timed:
    """Times of one shape, in seconds, by the referee's clock.

    Attributes:
        candidate, reference: medians, less what the exchange of messages takes.
        compiled: the same of ``torch.compile`` of the reference; None where it was not measured.
        resolution: what the exchange takes. A process that cheats with its own clock can gain this much at most.
        light: the time that the machine needs to move the bytes and to do the sums, as fast as it was seen to.
        rounds: how many calls of each were timed; each had values of its own, and each result was checked.
    """

    input: str
    candidate: float
    reference: float
    compiled: float | None
    resolution: float
    light: float
    rounds: int

    @property
    def speedup(self) -> float:
        """How many times as fast as the reference."""
        return self.reference / max(self.candidate, 1e-9)

    @property
    def at_least(self) -> float:
        """The speedup that remains if the candidate hid as much time as can be hidden: what a reward should use."""
        return self.reference / max(self.candidate + self.resolution, 1e-9)


@dataclass(frozen=True)
class Ruling:
    """The verdict on one candidate.

    Attributes:
        word: ``"refused"`` with at least one reason; ``"incomplete"`` when nothing was found and something that has to
            be in force or to be looked at was not (``missing``); else ``"accepted"``.
        unchecked: what this verdict says nothing about, in words.
        calls: how many calls of the candidate were compared with the reference.
    """

    reference: str
    candidate: str
    reasons: tuple[Reason, ...]
    missing: tuple[tuple[str, str], ...]
    unchecked: tuple[str, ...]
    timings: tuple[Timed, ...]
    calls: int
    seconds: float

    @property
    def word(self) -> Word:
        return "refused" if self.reasons else "incomplete" if self.missing else "accepted"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]

    @property
    def speedup(self) -> float:
        """The geometric mean of the speedups over the timed shapes; 0 unless the candidate is accepted."""
        return self._mean([t.speedup for t in self.timings])

    @property
    def at_least(self) -> float:
        """The same of :attr:`Timed.at_least`."""
        return self._mean([t.at_least for t in self.timings])

    def _mean(self, values: list[float]) -> float:
        from math import exp, log

        if self.word != "accepted" or not values:
            return 0.0
        return exp(sum(log(max(v, 1e-12)) for v in values) / len(values))

    def as_json(self) -> dict[str, Any]:
        """Plain values: all fields, the word, and the speedups."""
        timings = [{**asdict(t), "speedup": t.speedup, "at_least": t.at_least} for t in self.timings]
        return {
            "verdict": self.word,
            "speedup": self.speedup,
            "speedup_at_least": self.at_least,
            **asdict(self),
            "missing": dict(self.missing),
            "timings": timings,
        }
