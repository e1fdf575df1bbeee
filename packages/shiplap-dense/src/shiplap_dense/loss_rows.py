"""The pass of the linear cross entropy over logits, in Triton: one program reads a row twice and writes it once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.plugin_api import LateErrors

__all__ = ["ERRORS", "pass_over_rows", "scale_unless_one"]

ERRORS = LateErrors()
ROW_BITS = tl.constexpr(40)  # of the word of late errors
WIDEST_BLOCK = 8192  # columns that a program holds in registers


@triton.jit
def _load_logits(row, column, there, softcap, CAPPED: tl.constexpr):
    """Return the logits of a row at ``column`` in float32, with the cap applied, and -inf where ``there`` is false."""
    x = tl.load(row + column, mask=there, other=float("-inf")).to(tl.float32)
    if CAPPED:
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)  # softcap * tanh(x / softcap)
        x = tl.where(there, x, float("-inf"))
    return x


@triton.jit
def _largest_finite(x):
    """Return ``x`` with 0 in place of minus infinity. The result can be subtracted from logits without NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit(do_not_specialize=["ignore_index", "code"])
def _rows_kernel(
    logits,
    target,
    losses,
    scales,
    status,
    columns,
    row_stride,
    scale_stride,
    ignore_index,
    smoothing,
    square,
    softcap,
    code,
    CAPPED: tl.constexpr,
    SMOOTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the cross entropy of one row of ``logits`` to ``losses``, or 0 if the target is ``ignore_index``. If
    ``GRADIENT`` is true, overwrite the row's logits with their gradient times the row's scale. If the target is not a
    class, write ``code`` and the number of the row to ``status``.
    """
    at = tl.program_id(0).to(tl.int64)
    row, inside = logits + at * row_stride, tl.arange(0, BLOCK)
    wanted = tl.load(target + at)
    if wanted == ignore_index:
        tl.store(losses + at, 0.0)
        if GRADIENT:
            for start in range(0, columns, BLOCK):
                zeros = tl.zeros([BLOCK], tl.float32).to(logits.dtype.element_ty)
                tl.store(row + start + inside, zeros, mask=start + inside < columns)
    else:
        valid = (wanted >= 0) & (wanted < columns)
        # Read before the row is overwritten. The sums below are barriers between this read and the first write.
        picked = tl.load(row + wanted, mask=valid, other=float("nan")).to(tl.float32)
        if CAPPED:
            # By the sigmoid, since ``tl`` has no tanh.
            picked = softcap * (2 * tl.sigmoid(2 * picked / softcap) - 1)
        word = status.to(tl.int64).to(tl.pointer_type(tl.int64))
        tl.store(word, (code.to(tl.int64) << ROW_BITS) | at, mask=valid == 0)
        most, total, plain = float("-inf"), 0.0, 0.0
        for start in range(0, columns, BLOCK):
            there = start + inside < columns
            x = _load_logits(row, start + inside, there, softcap, CAPPED)
            higher = tl.maximum(most, tl.max(x, 0))
            shift = _largest_finite(higher)
            total = total * tl.exp(most - shift) + tl.sum(tl.exp(x - shift), 0)
            most = higher
            if SMOOTH:
                plain += tl.sum(tl.where(there, x, 0.0), 0)
        lse = _largest_finite(most) + tl.log(total)
        loss = lse - (1 - smoothing) * picked + square * lse * lse
        if SMOOTH:
            loss -= smoothing * plain / columns
        tl.store(losses + at, loss)
        if GRADIENT:
            scale = tl.load(scales + at * scale_stride)
            of_sum, share = 1 + 2 * square * lse, smoothing / columns
            for start in range(0, columns, BLOCK):
                column = start + inside
                there = column < columns
                x = _load_logits(row, column, there, softcap, CAPPED)
                found = tl.exp(x - lse) * of_sum - share - tl.where(column == wanted, 1 - smoothing, 0.0)
                if CAPPED:
                    found *= 1 - (x / softcap) * (x / softcap)
                tl.store(row + column, (found * scale).to(logits.dtype.element_ty), mask=there)


def pass_over_rows(
    logits: Tensor,
    target: Tensor,
    losses: Tensor,
    scales: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float,
) -> None:
    """Launch the kernel that writes the cross entropy of each row of ``logits`` to ``losses``. If ``scales`` is given,
    the kernel overwrites the logits with their gradients times the row's scale. The other arguments are those of
    ``linear_cross_entropy``.
    """
    code = ERRORS.code("dense::linear_cross_entropy", "the target of row {row} of a chunk is no class")
    block = min(WIDEST_BLOCK, triton.next_power_of_2(logits.shape[1]))
    with torch.cuda.device_of(logits):
        _rows_kernel[(logits.shape[0],)](
            logits,
            target,
            losses,
            # Without scales any tensor serves as an address that is not read.
            losses if scales is None else scales,
            ERRORS.word(logits.device),
            logits.shape[1],
            logits.stride(0),
            0 if scales is None else scales.stride(0),
            ignore_index,
            float(label_smoothing),
            float(lse_square_scale),
            float(softcap),
            code,
            CAPPED=softcap != 0,
            SMOOTH=label_smoothing != 0,
            GRADIENT=scales is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )


@triton.jit
def _scale_kernel(values, factor, count, BLOCK: tl.constexpr):
    """Multiply ``values`` in place by ``factor``, one number on the device. If it is 1, write nothing."""
    by = tl.load(factor).to(tl.float32)
    if by != 1:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = at < count
        x = tl.load(values + at, mask=there).to(tl.float32)
        tl.store(values + at, (x * by).to(values.dtype.element_ty), mask=there)


def scale_unless_one(values: Tensor, factor: Tensor) -> None:
    """Multiply the contiguous ``values`` in place by ``factor``, one number on the same device. The host does not wait
    for the number.
    """
    if values.numel():
        with torch.cuda.device_of(values):
            _scale_kernel[(triton.cdiv(values.numel(), 8192),)](values, factor, values.numel(), BLOCK=8192, num_warps=8)
