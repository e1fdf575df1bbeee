"""Clocks, and races that time candidates in turn.

Candidates run in turn, so that other load on the machine affects all of them alike, and medians decide. On the CPU, a
sample is the wall-clock time of enough calls to be long compared with the resolution of the clock. On CUDA, a sample is
the time between events around one run (or around the replay of a captured run). The L2 cache is flushed before each
run, because the inputs of a layer in a model are usually not in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import monotonic, perf_counter_ns
from typing import Any, Protocol

import torch

from shiplap import torch_private
from shiplap.errors import error_line
from shiplap.tuning.candidate import CandidateRun

benchmarks = 0  # samples taken in this process: frozen mode is tested to leave it alone


class Clock(Protocol):
    """The protocol of a clock by which candidates are timed."""

    def ready(self, run: CandidateRun) -> CandidateRun:
        """Return the function that is timed in place of ``run``, such as the replay of a captured graph, or ``run``
        itself. Raise ``Uncapturable`` if a capture is required and fails.
        """
        ...

    def sample(self, run: CandidateRun, repeats: int) -> float:
        """Call ``run`` ``repeats`` times and return the mean time of one call in seconds."""
        ...


class Uncapturable(Exception):
    """The error that a candidate cannot be captured in a CUDA graph."""


class CpuClock:
    """A clock that measures the wall time of calls on the CPU."""

    def ready(self, run: CandidateRun) -> CandidateRun:
        """Return ``run`` itself, since it is timed directly."""
        return run

    def sample(self, run: CandidateRun, repeats: int) -> float:
        """Call ``run`` ``repeats`` times and return the mean wall time of one call in seconds."""
        _count_sample()
        started = perf_counter_ns()
        for _ in range(repeats):
            run()
        return (perf_counter_ns() - started) / repeats * 1e-9


class CudaClock:
    """A clock that measures device time with CUDA events.

    If ``capture`` is ``"auto"``, it times the replay of a CUDA graph of the run if the run can be captured, and a
    direct call otherwise. ``"always"`` requires a capture, and ``"never"`` always times direct calls. If a direct call
    takes longer to launch its kernels than they run, its time is that of the launches.
    """

    def __init__(self, device: str, capture: str = "auto") -> None:
        """Make a clock for a CUDA device. ``capture`` is ``"auto"``, ``"always"`` or ``"never"``, as in the class
        docstring.
        """
        self.device, self.capture = torch.device(device), capture
        # Twice the cache, since the replacement policy need not evict everything when as many bytes as the cache has
        # are written.
        size = 2 * torch.cuda.get_device_properties(self.device).L2_cache_size
        self._flush = torch.empty(max(size, 1 << 22), dtype=torch.int8, device=self.device)
        self._kept: list[Any] = []

    def ready(self, run: CandidateRun) -> CandidateRun:
        """Return a function that replays a CUDA graph of ``run``. Return ``run`` itself if ``capture`` is ``"never"``,
        or if it is ``"auto"`` and ``run`` cannot be captured. Raise ``Uncapturable`` if it cannot be captured and
        ``capture`` is ``"always"``.
        """
        if self.capture == "never":
            return run
        stream = torch.cuda.Stream(self.device)
        for _ in range(2):  # the work of a first call must not be captured
            with self._on(stream):
                run()
        torch.cuda.synchronize(self.device)
        try:
            return self._captured(run, stream)
        except Uncapturable:
            if self.capture == "always":
                raise
            return run

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Return a context manager that makes ``stream`` the current stream. Work in its body runs after the earlier
        work of the previous stream, and before its later work.
        """
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def _captured(self, run: CandidateRun, stream: torch.cuda.Stream) -> CandidateRun:
        """Capture ``run`` into a CUDA graph on ``stream``. Return a function that replays the graph and returns its
        outputs. Raise ``Uncapturable`` if the capture fails.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            outs, failure = torch_private.capture_graph(graph, run, torch.cuda.graph_pool_handle())
        torch.cuda.synchronize(self.device)
        if failure is not None:
            raise Uncapturable(error_line(failure))
        self._kept.append((graph, outs, run))  # a graph holds addresses, so the tensors of run must stay

        def replay() -> Any:
            """Replay the graph and return its outputs. The next replay overwrites them."""
            graph.replay()
            return outs

        return replay

    def sample(self, run: CandidateRun, repeats: int) -> float:
        """Call ``run`` ``repeats`` times and return the mean time of one call on the device in seconds. The caches of
        the device are flushed before each call, and CUDA events measure the time.
        """
        _count_sample()
        for _ in range(3):  # the device is busy while the host gets ahead, so that the next launches queue up
            self._flush.zero_()
        events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flush.zero_()
            start.record()
            run()
            end.record()
            events.append((start, end))
        events[-1][1].synchronize()
        took: float = sum(start.elapsed_time(end) for start, end in events)
        return took * 1e-3 / repeats


def clock_for(device: str, capture: str = "auto") -> Clock:
    """Return the clock for ``device``. It is a CUDA clock with the setting ``capture`` for a CUDA device, and otherwise
    a CPU clock, for which ``capture`` has no meaning.
    """
    return CudaClock(device, capture) if torch.device(device).type == "cuda" else CpuClock()


@dataclass(frozen=True)
class RacePlan:
    """The limits of a race, in which candidates are timed alternately. It ends after ``rounds`` rounds, or after
    ``seconds`` if ``least`` rounds are made. Each timing lasts about ``sample`` seconds. A candidate is dropped if even
    its best time is more than ``hopeless`` times the lowest median of all candidates.
    """

    rounds: int = 25
    least: int = 5
    seconds: float = 10.0
    hopeless: float = 1.25
    sample: float = 100e-6


@dataclass(frozen=True)
class Timing:
    """The median and the quartiles of the times of one candidate in seconds, and the number of samples. ``finished`` is
    true if the candidate was timed to the end of the race, and false if it was dropped before.
    """

    median: float
    low: float
    high: float
    samples: int
    finished: bool

    @classmethod
    def of(cls, samples: Sequence[float], finished: bool) -> Timing:
        """Return the timing of ``samples``, which are times in seconds. ``finished`` is true if the candidate stayed in
        the race to the end, and false if it was dropped.
        """
        ranked = sorted(samples)
        return cls(median(ranked), ranked[len(ranked) // 4], ranked[(3 * len(ranked)) // 4], len(ranked), finished)


def race_runs(
    runs: Mapping[int, CandidateRun], clock: Clock, plan: RacePlan, at: Callable[[int], None] = lambda index: None
) -> dict[int, Timing]:
    """Time ``runs`` alternately, and return a dict from the index of each run to its timing.

    A run that is clearly slower than the fastest one is dropped early. Its timing then has fewer samples and is not
    ``finished``. ``plan`` limits rounds and seconds. ``at`` is called with the index before each run.
    """
    deadline = monotonic() + plan.seconds
    samples: dict[int, list[float]] = {}
    repeats: dict[int, int] = {}
    live: list[int] = []
    for index, run in runs.items():  # the first, cold sample only gives the repeats, and the hopeless runs
        at(index)
        run()
        first = clock.sample(run, 1)
        repeats[index] = max(1, min(1000, math.ceil(plan.sample / max(first, 1e-9))))
        samples[index] = [first]
        live.append(index)

    def remeasure(index: int) -> float:
        """Return the seconds of one more call of the run at ``index``."""
        at(index)
        return clock.sample(runs[index], 1)

    live = _drop_far_slower(live, samples, remeasure)
    for number in range(plan.rounds):
        # Each round begins with another candidate, so that no candidate always runs behind the same one.
        for index in live[number % len(live) :] + live[: number % len(live)]:
            at(index)
            value = clock.sample(runs[index], repeats[index])
            # The first round replaces the cold sample, which does not belong in a median.
            samples[index] = [value] if number == 0 else [*samples[index], value]
        live = _still_in_race(live, samples, number, plan)
        if monotonic() > deadline and number + 1 >= plan.least:
            break
        # At twice its time a race ends even if candidates have fewer than the least number of samples.
        if monotonic() > deadline + plan.seconds:
            break
    return {index: Timing.of(values, index in live) for index, values in samples.items()}


def launch_seconds(
    runs: Mapping[int, CandidateRun], wait: Callable[[], Any], rounds: int = 10, calls: int = 5
) -> dict[int, float]:
    """Return a dict from the index of each run to the least seconds in which the host launches one call of it.

    In each of ``rounds``, every run is called ``calls`` times without waiting for the device. ``wait`` returns when the
    device has finished all work. The host is delayed by other programs and never hurried, so the least time counts.
    """
    least = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        for index, run in runs.items():
            wait()
            started = perf_counter_ns()
            for _ in range(calls):
                run()
            least[index] = min(least[index], (perf_counter_ns() - started) / calls * 1e-9)
    wait()
    return least


def _count_sample() -> None:
    """Count one more sample in this process. Tests read the count to see whether anything was measured."""
    global benchmarks
    benchmarks += 1


def _drop_far_slower(live: list[int], samples: dict[int, list[float]], remeasure: Callable[[int], float]) -> list[int]:
    """Return the indices in ``live`` whose best sample is at most four times that of the fastest candidate.

    ``samples`` has the samples of each index in seconds. A slow sample is first repeated by ``remeasure(index)`` and
    appended to them, so that no candidate is dropped for one disturbed sample.
    """
    fastest = min(samples[i][0] for i in live)
    for index in live:
        # A run of a second or more is repeated once only, for the time that it takes.
        for _ in range(2 if samples[index][0] < 1.0 else 1):
            if min(samples[index]) > 4 * fastest:
                samples[index].append(remeasure(index))
    return [i for i in live if min(samples[i]) <= 4 * fastest]


def _still_in_race(live: list[int], samples: dict[int, list[float]], number: int, plan: RacePlan) -> list[int]:
    """Return the indices in ``live`` of the candidates that may still win after the round ``number``.

    After the rounds 0 and 1, all of them may. After later rounds, a candidate may win if its best sample is at most
    ``plan.hopeless`` times the lowest median of all.
    """
    if number < 2:
        return live
    best = min(median(samples[i]) for i in live)
    return [i for i in live if min(samples[i]) <= plan.hopeless * best]
