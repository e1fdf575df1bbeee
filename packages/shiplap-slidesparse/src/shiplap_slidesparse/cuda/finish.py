"""The pass after a product: scales of rows and columns, bias, conversion to the caller's dtype, removal of padding."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shiplap.plugin_api import triton_launcher

__all__ = ["finish_product"]

COLUMNS, ELEMENTS = 256, 4096  # of a program


@triton.jit(do_not_specialize=["m"])
def finish_kernel(
    total,
    rows,
    columns,
    bias,
    out,
    m,
    n,
    width,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write one tile of ``out [m, n]``. It is the tile of the product ``total`` in float32, times ``rows`` and
    ``columns``, plus ``bias``. If ``BY_ROW``, ``BY_COLUMN`` or ``BIASED`` is false, the respective term is left out.
    ``width`` is the number of columns of ``total``.
    """
    # Offsets in a large result need more than 32 bits.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    below, within = row < m, column < n
    mask = below[:, None] & within[None, :]
    # int32 sums of 8-bit products are exact up to here; from here on float32 as in the reference.
    value = tl.load(total + row[:, None] * width + column[None, :], mask=mask, other=0).to(tl.float32)
    if BY_ROW:
        value *= tl.load(rows + row, mask=below, other=0)[:, None]
    if BY_COLUMN:
        value *= tl.load(columns + column, mask=within, other=0)[None, :]
    if BIASED:
        value += tl.load(bias + column, mask=within, other=0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * n + column[None, :], value.to(out.dtype.element_ty), mask=mask)


_finish = triton_launcher(finish_kernel)


def finish_product(
    total: Tensor, rows: Tensor | None, columns: Tensor | None, bias: Tensor | None, out: Tensor
) -> None:
    """Write ``total[:m, :n] * rows[:, None] * columns + bias``, computed in float32, to ``out [m, n]``. A term given as
    None is left out. ``total`` and ``out`` must be contiguous.
    """
    m, n = out.shape
    if not out.numel():
        return
    columns = columns if columns is None else columns.contiguous()
    bias = bias if bias is None else bias.contiguous()
    # In plain integers: Triton's own helpers take constants too, and a microsecond each for finding out.
    cols = min(COLUMNS, 1 << (n - 1).bit_length())
    tall = min(ELEMENTS // cols, 1 << (m - 1).bit_length())
    _finish[(-(-m // tall), -(-n // cols))](
        total,
        # A pointer has to be passed in any case. The kernel does not read this one.
        total if rows is None else rows,
        total if columns is None else columns,
        total if bias is None else bias,
        out,
        m,
        n,
        total.shape[1],
        BY_ROW=rows is not None,
        BY_COLUMN=columns is not None,
        BIASED=bias is not None,
        ROWS=tall,
        COLS=cols,
        num_warps=4,
        enable_fp_fusion=False,  # the reference rounds after each step
    )
