"""``Ruling``: the verdict on a candidate, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shiplap.render.lines import Line, line

Word = Literal["accepted", "refused", "incomplete"]
STYLES: dict[str, str] = {"accepted": "bold green", "refused": "bold red", "incomplete": "bold yellow"}
EXIT_CODES: dict[str, int] = {"accepted": 0, "refused": 1, "incomplete": 3}


@dataclass(frozen=True)
class Reason:
    """One fault of the candidate.

    Attributes:
        check: the name of the check that found it, such as ``"values"``.
        evidence: what was observed.
        input: the shapes and the kind of values of the call that shows the fault.
    """

    check: str
    evidence: str
    input: str = ""


@dataclass(frozen=True)
class Timed:
    """The measured times of one shape. All times are in seconds, by the clock of the process that judges.

    Attributes:
        input: the shapes and the kind of values.
        candidate, reference: the least time of one call, minus the time for exchanging messages with the process. On a
            GPU, the median time by its events.
        compiled: the same for ``torch.compile`` of the reference, or None if it was not measured.
        resolution: the time for exchanging messages. A candidate can hide at most this much of its own time.
        light: a lower bound: the time that this machine needs to move the bytes and to compute the matrix products, at
            the highest rates that were measured on it.
        rounds: the number of timed calls of each process. Each call had new values, and each result was checked.
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
        """The time of the reference divided by the time of the candidate."""
        return self.reference / max(self.candidate, 1e-9)

    @property
    def at_least(self) -> float:
        """The speedup if the candidate hid as much time as possible. Use this figure for rewards."""
        return self.reference / max(self.candidate + self.resolution, 1e-9)

    @property
    def text(self) -> str:
        """One line."""
        compiled = f", compiled {self.compiled * 1e6:.1f} us" if self.compiled is not None else ""
        share = f"{100 * self.light / max(self.candidate, 1e-9):.0f} % of what the machine could do"
        return (
            f"{self.input}: {self.candidate * 1e6:.1f} us, reference {self.reference * 1e6:.1f} us{compiled} "
            f"(+- {self.resolution * 1e6:.0f} us, {share}, {self.rounds} calls)"
        )


@dataclass(frozen=True)
class Ruling:
    """The verdict on one candidate.

    Attributes:
        reference, candidate: the names of what was compared.
        word: ``"refused"`` if there is at least one reason. ``"incomplete"`` if there is no reason, but ``missing`` is
            not empty. Otherwise ``"accepted"``.
        reasons: the faults of the candidate.
        missing: pairs of a required comparison or part of the sandbox, and why it is missing.
        unchecked: properties that the verdict says nothing about, as text.
        timings: one entry for each timed shape. Empty if the candidate was refused before.
        calls: the number of calls of the candidate that were compared with the reference.
        seconds: the duration of the whole judgement.
        exit_code: 0 for accepted, 1 for refused, 3 for incomplete.
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
        """The geometric mean of the speedups of all timed shapes. It is 0 if the candidate is not accepted."""
        return self._mean([t.speedup for t in self.timings])

    @property
    def at_least(self) -> float:
        """The geometric mean of :attr:`Timed.at_least`. It is 0 if the candidate is not accepted."""
        return self._mean([t.at_least for t in self.timings])

    def _mean(self, values: list[float]) -> float:
        from math import exp, log

        if self.word != "accepted" or not values:
            return 0.0
        return exp(sum(log(max(v, 1e-12)) for v in values) / len(values))

    def lines(self) -> Iterator[Line]:
        """Yield the verdict, then reasons, omissions, times and extent."""
        yield line(f"{self.candidate}: {self.word}", STYLES[self.word])
        for reason in self.reasons:
            yield line(f"  {reason.check}: {reason.evidence}", "red")
            if reason.input:
                yield line(f"    on {reason.input}", "dim")
        for name, why in self.missing:
            yield line(f"  not looked at: {name}: {why}", "yellow")
        for timed in self.timings:
            yield line(f"  {timed.text}")
        if self.speedup:
            yield line(f"  {self.speedup:.2f}x the reference, {self.at_least:.2f}x at least", "bold")
        yield line(f"  {self.calls} calls were compared with {self.reference}, in {self.seconds:.1f} s", "dim")
        for text in self.unchecked:
            yield line(f"  no word about {text}", "dim")

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
