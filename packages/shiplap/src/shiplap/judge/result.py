"""``JudgeResult``: the verdict on a candidate, as plain values, with the stages of the judgement and their times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from shiplap.render.result import ResultWithVerdict, Row
from shiplap.sampling.ledger import Cell
from shiplap.sandbox.supervisor import SandboxedProcess

JudgeVerdict = Literal["accepted", "refused", "incomplete"]


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
    """The measured times of one shape. All are seconds by the clock of the process that judges.

    Attributes:
        input: the shapes and the kind of values.
        candidate, reference: the least time of one call, minus the time for exchanging messages with the process.
        compiled: the least time of one call of the reference under ``torch.compile``, or None if it was not measured.
        resolution: the share of one call in the time for exchanging messages. A candidate can hide at most this much of
            its own time.
        light: a lower bound of the time. It is the time that this machine needs to move the bytes and to compute the
            matrix products at the highest rates that were measured on it.
        rounds: the number of timed calls of each process. Each call had new values, and each result was checked.
        batch: the number of calls that were timed together.
        queued: whether the calls were queued on a GPU before the clock started.
    """

    input: str
    candidate: float
    reference: float
    compiled: float | None
    resolution: float
    light: float
    rounds: int
    batch: int = 1
    queued: bool = False

    @property
    def speedup(self) -> float:
        """The time of one call of the reference divided by the time of one call of the candidate."""
        return self.reference / max(self.candidate, 1e-9)

    @property
    def min_speedup(self) -> float:
        """The speedup, computed as if each call of the candidate had taken longer by the resolution of the clock.

        A candidate cannot gain from errors of measurement in this number. Use it where a speedup is rewarded.
        """
        return self.reference / max(self.candidate + self.resolution, 1e-9)


@dataclass(frozen=True, repr=False)
class JudgeResult(ResultWithVerdict):
    """The verdict on one candidate.

    A result has no truth value, so a test has to say ``assert result.verdict == "accepted"``.

    Attributes:
        reference, candidate: the names of what was compared.
        verdict: ``"refused"`` if there is at least one reason. Otherwise it is ``"incomplete"`` if ``missing`` is not
            empty, and ``"accepted"`` if it is.
        reasons: the faults of the candidate.
        missing: pairs of the name of a required comparison or part of the sandbox that is missing, and the reason.
        unchecked: properties about which the verdict says nothing, as text.
        timings: the times of each timed shape. It is empty if the candidate was refused before.
        calls: the number of calls of the candidate that were compared with the reference.
        seconds: the duration of the whole judgement.
        stages: the stages of the judgement, each with its time. They show where the duration goes.
        ledger: the cells to which the calls belong. A cell is a pair of a property that inputs vary (such as ``size``)
            and of what is compared (such as ``gradient``). A required cell without calls is also in ``missing``.
    """

    reference: str
    candidate: str
    reasons: tuple[Reason, ...]
    missing: tuple[tuple[str, str], ...]
    unchecked: tuple[str, ...]
    timings: tuple[Timed, ...]
    calls: int
    seconds: float
    ledger: tuple[Cell, ...] = ()
    stages: tuple[StageTime, ...] = ()
    _good: ClassVar[str] = "accepted"

    @property
    def verdict(self) -> JudgeVerdict:
        """The verdict on the candidate. It is ``"refused"`` if ``reasons`` is not empty. Otherwise it is
        ``"incomplete"`` if ``missing`` is not empty, and ``"accepted"`` if both are empty.
        """
        return "refused" if self.reasons else "incomplete" if self.missing else "accepted"

    @property
    def headline(self) -> str:
        """One line with the name of the candidate and the verdict. It also has the speedups if the candidate was
        accepted and timed.
        """
        fast = f", {self.speedup:.2f}x the reference, at least {self.min_speedup:.2f}x" if self.speedup else ""
        return f"{self.candidate}: {self.verdict}{fast}"

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of the printed report.

        Faults of the candidate, missing checks and times come first. Required checks that do not apply, the number of
        compared calls and unchecked properties follow.
        """
        rows = [Row(r.check, "fail", r.evidence, (f"on {r.input}",) if r.input else ()) for r in self.reasons]
        rows += [Row(name, "incomplete", why) for name, why in self.missing]
        rows += [Row("times", "ok", _times_text(timed)) for timed in self.timings]
        left_out = [c for c in self.ledger if c.required and c.state == "does not apply"]
        rows += [Row(str(c), "skip", f"does not apply: {c.reason}") for c in left_out]
        rows.append(
            Row("calls", "", f"{self.calls} calls were compared with {self.reference}, in {self.seconds:.1f} s")
        )
        return (*rows, *(Row("unchecked", "skip", text) for text in self.unchecked))

    @property
    def speedup(self) -> float:
        """The geometric mean of the speedups of all timed shapes. It is 0 if the candidate is not accepted or was not
        timed.
        """
        return self._geometric_mean([t.speedup for t in self.timings])

    @property
    def min_speedup(self) -> float:
        """The geometric mean of :attr:`Timed.min_speedup` of all timed shapes. It is 0 if the candidate is not accepted
        or was not timed.
        """
        return self._geometric_mean([t.min_speedup for t in self.timings])

    def _geometric_mean(self, values: list[float]) -> float:
        """Return the geometric mean of ``values``. Return 0 if there are none or the candidate is not accepted."""
        from math import exp, log

        if self.verdict != "accepted" or not values:
            return 0.0
        return exp(sum(log(max(v, 1e-12)) for v in values) / len(values))

    def as_json(self) -> dict[str, Any]:
        """Return all fields, the verdict and the speedups as a dict of values that ``json`` can write."""
        timings = [{**asdict(t), "speedup": t.speedup, "min_speedup": t.min_speedup} for t in self.timings]
        return {
            "verdict": self.verdict,
            "speedup": self.speedup,
            "min_speedup": self.min_speedup,
            **asdict(self),
            "missing": dict(self.missing),
            "timings": timings,
        }


def _times_text(timed: Timed) -> str:
    """Return the measured times of one shape as one line of a report. The line has the times of the candidate, the
    reference and the compiled reference, if it was timed. The resolution (the time that a candidate could hide), the
    share of the machine's highest rates and the number of timed calls follow.
    """
    compiled = f", compiled {timed.compiled * 1e6:.1f} us" if timed.compiled is not None else ""
    share = f"{100 * timed.light / max(timed.candidate, 1e-9):.0f} % of what the machine could do"
    return (
        f"{timed.input}: {timed.candidate * 1e6:.1f} us, reference {timed.reference * 1e6:.1f} us{compiled} "
        f"(+- {timed.resolution * 1e6:.1f} us, {share}, {timed.rounds} calls)"
    )


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

    def note_building(self, seconds: float) -> None:
        """Record that programs which the candidate started built it for ``seconds``, beside the time of the stages."""
        self._taken["building"] = seconds, seconds

    def times(self) -> tuple[StageTime, ...]:
        """Return the time of each stage so far, in the order in which they first ended."""
        return tuple(StageTime(name, *taken) for name, taken in self._taken.items())
