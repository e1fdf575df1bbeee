"""Pooling over a table, in Triton.

One program owns some output rows and walks their taps without atomics, so results are the same in each run.
``scenes.py`` pools over scenes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.plugin_api import triton_launcher
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.hash import report_row

__all__ = ["blocks_of", "is_larger", "is_wide", "make_accumulator", "max_pool_grad", "max_pool_with_taps", "sum_pool"]

ENTRY = "table row {row} has an entry outside its range"
TILE = 2048  # values of a program: 16 a thread


def blocks_of(c: int) -> dict[str, int]:
    """Return the constants of a pooling kernel for ``c`` channels. They are the numbers of rows and channels of a
    program, and of warps.
    """
    # Adjacent channels are adjacent in memory, so wide rows of channels make full loads.
    channels = min(128, triton.next_power_of_2(max(c, 1)))
    return {"ROWS": TILE // channels, "CHANNELS": channels, "num_warps": 4}


def is_wide(t: Tensor) -> dict[str, bool]:
    """Return a dict with the keyword argument ``WIDE`` of a kernel. It is True if ``t`` is float64, since sums are then
    kept in float64.
    """
    return {"WIDE": t.dtype == torch.float64}


@triton.jit
def _program_block(m, c, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the numbers of the rows that this program computes, with a mask of those below ``m``. Return the numbers
    of its channels, with a mask of those below ``c``.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return row, row < m, channel[None, :].to(tl.int64), (channel < c)[None, :]


@triton.jit
def _load_entries(table, row, there, v, row_stride, tap_stride, n, status, code):
    """Return the numbers in column ``v`` of the neighbour table for these rows, as a column, and a mask of those that
    are input rows. Numbers other than -1 outside ``[0, n)`` are reported in a status word, from which the host raises
    ``SL211`` later.
    """
    # 64 bits, since the columns of a sorted table are adjacent and lie as far apart as it has rows.
    entry = tl.load(table + row * row_stride + tl.cast(v, tl.int64) * tap_stride, mask=there, other=-1)
    hit = (entry >= 0) & (entry < n)
    report_row(status, code, row, (entry != -1) & ~hit)
    return entry.to(tl.int64)[:, None], hit[:, None]


@triton.jit
def make_accumulator(ROWS: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr):
    """Return zeros ``[ROWS, CHANNELS]``, in float64 if ``WIDE`` is true and otherwise in float32."""
    return tl.zeros([ROWS, CHANNELS], tl.float64 if WIDE else tl.float32)


@triton.jit
def is_larger(x, best):
    """Return whether ``x`` is larger than ``best``, where NaN counts as larger than any number."""
    # ``x != x`` is true for NaN only.
    return (x > best) | ((x != x) & (best == best))


@triton.jit(do_not_specialize=["n", "m", "k", "code"])
def max_kernel(
    feats,
    table,
    out,
    taps,
    status,
    n,
    m,
    c,
    k,
    feats_row,
    feats_col,
    table_row,
    table_tap,
    code,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the largest value of the rows that each output reads to ``out [m, c]``, channel by channel, or 0 if it
    reads none. Write the column of the neighbour ``table`` that the value comes from to ``taps [m, c]``, or -1.
    """
    row, there, channel, within = _program_block(m, c, ROWS, CHANNELS)
    best = make_accumulator(ROWS, CHANNELS, WIDE)
    tap = tl.full([ROWS, CHANNELS], -1, tl.int32)
    for v in range(k):
        entry, hit = _load_entries(table, row, there, v, table_row, table_tap, n, status, code)
        x = tl.load(feats + entry * feats_row + channel * feats_col, mask=hit & within, other=0).to(best.dtype)
        # The first hit always counts, so that values below zero survive.
        better = hit & ((tap < 0) | is_larger(x, best))
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
    status,
    n,
    m,
    c,
    k,
    grad_row,
    grad_col,
    taps_row,
    taps_col,
    table_row,
    table_tap,
    code,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the gradient of a max pooling to ``out [m, c]``. For each input it is the sum of the gradients of those
    outputs whose maximum it is. They are found by the transposed ``table`` and the ``taps`` of the maxima.
    """
    row, there, channel, within = _program_block(m, c, ROWS, CHANNELS)
    total = make_accumulator(ROWS, CHANNELS, WIDE)
    for v in range(k):
        entry, hit = _load_entries(table, row, there, v, table_row, table_tap, n, status, code)
        chosen = tl.load(taps + entry * taps_row + channel * taps_col, mask=hit & within, other=-1) == v
        total += tl.load(grad + entry * grad_row + channel * grad_col, mask=chosen, other=0).to(total.dtype)
    tl.store(out + row[:, None] * c + channel, total.to(out.dtype.element_ty), mask=there[:, None] & within)


@triton.jit(do_not_specialize=["n", "m", "k", "code"])
def sum_kernel(
    feats,
    table,
    out,
    status,
    n,
    m,
    c,
    k,
    feats_row,
    feats_col,
    table_row,
    table_tap,
    code,
    AVERAGE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the sum of the rows that each output reads by the neighbour ``table`` to ``out [m, c]``. If ``AVERAGE`` is
    true, write their mean instead. Without such a row the result is 0.
    """
    row, there, channel, within = _program_block(m, c, ROWS, CHANNELS)
    total = make_accumulator(ROWS, CHANNELS, WIDE)
    hits = tl.zeros([ROWS, 1], tl.int32)
    for v in range(k):
        entry, hit = _load_entries(table, row, there, v, table_row, table_tap, n, status, code)
        total += tl.load(feats + entry * feats_row + channel * feats_col, mask=hit & within, other=0).to(total.dtype)
        hits += hit.to(tl.int32)
    if AVERAGE:
        total = total / tl.maximum(hits, 1).to(total.dtype)
    tl.store(out + row[:, None] * c + channel, total.to(out.dtype.element_ty), mask=there[:, None] & within)


