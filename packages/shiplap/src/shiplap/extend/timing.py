"""Times that are worth comparing: functions take turns on the device's own clock; and a bar for whoever waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import median
from time import monotonic

from torch import Tensor

from shiplap.selection.choice import show_time
from shiplap.selection.measure import clock_for

__all__ = ["progress_bar", "show_time", "time_in_turn"]

SAMPLE = 1e-3  # seconds of one sample: long against the clock
LEAST, MOST = 5, 25  # samples of each function


def progress_bar(wanted: bool | None = None) -> AbstractContextManager[Callable[[str, int, int], None]]:
    """A bar on stderr, by default when that is a terminal: within the context call it ``(what, done, total)``.

    Nothing stays of the bar on the screen. Without one the function does nothing.
    """
    from shiplap.selection.engine import shown

    return shown(wanted)


def time_in_turn(
    runs: Mapping[str, Callable[[], tuple[Tensor, ...]]], *, device: str, seconds: float
) -> dict[str, float]:
    """The median seconds of one call of each of ``runs``.

    The functions are called in turn until ``seconds`` are spent, each five times at least: what else the machine does
    hits them alike, and none is given up for a sample that was disturbed. On CUDA a function is captured into a graph
    where that is possible, and the L2 cache is flushed before each call.
    """
    clock = clock_for(device)
    ready = {name: clock.ready(run) for name, run in runs.items()}
    repeats: dict[str, int] = {}
    for name, run in ready.items():
        run()  # the first call of a kernel loads it
        repeats[name] = max(1, min(200, int(SAMPLE / max(clock.sample(run, 2), 1e-9))))
    samples: list[dict[str, float]] = []
    ends = monotonic() + seconds
    while len(samples) < LEAST or (monotonic() < ends and len(samples) < MOST):
        samples.append({name: clock.sample(run, repeats[name]) for name, run in ready.items()})
    return {name: median(sample[name] for sample in samples) for name in ready}
