"""Triton kernels for activations: scale, quantised values and lifting in one kernel, or the lifting alone.

One program owns one row. A row that fits is read once and stays in registers: each element is quantised once, two
neighbours become one word of 16 bits, and a window is two of these words, gathered through shared memory. A longer row
is read twice: once for its largest magnitude, and again as many whole groups at a time as fit. Row offsets have 64
bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.plugin_api import triton_launcher
from shiplap_slidesparse.formats import DEPTH, dense_depth
from shiplap_slidesparse.quantise import LIMITS, MIN_SCALE

__all__ = ["launch_lift", "launch_quantise"]

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32; NaN is not below it
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves a float32 no room for a fraction, ties to even
LEAST = tl.constexpr(MIN_SCALE)


@triton.jit
def _load_elements(x, at, there, k, stride):
    """Return the elements with the indices ``at`` of a row of ``k`` elements. ``x`` points to the first element, and
    neighbours lie ``stride`` elements apart. An element is 0 if its index is at least ``k`` or ``there`` is false.
    """
    return tl.load(x + at * stride, mask=there & (at < k), other=0)


@triton.jit
def _window_pair(o, PAIRS: tl.constexpr):
    """Return the number of the pair of neighbouring elements at which window ``o`` of a row begins. A window is four
    elements, this pair and the next one. A group of ``PAIRS`` pairs has ``PAIRS - 1`` overlapping windows. Windows
    behind the last group begin behind the row.
    """
    return o + o // (PAIRS - 1)


@triton.jit
def _larger_or_nan(a, b):
    """Return the larger of two values, or NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _float_magnitude(value):
    """Return the magnitude of ``value`` in float32."""
    return tl.abs(value.to(tl.float32))


@triton.jit
def _quantised_words(value, inverse, INTEGER: tl.constexpr):
    """Return ``value`` times ``inverse``, rounded to int8 if ``INTEGER`` is true and to float8_e4m3fn otherwise. Each
    result is one byte, in the low half of a uint16. For a row that is not finite the bytes are arbitrary.

    Nothing is clamped, since three roundings take the largest magnitude less than half a step beyond the limit. Adding
    ``TO_INTEGER`` leaves no bits for a fraction. The low byte of the sum is then the integer in two's complement.
    """
    scaled = value.to(tl.float32) * inverse
    if INTEGER:
        return ((scaled + TO_INTEGER).to(tl.uint32, bitcast=True) & 255).to(tl.uint16)
    else:
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint16)


