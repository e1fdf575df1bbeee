"""One call on a GPU, timed by events as a program would see it: with work queued before it and behind it.

A GPU begins and ends a kernel half a microsecond later where further kernels wait behind it than where it is the last
one (H100, measured 2026-11-26, see ``docs/judge.md``). Programs queue their work, and so does ``do_bench`` of Triton.
Nothing here waits between the caches' emptying and the last of the kernels that are queued behind the call.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import randrange
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from shiplap.sandbox.protocol import bare

DEVICE = "cuda"
FLUSHED, SWEEPS = 256 << 20, 8  # bytes of a GPU's memory, and how often they are written: half a millisecond
BEHIND = 32  # small kernels behind the call: the time of the call grows up to about 16
PROBED = 1024  # elements of a result that are looked at as soon as the call's own stream is done


@dataclass(frozen=True)
class Queued:
    """A call that is over.

    Attributes:
        result: the values that it returned, one after the other.
        seen: its results as the next consumer on the same stream saw them.
        clock: nanoseconds: ``spent`` of the host until the call's own stream was done, ``device`` by events, and
            ``late`` in which other streams still worked.
        raced: whether a result or a written argument was not complete yet when the call's own stream was done.
    """

    result: list[Any]
    seen: list[Any]
    clock: dict[str, int]
    raced: bool


def queued(target: Callable[..., Any], args: list[Any]) -> Queued:
    """Empty the caches, call ``target``, and look at its results from the stream that it was called on."""
    start, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device=DEVICE)
    small = flush[:256]
    stream = torch.cuda.current_stream()
    torch.cuda.synchronize()
    began = perf_counter_ns()
    for value in range(SWEEPS):  # takes long enough for the host to be ahead of the device
        flush.fill_(value)
    start.record(stream)
    result = bare(target(*args))
    with _uncollected():
        end.record(stream)
        if torch.cuda.current_stream() != stream:
            raise RuntimeError("it leaves another stream current")
        outs = [o for o in result if _on_device(o)]
        looked = [*outs, *(a for a in bare(args) if _on_device(a))]
        probes = [_probe(t) for t in looked]  # the next kernels of the stream, before work elsewhere can end
        copies = [o.clone() for o in outs]
        for value in range(BEHIND):
            small.fill_(value)
        last.record(stream)
        end.synchronize()
        joined = perf_counter_ns()
        last.synchronize()
        done = perf_counter_ns()
        torch.cuda.synchronize()
        late = perf_counter_ns() - done
        pairs = zip(looked, probes, strict=True)
        raced = any(_differ(_taken(t, at, step), probe) for t, (at, step, probe) in pairs)
        raced = raced or any(_differ(o, copy) for o, copy in zip(outs, copies, strict=True))
    rest = iter(copies)
    seen = [next(rest) if _on_device(o) else o for o in result]
    clock = {"spent": joined - began, "device": round(start.elapsed_time(end) * 1e6), "late": late}
    return Queued(result, seen, clock, raced)


@contextmanager
def _uncollected() -> Iterator[None]:
    """What a call left in circles is not ended here: its finalizers could do the work that the call did not do."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _on_device(value: Any) -> bool:
    return type(value) is Tensor and value.device.type == DEVICE and value.layout is torch.strided


def _probe(result: Tensor) -> tuple[int, int, Tensor]:
    """A few elements of a result, where nobody knows: the first, the step, and their values."""
    step = max(1, result.numel() // PROBED)
    at = randrange(step)
    return at, step, _taken(result, at, step).clone()


def _taken(result: Tensor, at: int, step: int) -> Tensor:
    return result.detach().reshape(-1)[at::step]


def _differ(a: Tensor, b: Tensor) -> bool:
    a, b = (t.resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (a, b))
    return not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
