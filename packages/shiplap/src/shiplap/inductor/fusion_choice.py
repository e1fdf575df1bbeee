"""``FusionChoice``, the candidate that was chosen for a call, with the reason. ``explain`` and tests read the latest
ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shiplap.render.lines import Line, row

STYLES = {"ok": "green", "wrong": "red", "broken": "red", "dropped": "red", "refused": "dim"}
_recent: deque[FusionChoice] = deque(maxlen=1000)
_watchers: list[Callable[[FusionChoice], None]] = []


@dataclass(frozen=True)
class CandidateVerdict:
    """The result of testing or timing one candidate, a possible kernel for a call.

    ``status`` is ``ok``, ``wrong``, ``broken``, ``dropped`` (a measurement rejected the candidate) or ``refused`` (the
    candidate does not support the call). ``time_us`` is the measured time of the candidate alone in microseconds, or
    None.
    """

    candidate: str
    status: str
    detail: str = ""
    time_us: float | None = None

    def lines(self) -> Iterator[Line]:
        """Yield the printed line of this result, with the candidate, its status, time and detail."""
        time = f"alone {self.time_us:.1f} us" if self.time_us is not None else ""
        detail = ", ".join(part for part in (time, self.detail) if part)
        text = f"{self.candidate}: {detail}" if detail else self.candidate
        yield from row(self.status, text, STYLES.get(self.status, ""))


@dataclass(frozen=True)
class FusionChoice:
    """The candidate chosen for one call of an op in a compiled graph.

    ``op`` is the name of the op, and ``node`` that of the FX node that was lowered. ``sizes`` and ``dtypes`` describe
    the call as text. ``chosen`` is the label of the candidate, and ``reason`` states why it was chosen. ``verdicts``
    are the results of all tested candidates.
    """

    op: str
    node: str
    sizes: str
    dtypes: str
    chosen: str
    reason: str
    verdicts: tuple[CandidateVerdict, ...] = ()

    def lines(self) -> Iterator[Line]:
        """Yield the printed lines of this choice, with the call, the chosen candidate and the reason, and the result of
        each candidate.
        """
        yield from row("op", f"{self.op}  {self.sizes}  {self.dtypes}")
        yield from row("chosen", f"{self.chosen}: {self.reason}", "green")
        for verdict in self.verdicts:
            yield from verdict.lines()


def remember_fusion_choice(choice: FusionChoice) -> None:
    """Store ``choice`` among the last 1000 of this process, and call each function given to ``watch_fusion_choices``
    with it. A choice states which kernel a compilation uses for one call.
    """
    _recent.append(choice)
    for watcher in _watchers:
        watcher(choice)


@contextmanager
def watch_fusion_choices(watcher: Callable[[FusionChoice], None]) -> Iterator[None]:
    """Call ``watcher`` with every choice that a compilation makes within this context."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def fusion_choices(op: str = "") -> tuple[FusionChoice, ...]:
    """Return the last 1000 choices of candidates in this process, oldest first.

    If ``op`` is the name of an op, return only the choices for that op. By default it is empty, and all are returned.
    Code that comes from a cache adds no choice, because another process made the choice.
    """
    return tuple(d for d in _recent if not op or d.op == op)
