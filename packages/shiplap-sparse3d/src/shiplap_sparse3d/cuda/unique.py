"""Points to voxels in Triton: distinct rows by a sort of their keys, and means of the rows that share one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.plugin_api import error, triton_launcher
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.hash import load_coords, report_row

__all__ = ["segment_mean", "unique_coords"]

INDEX = "index[{row}] is not a row of counts"
BLOCK = 256


@triton.jit
def _column_extent(low, high, axis: tl.constexpr):
    """Return the lowest value of column ``axis``, and the number of values from it to the highest one."""
    start = tl.load(low + axis).to(tl.int64)
    return start, tl.load(high + axis).to(tl.int64) - start + 1


@triton.jit(do_not_specialize=["n"])
def pack_kernel(coords, low, high, keys, wide, n, BLOCK: tl.constexpr):
    """Write a key for each row of ``coords`` to ``keys``, in the lexicographic order of the rows. Write 1 to ``wide``
    if the columns span more cells than keys of 63 bits can count, and 0 otherwise. ``low`` and ``high`` are the extrema
    of the columns.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, x, y, z = load_coords(coords, row, row < n)
    b_low, batches = _column_extent(low, high, 0)
    x_low, width = _column_extent(low, high, 1)
    y_low, height = _column_extent(low, high, 2)
    z_low, depth = _column_extent(low, high, 3)
    key = ((b - b_low) * width + (x - x_low)) * height + (y - y_low)
    tl.store(keys + row, key * depth + (z - z_low), mask=row < n)
    if tl.program_id(0) == 0:
        most = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
        # Overflow is tested by division before each multiplication.
        many = height > most // depth
        cells = tl.where(many, 1, height * depth)
        many = many | (width > most // cells)
        cells = tl.where(many, 1, cells * width)
        tl.store(wide, (many | (batches > most // cells)).to(tl.int32))


@triton.jit(do_not_specialize=["n"])
def first_kernel(keys, first, n, BLOCK: tl.constexpr):
    """Write 1 to ``first`` at the first of equal ones among the sorted ``keys``, and 0 elsewhere."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + at, mask=at < n, other=0)
    before = tl.load(keys + at - 1, mask=(at > 0) & (at < n), other=0)
    tl.store(first + at, ((at == 0) | (key != before)).to(tl.int32), mask=at < n)


@triton.jit(do_not_specialize=["n"])
def group_kernel(coords, rows, groups, unique, inverse, counts, n, BLOCK: tl.constexpr):
    """Write the distinct rows to ``unique``, the number of the distinct row of each input to ``inverse``, and the
    number of inputs of each distinct row to ``counts``, which must be zeros before.

    ``rows`` are the inputs in sorted order. ``groups`` holds the number of the distinct row of each sorted input, plus
    1.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    row = tl.load(rows + at, mask=there, other=0)
    group = tl.load(groups + at, mask=there, other=0)
    begins = there & (group != tl.load(groups + at - 1, mask=there & (at > 0), other=0))
    ends = there & (group != tl.load(groups + at + 1, mask=at < n - 1, other=0))
    place = group.to(tl.int64) - 1
    tl.store(inverse + row, place.to(tl.int32), mask=there)
    # The count is end minus begin. Both may be in different programs, so each adds its share.
    tl.atomic_add(counts + place, at + 1, mask=ends, sem="relaxed")
    tl.atomic_add(counts + place, -at, mask=begins, sem="relaxed")
    column = tl.arange(0, 4)[None, :]
    cell = tl.load(coords + row[:, None] * 4 + column, mask=begins[:, None], other=0)
    tl.store(unique + place[:, None] * 4 + column, cell, mask=begins[:, None])


_pack = triton_launcher(pack_kernel)
_first = triton_launcher(first_kernel)
_group = triton_launcher(group_kernel)


def unique_coords(coords: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct rows of ``coords`` in ascending order, the number of the distinct row of each input, and the
    number of inputs of each distinct row. This is ``ops.unique_coords`` on CUDA. The host reads the number of distinct
    rows. Raise ``SL211`` if the rows span too many cells.
    """
    n, coords = coords.shape[0], coords.contiguous()
    status.word(coords.device)
    inverse = coords.new_empty(n)
    if not n:
        return coords.new_empty(0, 4), inverse, coords.new_empty(0)
    low, high = coords.aminmax(dim=0)
    keys, groups, grid = coords.new_empty(n, dtype=torch.int64), coords.new_empty(n + 1), (-(-n // BLOCK),)
    _pack[grid](coords, low, high, keys, groups[n:], n, BLOCK=BLOCK)
    keys, rows = keys.sort()
    _first[grid](keys, groups, n, BLOCK=BLOCK)
    # Ones at the begins of keys become numbers of groups.
    groups[:n].cumsum_(0)
    # One transfer for the number of groups and the flag, since each one waits for the device.
    m, wide = groups[n - 1 :].tolist()
    if wide:
        span = tuple((high.long() - low + 1).tolist())
        raise error("SL211", where="sparse3d::unique_coords", got=f"coords span {span} cells, 2^63 or more in all")
    unique, counts = coords.new_empty(m, 4), coords.new_zeros(m)
    _group[grid](coords, rows, groups, unique, inverse, counts, n, BLOCK=BLOCK)
    return unique, inverse, counts


@triton.jit(do_not_specialize=["status", "n", "m", "code"])
def mean_kernel(
    feats,
    index,
    rows,
    starts,
    counts,
    out,
    status,
    n,
    m,
    c,
    row_stride,
    column_stride,
    code,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the mean of the rows of ``feats`` in each segment (the rows with one index) to ``out``. ``rows`` is the
    order of the rows by segment, and ``starts`` is where each segment begins in it. Segment numbers outside the output
    are reported in a status word, from which the host raises ``SL211`` later.
    """
    segment = tl.program_id(0)
    # The index is sorted, so a number out of range is at one of its ends.
    if segment == 0:
        lowest, highest = tl.load(index), tl.load(index + n - 1)
        report_row(status, code, tl.load(rows), lowest < 0)
        report_row(status, code, tl.load(rows + n - 1), highest >= m)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    begin = tl.load(starts + segment)
    end = tl.load(starts + segment + 1, mask=segment < m, other=0)
    total = tl.zeros([ROWS, CHANNELS], tl.float64 if WIDE else tl.float32)
    for first in range(begin, end, ROWS):
        at = first + tl.arange(0, ROWS)
        row = tl.load(rows + at, mask=at < end, other=0)
        place = feats + row[:, None] * row_stride + channel.to(tl.int64)[None, :] * column_stride
        total += tl.load(place, mask=(at < end)[:, None] & (channel < c)[None, :], other=0.0).to(total.dtype)
    count = tl.maximum(tl.load(counts + segment, mask=segment < m, other=1), 1).to(total.dtype)
    tl.store(out + segment.to(tl.int64) * c + channel, tl.sum(total, 0) / count, mask=(segment < m) & (channel < c))


_mean = triton_launcher(mean_kernel)


def segment_mean(feats: Tensor, index: Tensor, counts: Tensor, *, out: Tensor) -> None:
    """Write the mean of the rows of each segment (the rows with one ``index``) to ``out``. Rows are sorted by segment
    and added in order, so sums are the same in each run. This is ``ops.segment_mean`` on CUDA.
    """
    word, (n, c), m = status.word(feats.device), feats.shape, counts.shape[0]
    if not n:
        out.zero_()
        return
    ordered, rows = index.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(m + 1, dtype=torch.int32, device=index.device), out_int32=True)
    # The grid below has one program at least, which checks the segment numbers.
    channels = min(128, triton.next_power_of_2(max(c, 1)))
    _mean[(max(m, 1), max(1, -(-c // channels)))](
        feats,
        ordered,
        rows,
        starts,
        counts.contiguous(),
        out,
        word,
        n,
        m,
        c,
        *feats.stride(),
        status.code_of("segment_mean", INDEX),
        ROWS=max(4, min(16, 512 // channels)),
        CHANNELS=channels,
        WIDE=feats.dtype == torch.float64,
        num_warps=1,
    )
