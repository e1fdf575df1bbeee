"""Comparable times: functions run in turn and are timed with the device's own clock. Also a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import median
from time import monotonic

from torch import Tensor

from shiplap.tuning.choice import show_time
from shiplap.tuning.measure import clock_for

__all__ = ["progress_bar", "show_time", "time_in_turn"]

SAMPLE = 1e-3  # seconds of one sample: long against the clock
LEAST, MOST = 5, 25  # samples of each function


def progress_bar(wanted: bool | None = None) -> AbstractContextManager[Callable[[str, int, int], None]]:
    """Return a context manager that yields a function ``report(what, done, total)``. A call of this function updates a
    progress bar on stderr.

    If ``wanted`` is true, the bar is shown. If it is false, no bar is shown, and ``report`` does nothing. If it is
    None, the bar is shown if stderr is a terminal. The bar is removed at the end of the ``with`` block.
    """
    from shiplap.tuning.engine import tuning_progress

    return tuning_progress(wanted)


def time_in_turn(
    runs: Mapping[str, Callable[[], tuple[Tensor, ...]]], *, device: str, seconds: float
) -> dict[str, float]:
    """Return the median time of one call of each of ``runs``, in seconds, by the names in ``runs``.

    The functions are called in turn for about ``seconds``, at most 25 turns. Other load on the machine then slows all
    of them equally. Each has at least five turns, and a turn may be several calls. On CUDA a function is captured into
    a graph if that is possible, and the L2 cache is flushed before each call.
    """
    clock = clock_for(device)
    ready = {name: clock.ready(run) for name, run in runs.items()}
    repeats: dict[str, int] = {}
    for name, run in ready.items():
        run()  # the first call of a kernel loads it
        # A sample takes about a millisecond, long against the clock.
        repeats[name] = max(1, min(200, int(SAMPLE / max(clock.sample(run, 2), 1e-9))))
    samples: list[dict[str, float]] = []
    ends = monotonic() + seconds
    while len(samples) < LEAST or (monotonic() < ends and len(samples) < MOST):
        samples.append({name: clock.sample(run, repeats[name]) for name, run in ready.items()})
    return {name: median(sample[name] for sample in samples) for name in ready}
