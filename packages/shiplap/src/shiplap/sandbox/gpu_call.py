"""One call on a GPU, timed by events, with work queued before it and after it.

A GPU begins and ends a kernel half a microsecond later if further kernels are queued after it (H100, measured
2026-11-26). Programs queue their work, as does ``do_bench`` of Triton. No step between the flush
of the caches and the last queued kernel waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import randrange
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from shiplap.lazy_imports import uncollected
from shiplap.sandbox.protocol import flatten_results, structure_of

DEVICE = "cuda"
FLUSHED, SWEEPS = 256 << 20, 2  # bytes, beyond the L2 cache, and the number of writes: a tenth of a millisecond
KERNELS_BEHIND = 4  # small kernels after the call
PROBED_ELEMENTS = 1024  # elements of a result that are read as soon as the call's own stream is done


@dataclass(frozen=True)
class QueuedCall:
    """The outcome of one call on a GPU.

    Attributes:
        result: the returned values in order, as a flat list.
        structure: the tuples, lists and dicts in which they are nested, as a string.
        seen: the results as the next kernel on the same stream reads them.
        clock: times in nanoseconds. ``spent`` is the time of the host until the call's own stream was done. ``device``
            is the time by events. ``late`` is the time for which other streams still worked.
        raced: whether a result or a changed argument was incomplete when the call's own stream was done.
    """

    result: list[Any]
    structure: str
    seen: list[Any]
    clock: dict[str, int]
    raced: bool


def call_in_queue(target: Callable[..., Any], args: list[Any]) -> QueuedCall:
    """Flush the caches, call ``target`` on ``args``, and read its results on the stream of the call. Return the results
    and the times.

    Raise ``RuntimeError`` if the call leaves another stream current.
    """
    start, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device=DEVICE)
    small = flush[:256]
    stream = torch.cuda.current_stream()
    torch.cuda.synchronize()
    began = perf_counter_ns()
    for value in range(SWEEPS):  # takes long enough for the host to be ahead of the device
        flush.fill_(value)
    start.record(stream)
    returned = target(*args)
    result = flatten_results(returned)
    with uncollected():  # finalizers in reference cycles could do the work that the call left out
        end.record(stream)
        # Later kernels of the caller would run on that stream.
        if torch.cuda.current_stream() != stream:
            raise RuntimeError("it leaves another stream current")
        outs = [o for o in result if _on_device(o)]
        looked = [*outs, *(a for a in flatten_results(args) if _on_device(a))]
        # The next kernels on this stream, before work on other streams can end.
        probes = [_probe_elements(t) for t in looked]
        copies = [o.clone() for o in outs]
        # These keep the device busy, so that the call does not end on an idle device.
        for value in range(KERNELS_BEHIND):
            small.fill_(value)
        last.record(stream)
        end.synchronize()
        joined = perf_counter_ns()
        last.synchronize()
        done = perf_counter_ns()
        torch.cuda.synchronize()
        late = perf_counter_ns() - done
        pairs = zip(looked, probes, strict=True)
        raced = any(_bits_differ(_every_nth_element(t, at, step), probe) for t, (at, step, probe) in pairs)
        raced = raced or any(_bits_differ(o, copy) for o, copy in zip(outs, copies, strict=True))
    rest = iter(copies)
    seen = [next(rest) if _on_device(o) else o for o in result]
    clock = {"spent": joined - began, "device": round(start.elapsed_time(end) * 1e6), "late": late}
    return QueuedCall(result, structure_of(returned), seen, clock, raced)


def _on_device(value: Any) -> bool:
    """Return whether ``value`` is a strided tensor on the GPU and no instance of a subclass of ``Tensor``."""
    return type(value) is Tensor and value.device.type == DEVICE and value.layout is torch.strided


def _probe_elements(result: Tensor) -> tuple[int, int, Tensor]:
    """Return (first index, step, values) of evenly spaced elements of the flattened ``result``. The values are a copy.

    The first index is random, so that the code under test cannot foresee which elements are read.
    """
    step = max(1, result.numel() // PROBED_ELEMENTS)
    at = randrange(step)
    return at, step, _every_nth_element(result, at, step).clone()


def _every_nth_element(result: Tensor, at: int, step: int) -> Tensor:
    """Return every ``step``-th element of the flattened result from index ``at`` on. It is a view if the result can be
    flattened without a copy.
    """
    return result.detach().reshape(-1)[at::step]


def _bits_differ(a: Tensor, b: Tensor) -> bool:
    """Return whether the bytes of ``a`` and ``b`` differ."""
    a, b = (t.resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (a, b))
    return not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
