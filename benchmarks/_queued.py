"""Calls on a device, timed as a server or a training loop has them: queued behind each other, and one by one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

Timed = dict[str, list[tuple[float, float]]]
__all__ = ["launched", "queued", "told", "waited"]

SPAN = 0.04  # seconds of a round of one row


def queued(
    calls: dict[str, Callable[[], Any]], rounds: int, span: float = SPAN
) -> dict[str, list[tuple[float, float]]]:
    """For each row and round the seconds of a call on the device, and those that this process needed to launch it.

    A round of a row is one call ahead, behind which the queue fills, and as many between two events as take ``span``.
    Rows take turns in random order.
    """
    counts = {name: max(2, round(span / _once(call, 2)[0])) for name, call in calls.items()}
    times: Timed = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(_once(calls[name], counts[name]))
    return times


def _once(call: Callable[[], Any], count: int) -> tuple[float, float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    call()
    start.record()
    before = time.perf_counter()
    for _ in range(count):
        call()
    launched = time.perf_counter() - before
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / count, launched / count


def waited(calls: dict[str, Callable[[], Any]], rounds: int, device: str = "cuda") -> dict[str, list[float]]:
    """Seconds of wall time of a call that is waited for, as before 2026-11-26: what one request takes."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            wait()
            start = time.perf_counter()
            calls[name]()
            wait()
            times[name].append(time.perf_counter() - start)
    return times


def told(times: dict[str, list[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Medians in microseconds, and medians of ``off`` over each row inside a round."""
    us = {n: round(median(ts) * 1e6, 1) for n, ts in times.items()}
    ratios = {n: [o / t for o, t in zip(times["off"], ts, strict=True)] for n, ts in times.items() if n != "off"}
    return us, {n: round(median(r), 3) for n, r in ratios.items()}


def launched(times: dict[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    """The least microseconds in which a call was launched: where it is less than the call takes, the device decides."""
    return {n: round(min(host for _, host in ts) * 1e6, 1) for n, ts in times.items()}
