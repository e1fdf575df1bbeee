"""Activations in Triton: a row's scale, its quantised values and their lifting, in one kernel; or the lifting alone.

One program owns one row. With 2 pairs nothing is duplicated, and a row that fits is read once and kept. Else it is read
for its largest magnitude, and again, out of a cache, window by window of what is written: the four lanes of a window
are neighbours in memory, so nothing is gathered. Row offsets have 64 bits.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.impl import triton_launcher
from shiplap.kernels.slidesparse.formats import DEPTH, dense_depth
from shiplap.kernels.slidesparse.quantise import LIMITS, MIN_SCALE

__all__ = ["lift", "quantise"]

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32; NaN is not below it
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves a float32 no room for a fraction, ties to even
LEAST = tl.constexpr(MIN_SCALE)


@triton.jit
def _window(o, PAIRS: tl.constexpr):
    """Where window ``o`` of a row begins. Windows behind the last group begin behind the row."""
    group = o // (PAIRS - 1)
    return group * (2 * PAIRS) + (o - group * (PAIRS - 1)) * 2


@triton.jit
def _lanes(x, o, there, k, stride, PAIRS: tl.constexpr):
    """The elements of windows ``o``, zero where there are none."""
    return _elements(x, _window(o, PAIRS)[:, None] + tl.arange(0, 4)[None, :], there, k, stride)


@triton.jit
def _largest(x, there, k, stride, LOOP: tl.constexpr, SPAN: tl.constexpr):
    """The largest magnitude of a row; infinity where one is no number."""
    most = tl.zeros([SPAN], tl.float32)
    if LOOP:
        for start in range(0, k, SPAN):
            most = tl.maximum(most, _magnitude(_elements(x, start + tl.arange(0, SPAN), there, k, stride)))
    else:
        most = _magnitude(_elements(x, tl.arange(0, SPAN), there, k, stride))
    return tl.max(most, 0)


@triton.jit
def _elements(x, at, there, k, stride):
    return tl.load(x + at * stride, mask=there & (at < k), other=0)


@triton.jit
def _magnitude(value):
    value = tl.abs(value.to(tl.float32))
    return tl.where(value <= LARGEST, value, float("inf"))


@triton.jit
def _scaled(value, inverse, finite, LIMIT: tl.constexpr, INTEGER: tl.constexpr):
    """Values in the range of the format, whole ones for integers: only the cast to it is left."""
    scaled = tl.where(finite, value.to(tl.float32) * inverse, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    return (scaled + TO_INTEGER) - TO_INTEGER if INTEGER else scaled


@triton.jit(do_not_specialize=["m"])
def quantise_kernel(
    x, q, scales, m, k, windows, row_stride, stride,
    PAIRS: tl.constexpr, LIMIT: tl.constexpr, INTEGER: tl.constexpr, LOOP: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    there = row < m
    x += row * row_stride
    q += row * windows * 4
    at = tl.arange(0, SPAN)
    ONCE: tl.constexpr = PAIRS == 2 and not LOOP
    if ONCE:
        kept = _elements(x, at, there, k, stride)
        largest = tl.max(_magnitude(kept), 0)
    else:
        largest = _largest(x, there, k, stride, LOOP, SPAN)
    finite = largest <= LARGEST
    scale = tl.maximum(tl.div_rn(largest, LIMIT), LEAST)
    inverse = tl.div_rn(1.0, scale)
    told = tl.where(finite, scale, float("nan"))
    tl.store(scales + row, tl.where(there, told, 1.0))
    if ONCE:
        value = _scaled(kept, inverse, finite, LIMIT, INTEGER)
        tl.store(q + at, value.to(q.dtype.element_ty), mask=at < windows * 4)
    else:
        for start in range(0, windows, BLOCK):
            o = start + tl.arange(0, BLOCK)
            value = _scaled(_lanes(x, o, there, k, stride, PAIRS), inverse, finite, LIMIT, INTEGER)
            tl.store(q + o[:, None] * 4 + tl.arange(0, 4)[None, :], value.to(q.dtype.element_ty),
                     mask=(o < windows)[:, None])  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def lift_kernel(x, out, m, k, windows, row_stride, stride, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = _lanes(x + row * row_stride, o, row < m, k, stride, PAIRS)
    at = row * windows * 4 + (o[:, None] * 4 + tl.arange(0, 4)[None, :])
    tl.store(out + at, value, mask=(o < windows)[:, None])


_quantise, _lift = triton_launcher(quantise_kernel), triton_launcher(lift_kernel)

WHOLE = 16384  # elements of a row that are read at once


def _near(x: Tensor) -> Tensor:
    """``x``, or a copy where offsets within a row pass 31 bits: those of rows may, a view's columns lie anywhere."""
    return x if (x.shape[1] + WHOLE) * x.stride(1) < 2**31 else x.contiguous()


def quantise(x: Tensor, pairs: int, *, q: Tensor, scale: Tensor, BLOCK: int, num_warps: int) -> None:
    """See ``ops.quantise_int8`` and ``ops.quantise_fp8``. A program writes ``BLOCK`` windows at a time, or a row."""
    (m, k), (rows, depth) = x.shape, q.shape
    if rows == 0:
        return
    x = _near(x)
    span = min(WHOLE, 1 << max(dense_depth(k) - 1, DEPTH - 1).bit_length())  # no less than a row of what is written
    _quantise[(rows,)](
        x, q, scale, m, k, depth // 4, *x.stride(), PAIRS=pairs, LIMIT=LIMITS[q.dtype], INTEGER=q.dtype == torch.int8,
        LOOP=k > span, SPAN=span, BLOCK=BLOCK, num_warps=num_warps,
    )  # fmt: skip


def lift(x: Tensor, pairs: int, *, out: Tensor, BLOCK: int, num_warps: int) -> None:
    """See ``ops.lift``."""
    (m, k), (rows, depth) = x.shape, out.shape
    if out.numel():
        x = _near(x)
        grid = rows, -(-(depth // 4) // BLOCK)
        _lift[grid](x, out, m, k, depth // 4, *x.stride(), PAIRS=pairs, BLOCK=BLOCK, num_warps=num_warps)
