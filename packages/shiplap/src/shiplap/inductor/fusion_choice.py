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
    """The result of testing or timing one candidate, that is a possible kernel for a call.

    ``candidate`` is its label. ``status`` is ``ok``, ``wrong`` (its results differ from the reference), ``broken`` (it
    raised an error), ``dropped`` (a measurement rejected it) or ``refused`` (it does not support the call or cannot be
    tested). ``detail`` states the reason, or is empty. ``time_us`` is the measured time of the candidate alone in
    microseconds, or None.
    """

    candidate: str
    status: str
    detail: str = ""
    time_us: float | None = None

    def lines(self) -> Iterator[Line]:
        """Yield the printed line of this result, with the candidate, its status, its time and the detail."""
        time = f"alone {self.time_us:.1f} us" if self.time_us is not None else ""
        detail = ", ".join(part for part in (time, self.detail) if part)
        text = f"{self.candidate}: {detail}" if detail else self.candidate
        yield from row(self.status, text, STYLES.get(self.status, ""))


@dataclass(frozen=True)
class FusionChoice:
    """The candidate that was chosen for one call of an op in a compiled graph. A candidate is a possible kernel for the
    call, or the op's fallback.

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
        """Yield the printed lines of this choice. They hold the call, the chosen candidate with the reason, and the
        result of each tested candidate.
        """
        yield from row("op", f"{self.op}  {self.sizes}  {self.dtypes}")
        yield from row("chosen", f"{self.chosen}: {self.reason}", "green")
        for verdict in self.verdicts:
            yield from verdict.lines()


def remember_fusion_choice(choice: FusionChoice) -> None:
    """Store ``choice`` among the last 1000 of this process, and pass it to each function that
    :func:`watch_fusion_choices` was given. A choice states which kernel a compilation uses for one call.
    """
    _recent.append(choice)
    for watcher in _watchers:
        watcher(choice)


@contextmanager
def watch_fusion_choices(watcher: Callable[[FusionChoice], None]) -> Iterator[None]:
    """Pass to ``watcher`` each choice of a kernel that a compilation makes within the ``with`` block."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def fusion_choices(op: str = "") -> tuple[FusionChoice, ...]:
    """Return at most the last 1000 choices of kernels that compilations in this process made, oldest first.

    If ``op`` is not empty, return only the choices for the op of this name. Code that comes from a cache adds no
    choice, because another process made the choice.
    """
    return tuple(d for d in _recent if not op or d.op == op)