@triton.jit
def _store_windows(
    q,
    value,
    inverse,
    k,
    first,
    end,
    PAIRS: tl.constexpr,
    INTEGER: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise the values of a row and store its overlapping windows of four bytes side by side at ``q``. Only the
    windows from number ``first`` to ``end - 1`` are stored. Values from index ``k`` on count as zeros. ``inverse`` is
    the reciprocal of the row's scale.
    """
    # Pairs of neighbours become words, so that a window is two gathers and not four.
    even, odd = tl.split(tl.reshape(_quantised_words(value, inverse, INTEGER), [SPAN // 2, 2]))
    # Little endian: the first element of a pair is the low byte.
    words = even | (odd << 8)
    o = tl.arange(0, BLOCK)
    pair = _window_pair(o, PAIRS)
    if PAIRS == 2:  # what is written is what is read, in its order
        low, high = tl.split(tl.reshape(words, [BLOCK, 2]))
    else:
        low = tl.gather(words, tl.minimum(pair, SPAN // 2 - 1), 0)
        high = tl.gather(words, tl.minimum(pair + 1, SPAN // 2 - 1), 0)
    low = tl.where(pair * 2 < k, low, 0).to(tl.uint32)
    high = tl.where(pair * 2 + 2 < k, high, 0).to(tl.uint32)
    tl.store(q + (first + o), low | (high << 16), mask=first + o < end)


@triton.jit(do_not_specialize=["m"])
def quantise_kernel(
    x,
    q,
    scales,
    m,
    k,
    windows,
    row_stride,
    stride,
    PAIRS: tl.constexpr,
    LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
    LOOP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise one row of ``x``. Write its scale to ``scales``, and its overlapping windows of four quantised values
    side by side to ``q``. Rows from ``m`` on are padding, with zeros and the scale 1. A row that is not finite has
    zeros and the scale NaN. ``LOOP`` is true for rows that are longer than the ``SPAN`` elements of one pass.
    """
    row = tl.program_id(0).to(tl.int64)
    there = row < m
    x += row * row_stride
    q = q.to(tl.pointer_type(tl.uint32)) + row * windows
    at = tl.arange(0, SPAN)
    value = _load_elements(x, at, there, k, stride)
    most = _float_magnitude(value)
    if LOOP:
        for start in range(SPAN, k, SPAN):
            most = _larger_or_nan(most, _float_magnitude(_load_elements(x, start + at, there, k, stride)))
    largest = tl.reduce(most, 0, _larger_or_nan)
    finite = largest <= LARGEST
    # Division that rounds to nearest: every kernel must give the bits of the reference.
    scale = tl.maximum(tl.div_rn(largest, LIMIT), LEAST)
    inverse = tl.div_rn(1.0, scale)
    # Rows that pad the tile have the scale 1, so that no product of them is NaN.
    tl.store(scales + row, tl.where(there, tl.where(finite, scale, float("nan")), 1.0))
    k = tl.where(finite, k, 0)  # of a row that is not, nothing is written but zeros
    if LOOP:
        # Windows cross pairs but not groups, so a pass has whole groups.
        GROUPS: tl.constexpr = SPAN // (2 * PAIRS)
        for group in range(0, (windows + PAIRS - 2) // (PAIRS - 1), GROUPS):
            value = _load_elements(x, group * (2 * PAIRS) + at, there, k, stride)
            first = group * (PAIRS - 1)
            end = tl.minimum(first + GROUPS * (PAIRS - 1), windows)
            _store_windows(q, value, inverse, k - group * (2 * PAIRS), first, end, PAIRS, INTEGER, SPAN, BLOCK)
    else:
        _store_windows(q, value, inverse, k, 0, windows, PAIRS, INTEGER, SPAN, BLOCK)


@triton.jit(do_not_specialize=["m"])
def lift_kernel(x, out, m, k, windows, row_stride, stride, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``BLOCK`` of the overlapping windows of one row of ``x`` side by side to ``out``, four values each. Values
    from index ``k`` on and rows from ``m`` on are zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, 4)[None, :]
    value = _load_elements(x + row * row_stride, _window_pair(o, PAIRS)[:, None] * 2 + lane, row < m, k, stride)
    tl.store(out + row * windows * 4 + (o[:, None] * 4 + lane), value, mask=(o < windows)[:, None])


_quantise, _lift = triton_launcher(quantise_kernel), triton_launcher(lift_kernel)

WHOLE = 16384  # elements of a row that are read at once, of one that has no more; of others half as many


def _with_32bit_strides(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy if offsets within a row need more than 31 bits. Views with a large stride need
    such offsets.
    """
    return x if (x.shape[1] + WHOLE) * x.stride(1) < 2**31 else x.contiguous()


def _next_power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least ``size``."""
    return 1 << (size - 1).bit_length()


def launch_quantise(x: Tensor, pairs: int, *, q: Tensor, scale: Tensor, num_warps: int) -> None:
    """Launch the kernel that writes the quantised and lifted rows of ``x`` to ``q`` and their scales to ``scale``.
    Lifting writes overlapping windows of four elements side by side. The dtype of ``q`` is int8 or float8_e4m3fn.
    ``pairs`` is the number of pairs in a group of the weight's pattern (4 for 6:8).
    """
    (m, k), (rows, depth) = x.shape, q.shape
    if rows == 0:
        return
    x = _with_32bit_strides(x)
    # A longer row does not fit the registers of a program.
    loop = k > WHOLE
    span = WHOLE // 2 if loop else _next_power_of_two(max(dense_depth(k), DEPTH))
    block = _next_power_of_two(span // (2 * pairs) * (pairs - 1) if loop else max(depth, DEPTH) // 4)
    _quantise[(rows,)](
        x,
        q,
        scale,
        m,
        k,
        depth // 4,
        *x.stride(),
        PAIRS=pairs,
        LIMIT=LIMITS[q.dtype],
        INTEGER=q.dtype == torch.int8,
        LOOP=loop,
        SPAN=span,
        BLOCK=block,
        num_warps=num_warps,
        enable_fp_fusion=False,  # the reference rounds a product before TO_INTEGER is added to it
    )


def launch_lift(x: Tensor, pairs: int, *, out: Tensor, BLOCK: int, num_warps: int) -> None:
    """Launch the kernel that writes the lifted rows of ``x`` to ``out``, for ``ops.lift``. Lifting writes overlapping
    windows of four elements side by side. ``pairs`` is the number of pairs in a group of the weight's pattern (4 for
    6:8).
    """
    (m, k), (rows, depth) = x.shape, out.shape
    if out.numel():
        x = _with_32bit_strides(x)
        grid = rows, -(-(depth // 4) // BLOCK)
        _lift[grid](x, out, m, k, depth // 4, *x.stride(), PAIRS=pairs, BLOCK=BLOCK, num_warps=num_warps)
