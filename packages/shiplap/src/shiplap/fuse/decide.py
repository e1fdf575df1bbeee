"""``Decision``: which candidate a call got, and why; the last ones of this process, for ``explain`` and for tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Decision", "Verdict", "decisions", "remember", "watch"]

_recent: deque[Decision] = deque(maxlen=1000)
_watchers: list[Callable[[Decision], None]] = []


@dataclass(frozen=True)
class Verdict:
    """What became of one candidate.

    ``status``: ``ok``; ``wrong`` or ``broken``; ``dropped``, by a measurement, for either reason; ``refused``, because
    it does not take the call. ``time_us``: alone, where it was measured.
    """

    candidate: str
    status: str
    detail: str = ""
    time_us: float | None = None


@dataclass(frozen=True)
class Decision:
    """The candidate chosen for one call of ``op`` in a compiled graph. ``node`` is the FX node that was lowered."""

    op: str
    node: str
    sizes: str
    dtypes: str
    chosen: str
    reason: str
    verdicts: tuple[Verdict, ...] = ()


def remember(decision: Decision) -> None:
    _recent.append(decision)
    for watcher in _watchers:
        watcher(decision)


@contextmanager
def watch(watcher: Callable[[Decision], None]) -> Iterator[None]:
    """Tell ``watcher`` of every decision made within this context."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def decisions(op: str = "") -> tuple[Decision, ...]:
    """Decisions of this process, oldest first; those of one op if named. Code from a cache was decided elsewhere."""
    return tuple(d for d in _recent if not op or d.op == op)