_max, _max_grad, _sum = (triton_launcher(kernel) for kernel in (max_kernel, max_grad_kernel, sum_kernel))


def _pool_grid(m: int, c: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the launch grid for ``m`` rows and ``c`` channels, and the kernel's constants as a dict."""
    blocks = blocks_of(c)
    return (triton.cdiv(m, blocks["ROWS"]), triton.cdiv(c, blocks["CHANNELS"])), blocks


def max_pool_with_taps(feats: Tensor, table: Tensor, table_t: Tensor | None, *, out: Tensor, taps: Tensor) -> None:
    """Write the maximum of the rows of ``feats`` that each output reads by the neighbour ``table`` to ``out``, channel
    by channel. Write the column of the table that each maximum comes from to ``taps``. This is
    ``pooling.max_pool_with_taps`` on CUDA. ``table_t`` is not used.
    """
    word, (m, k), (n, c) = status.word(feats.device), table.shape, feats.shape
    if out.numel():
        grid, blocks = _pool_grid(m, c)
        _max[grid](
            feats,
            table,
            out,
            taps,
            word,
            n,
            m,
            c,
            k,
            *feats.stride(),
            *table.stride(),
            status.code_of("max_pool_with_taps", ENTRY),
            **is_wide(feats),
            **blocks,
        )


def max_pool_grad(grad: Tensor, taps: Tensor, table_t: Tensor, *, out: Tensor) -> None:
    """Write the gradient of a max pooling with respect to its input to ``out``. ``taps`` holds the column of the
    neighbour table that each maximum came from, and ``table_t`` is the transposed table. This is
    ``pooling.max_pool_grad`` on CUDA.
    """
    word, (m, k), (n, c) = status.word(grad.device), table_t.shape, grad.shape
    if out.numel():
        grid, blocks = _pool_grid(m, c)
        _max_grad[grid](
            grad,
            taps,
            table_t,
            out,
            word,
            n,
            m,
            c,
            k,
            *grad.stride(),
            *taps.stride(),
            *table_t.stride(),
            status.code_of("max_pool_grad", ENTRY),
            **is_wide(grad),
            **blocks,
        )


def sum_pool(feats: Tensor, table: Tensor, table_t: Tensor | None, average: bool, *, out: Tensor) -> None:
    """Write the sum of the rows of ``feats`` that each output reads by the neighbour ``table`` to ``out``. If
    ``average`` is true, write their mean instead. This is ``pooling.sum_pool`` on CUDA. ``table_t`` is not used.
    """
    word, (m, k), (n, c) = status.word(feats.device), table.shape, feats.shape
    if out.numel():
        grid, blocks = _pool_grid(m, c)
        _sum[grid](
            feats,
            table,
            out,
            word,
            n,
            m,
            c,
            k,
            *feats.stride(),
            *table.stride(),
            status.code_of("sum_pool", ENTRY),
            AVERAGE=average,
            **is_wide(feats),
            **blocks,
        )
