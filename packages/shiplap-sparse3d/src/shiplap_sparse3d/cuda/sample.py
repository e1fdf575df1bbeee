"""``nearest_map``, ``trilinear_map`` and weighted sums in Triton.

The gradient sums entries by row after a stable sort, without atomics. The result is the same in every run, no output
has to be zeroed, and many queries in one voxel do not wait for one address.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.plugin_api import triton_launcher
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.hash import report_row
from shiplap_sparse3d.cuda.hashmap import index_voxels, slot_of

__all__ = ["find_queries", "weighted_sum", "weighted_sum_grad"]

ENTRY = "indices row {row} has an entry outside [-1, n)"
LOOKUPS = 256  # corners of queries that one program looks up
BLOCK = 256


@triton.jit
def _cell_of_query(value, size):
    """Return a whole number in floating point as an int32 coordinate, and whether it lies in ``[0, size)``. NaN and
    numbers beyond int32 do not lie there.
    """
    known = (value >= 0) & (value < 2147483648.0)
    cell = tl.where(known, value, 0.0).to(tl.int32)
    return cell, known & (cell < size)


@triton.jit(do_not_specialize=["count", "each", "width", "height", "depth", "capacity"])
def query_kernel(
    table,
    rows,
    queries,
    indices,
    weights,
    count,
    each,
    width,
    height,
    depth,
    capacity,
    CORNERS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the row of the voxel that contains each query to ``indices`` if ``CORNERS`` is 1. If it is 8, write the
    rows and weights of the eight voxels around each query. A missing voxel has the row -1 and the weight 0.
    """
    query = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    corner = tl.arange(0, CORNERS)[None, :]
    inside = query < count
    qx = tl.load(queries + query * 3, mask=inside, other=-1.0)[:, None]
    qy = tl.load(queries + query * 3 + 1, mask=inside, other=-1.0)[:, None]
    qz = tl.load(queries + query * 3 + 2, mask=inside, other=-1.0)[:, None]
    # The eight corners are centres of cells. The nearest voxel is the cell that contains the point.
    HALF: tl.constexpr = 0.5 if CORNERS == 8 else 0.0
    lx = tl.floor(qx - HALF) + (corner & 1).to(tl.float32)
    ly = tl.floor(qy - HALF) + ((corner >> 1) & 1).to(tl.float32)
    lz = tl.floor(qz - HALF) + ((corner >> 2) & 1).to(tl.float32)
    x, x_inside = _cell_of_query(lx, width)
    y, y_inside = _cell_of_query(ly, height)
    z, z_inside = _cell_of_query(lz, depth)
    there = x_inside & y_inside & z_inside & inside[:, None]
    # Queries are listed scene by scene, ``each`` of them per scene.
    key = (((query // each)[:, None] * width + x) * height + y) * depth + z
    slot = slot_of(table, tl.where(there, key, -1).to(tl.uint64), capacity)
    row = tl.load(rows + slot, mask=slot >= 0, other=-1)
    at = query[:, None] * CORNERS + corner
    tl.store(indices + at, row, mask=inside[:, None] & (corner >= 0))
    if CORNERS == 8:
        share = (1 - tl.abs(qx - lx - 0.5)) * (1 - tl.abs(qy - ly - 0.5)) * (1 - tl.abs(qz - lz - 0.5))
        share = tl.where(row >= 0, share, 0.0)
        # Without a voxel all shares are 0 and stay 0.
        total = tl.maximum(tl.sum(share, 1), 1e-12)[:, None]
        tl.store(weights + at, share / total, mask=inside[:, None] & (corner >= 0))


@triton.jit(do_not_specialize=["queries", "rows", "corners", "channels", "code"])
def sum_kernel(
    feats,
    indices,
    weights,
    out,
    status,
    queries,
    rows,
    corners,
    channels,
    code,
    DOUBLE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write the sum of ``weights[q, j] * feats[indices[q, j]]`` over ``j`` for each query ``q`` to ``out [queries,
    channels]``. An index of -1 adds nothing. Invalid indices are reported in a status word, from which the host raises
    ``SL211`` later.
    """
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    query = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = query < queries
    total = tl.zeros([ROWS, CHANNELS], dtype=WIDE)
    for corner in range(corners):
        entry = tl.load(indices + query * corners + corner, mask=inside, other=-1)
        share = tl.load(weights + query * corners + corner, mask=inside, other=0.0).to(WIDE)
        # The programs of other channels read the same entries and need not report them.
        report_row(status, code, query, ((entry < -1) | (entry >= rows)) & (tl.program_id(1) == 0))
        # Invalid entries are reported, and must not be read meanwhile.
        good = ((entry >= 0) & (entry < rows))[:, None] & (channel < channels)[None, :]
        row = tl.load(feats + entry.to(tl.int64)[:, None] * channels + channel[None, :], mask=good, other=0.0)
        total += tl.where(good, row.to(WIDE) * share[:, None], 0.0)
    place = out + query[:, None] * channels + channel[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside[:, None] & (channel < channels)[None, :])


@triton.jit(do_not_specialize=["rows", "corners", "channels"])
def grad_kernel(
    grad,
    weights,
    entries,
    starts,
    out,
    rows,
    corners,
    channels,
    DOUBLE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write the gradient of the features in each row ``r`` to ``out[r]``. It is the sum of ``weights[e] * grad[e //
    corners]`` over the numbers ``e`` in ``entries[starts[r] : starts[r + 1]]``, added in this order. They are the
    positions of ``r`` in the flat indices.
    """
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    at = tl.load(starts + row, mask=row < rows, other=0)
    end = tl.load(starts + row + 1, mask=row < rows, other=0)
    total = tl.zeros([ROWS, CHANNELS], dtype=WIDE)
    # Rows of a program have different numbers of entries: the loop ends with the longest one.
    while tl.max((at < end).to(tl.int32), 0) > 0:
        active = at < end
        entry = tl.load(entries + at, mask=active, other=0)
        share = tl.load(weights + entry, mask=active, other=0.0).to(WIDE)
        good = active[:, None] & (channel < channels)[None, :]
        value = tl.load(grad + (entry // corners)[:, None] * channels + channel[None, :], mask=good, other=0.0)
        total += tl.where(good, value.to(WIDE) * share[:, None], 0.0)
        at += 1
    place = out + row[:, None] * channels + channel[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (channel < channels)[None, :])


@triton.jit(do_not_specialize=["count", "rows", "corners", "code"])
def check_kernel(indices, keys, status, count, rows, corners, code, BLOCK: tl.constexpr):
    """Write the sort key of each number in ``indices``. It is the number, which is a row, or ``rows`` for -1. Invalid
    numbers are reported in a status word, from which the host raises ``SL211`` later.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(indices + at, mask=at < count, other=-1)
    report_row(status, code, at // corners, (entry < -1) | (entry >= rows))
    tl.store(keys + at, tl.where((entry >= 0) & (entry < rows), entry, rows).to(tl.int32), mask=at < count)


_query = triton_launcher(query_kernel)
_sum = triton_launcher(sum_kernel)
_grad = triton_launcher(grad_kernel)
_check = triton_launcher(check_kernel)


def find_queries(
    op: str, coords: Tensor, queries: Tensor, shape: Sequence[int], indices: Tensor, weights: Tensor | None
) -> None:
    """Write the row of the voxel that contains each query to ``indices``, for ``grid_sample.nearest_map`` on CUDA. If
    ``weights`` is given, write the rows and weights of the eight voxels around each query, for ``trilinear_map``.
    ``op`` is the op's name in error messages.
    """
    word, count = status.word(coords.device), queries.shape[0] * queries.shape[1]
    table, rows = index_voxels(op, coords, shape, word)
    if not count:
        return
    corners = 1 if weights is None else 8
    # A program makes the same number of lookups in both forms.
    each = LOOKUPS // corners
    _query[(-(-count // each),)](
        table,
        rows,
        queries.contiguous(),
        indices,
        # A pointer is needed in any case, and for one corner nothing is written to it.
        indices if weights is None else weights,
        count,
        queries.shape[1],
        *shape,
        table.shape[0],
        CORNERS=corners,
        ROWS=each,
    )


def _sum_tile(channels: int) -> tuple[int, int]:
    """Return the number of rows and the number of channels that a program sums. Together they are about 1,024 elements,
    with adjacent channels.
    """
    wide = min(128, max(16, triton.next_power_of_2(channels)))
    return 1024 // wide, wide


def weighted_sum(feats: Tensor, indices: Tensor, weights: Tensor, out: Tensor) -> None:
    """Write the sum of ``weights[q, j] * feats[indices[q, j]]`` over ``j`` for each query ``q`` to ``out``. An index of
    -1 adds nothing. This is ``grid_sample.indice_weighted_sum`` on CUDA.
    """
    word, (queries, corners), channels = status.word(feats.device), indices.shape, feats.shape[1]
    if not out.numel():
        return
    rows, wide = _sum_tile(channels)
    _sum[(-(-queries // rows), -(-channels // wide))](
        feats.contiguous(),
        indices.contiguous(),
        weights.contiguous(),
        out,
        word,
        queries,
        feats.shape[0],
        corners,
        channels,
        status.code_of("indice_weighted_sum", ENTRY),
        DOUBLE=feats.dtype == torch.float64,
        ROWS=rows,
        CHANNELS=wide,
    )


def weighted_sum_grad(grad: Tensor, indices: Tensor, weights: Tensor, rows: int, out: Tensor) -> None:
    """Write the gradient of the weighted sum with respect to its features, of ``rows`` rows, to ``out``. Terms are
    added in a fixed order. This is ``grid_sample.indice_weighted_sum_grad`` on CUDA.
    """
    word, count, corners = status.word(grad.device), indices.numel(), indices.shape[1]
    if not out.numel() or not count:
        out.zero_()
        return
    keys = torch.empty(count, dtype=torch.int32, device=grad.device)
    _check[(-(-count // BLOCK),)](
        indices.contiguous(),
        keys,
        word,
        count,
        rows,
        corners,
        status.code_of("indice_weighted_sum_grad", ENTRY),
        BLOCK=BLOCK,
    )
    # Stable, so that the entries of a row are added in one order.
    keys, entries = keys.sort(stable=True)
    # Sorted keys make the entries of a row adjacent. Entries without a row come last.
    starts = torch.searchsorted(keys, torch.arange(rows + 1, dtype=torch.int32, device=grad.device))
    channels = grad.shape[1]
    each, wide = _sum_tile(channels)
    _grad[(-(-rows // each), -(-channels // wide))](
        grad.contiguous(),
        weights.contiguous(),
        entries,
        starts,
        out,
        rows,
        corners,
        channels,
        DOUBLE=grad.dtype == torch.float64,
        ROWS=each,
        CHANNELS=wide,
    )
