"""Pooling over a table, as launch programs: one block owns some output rows and walks their taps. No atomics: results
are the same in each run. ``scenes.py`` pools over scenes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from shiplap.extend import TritonLaunches, launch_program
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.hash import report

__all__ = [
    "CHANNELS",
    "MAX_POOL",
    "MAX_POOL_GRAD",
    "SUM_POOL",
    "TILE",
    "accumulator",
    "beats",
    "max_pool",
    "max_pool_grad",
    "sum_pool",
]

ENTRY = "table row {row} has an entry outside its range"
TILE = 2048  # values of a block of threads: 16 a thread
CHANNELS = "min(128, pow2ceil(max(c, 1)))"  # of such a block


@triton.jit
def _block(m, c, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Rows, which of them there are, channels and which of them there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return row, row < m, channel[None, :].to(tl.int64), (channel < c)[None, :]


@triton.jit
def _entry(table, row, there, v, k, n, status, code):
    """The entries of one tap and which of them are hits; others than -1 outside ``[0, n)`` are none, and told."""
    entry = tl.load(table + row * k + v, mask=there, other=-1)
    hit = (entry >= 0) & (entry < n)
    report(status, code, row, (entry != -1) & ~hit)
    return entry.to(tl.int64)[:, None], hit[:, None]


@triton.jit
def accumulator(like, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Zeros, in at least float32, for values of the type that the pointer ``like`` has."""
    return tl.zeros([ROWS, CHANNELS], tl.float64 if like.dtype.element_ty == tl.float64 else tl.float32)


@triton.jit
def beats(x, best):
    """Whether ``x`` is larger; NaN is larger than any number."""
    return (x > best) | ((x != x) & (best == best))


@triton.jit(do_not_specialize=["n", "m", "k", "code"])
def max_kernel(
    feats,
    table,
    out,
    taps,
    status: tl.int64,
    n,
    m,
    c,
    k,
    code,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row, there, channel, within = _block(m, c, ROWS, CHANNELS)
    best = accumulator(feats, ROWS, CHANNELS)
    tap = tl.full([ROWS, CHANNELS], -1, tl.int32)
    for v in range(k):
        entry, hit = _entry(table, row, there, v, k, n, status, code)
        x = tl.load(feats + entry * c + channel, mask=hit & within, other=0).to(best.dtype)
        better = hit & ((tap < 0) | beats(x, best))
        best, tap = tl.where(better, x, best), tl.where(better, v, tap)
    at = row[:, None] * c + channel
    tl.store(out + at, best.to(out.dtype.element_ty), mask=there[:, None] & within)
    tl.store(taps + at, tap.to(tl.int16), mask=there[:, None] & within)


@triton.jit(do_not_specialize=["n", "m", "k", "code"])
def max_grad_kernel(
    grad,
    taps,
    table,
    out,
    status: tl.int64,
    n,
    m,
    c,
    k,
    code,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row, there, channel, within = _block(m, c, ROWS, CHANNELS)
    total = accumulator(grad, ROWS, CHANNELS)
    for v in range(k):
        entry, hit = _entry(table, row, there, v, k, n, status, code)
        chosen = tl.load(taps + entry * c + channel, mask=hit & within, other=-1) == v
        total += tl.load(grad + entry * c + channel, mask=chosen, other=0).to(total.dtype)
    tl.store(out + row[:, None] * c + channel, total.to(out.dtype.element_ty), mask=there[:, None] & within)


@triton.jit(do_not_specialize=["n", "m", "k", "code"])
def sum_kernel(
    feats,
    table,
    out,
    status: tl.int64,
    n,
    m,
    c,
    k,
    code,
    AVERAGE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row, there, channel, within = _block(m, c, ROWS, CHANNELS)
    total = accumulator(feats, ROWS, CHANNELS)
    hits = tl.zeros([ROWS, 1], tl.int32)
    for v in range(k):
        entry, hit = _entry(table, row, there, v, k, n, status, code)
        total += tl.load(feats + entry * c + channel, mask=hit & within, other=0).to(total.dtype)
        hits += hit.to(tl.int32)
    if AVERAGE:
        total = total / tl.maximum(hits, 1).to(total.dtype)
    tl.store(out + row[:, None] * c + channel, total.to(out.dtype.element_ty), mask=there[:, None] & within)


def _program(kernel: Any, rows: str, arguments: Mapping[str, str], tile: int) -> TritonLaunches:
    """One launch over ``rows`` output rows and the channels. ``arguments``: those that are called otherwise."""
    return launch_program(
        values={"channels": CHANNELS, "block": f"max(1, {tile} // channels)"}, errors=status.ERRORS
    ).then(
        kernel,
        grid=(f"cdiv({rows}, block)", "cdiv(c, channels)"),
        arguments={**arguments, "ROWS": "block", "CHANNELS": "channels"},
        constants={"num_warps": 4},
        word="status",
        codes={"code": ENTRY},
    )


def max_pool(tile: int = TILE) -> TritonLaunches:
    """The program of ``pooling.max_pool_with_taps``."""
    return _program(max_kernel, "m", {}, tile)


def max_pool_grad(tile: int = TILE) -> TritonLaunches:
    """The program of ``pooling.max_pool_grad``. Rows of the kernel's output are those of the transposed table."""
    return _program(max_grad_kernel, "n", {"table": "table_t", "n": "m", "m": "n"}, tile)


def sum_pool(tile: int = TILE) -> TritonLaunches:
    """The program of ``pooling.sum_pool``."""
    return _program(sum_kernel, "m", {"AVERAGE": "average"}, tile)


MAX_POOL, MAX_POOL_GRAD, SUM_POOL = max_pool(), max_pool_grad(), sum_pool()
