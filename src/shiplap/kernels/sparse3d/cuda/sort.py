"""``sort_table`` in Triton: rows of each part by the Gray rank of their hits.

Parts of few taps have few ranks, so one counting sort places all parts at once: a histogram of each tile of rows, their
running sums, then each row to where it belongs. Wide parts go through ``torch.sort``, which is stable too.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.impl import triton_launcher
from shiplap.kernels.sparse3d.ops import ROWS_PER_MASK, part_size

__all__ = ["sort_table"]

TILE = 256  # rows of a histogram; a row finds its place in the tile by comparing with all of them
COUNTED_TAPS = 9  # parts up to here are counted: 512 ranks
COUNTED_ROWS = 1 << 17  # tables up to here: beyond, the histograms outweigh the rows
MASK_ROWS = tl.constexpr(64)  # ROWS_PER_MASK


@triton.jit
def _hits(table, row, m, k, part, SIZE: tl.constexpr, TAPS: tl.constexpr):
    """Entries of the rows under the taps of a part, and one bit for each that is there."""
    v = tl.arange(0, TAPS)
    tap = part * SIZE + v
    inside = (row < m)[:, None] & ((v < SIZE) & (tap < k))[None, :]
    entry = tl.load(table + row.to(tl.int64)[:, None] * k + tap[None, :], mask=inside, other=-1)
    return entry, tl.sum((entry >= 0).to(tl.int32) << v[None, :], 1), inside


@triton.jit
def _key(hits, SIZE: tl.constexpr):
    """Ascending keys are descending ranks; no hit comes last."""
    rank = hits ^ (hits >> 1)  # the prefix XOR that undoes a Gray code
    rank ^= rank >> 2
    rank ^= rank >> 4
    rank ^= rank >> 8
    rank ^= rank >> 16
    return ((1 << SIZE) - 1) - rank


@triton.jit(do_not_specialize=["m", "k", "run", "runs"])
def key_kernel(
    table, keys, counts, masks, m, k, run, runs,
    SIZE: tl.constexpr, TAPS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Keys of a tile of rows under one part. ``BINS``: histogram and cleared masks too; 0: keys tell part and run."""
    tile, part = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    _, hits, _ = _hits(table, row, m, k, part, SIZE, TAPS)
    key = _key(hits, SIZE)
    place = keys + part.to(tl.int64) * m + row
    if BINS:
        tl.store(place, key.to(keys.dtype.element_ty), mask=row < m)
        # Rows past the end count as the last ones without a hit, where nobody comes after them.
        count = counts + (part * tl.num_programs(0) + tile).to(tl.int64) * BINS + tl.arange(0, BINS)
        tl.store(count, tl.histogram(key, BINS))
        block = tile * (ROWS // MASK_ROWS) + tl.arange(0, ROWS // MASK_ROWS)
        blocks = (m + MASK_ROWS - 1) // MASK_ROWS
        tl.store(masks + part.to(tl.int64) * blocks + block, tl.zeros_like(block), mask=block < blocks)
    else:
        own = keys.dtype.element_ty
        tl.store(place, ((part * runs + row // run).to(own) << SIZE) | key.to(own), mask=row < m)


@triton.jit(do_not_specialize=["tiles"])
def scan_kernel(counts, totals, tiles, BINS: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr):
    """Histograms → for each tile how many of that key are in the tiles before it; the sums go to ``totals``."""
    part = tl.program_id(1)
    bins = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    before = tl.zeros([CHUNK], tl.int32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        at = counts + (part * tiles + tile).to(tl.int64)[:, None] * BINS + bins[None, :]
        inside = (tile < tiles)[:, None] & (bins < BINS)[None, :]
        count = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(count, 0) - count + before[None, :], mask=inside)
        before += tl.sum(count, 0)
    tl.store(totals + part * BINS + bins, before, mask=bins < BINS)


@triton.jit(do_not_specialize=["m", "k"])
def place_kernel(
    table, keys, counts, totals, columns, order, masks, m, k, SIZE: tl.constexpr, TAPS: tl.constexpr,
    BINS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BIN_CHUNK: tl.constexpr,
):  # fmt: skip
    """Rows of a tile to their places: after smaller keys, after the same key in earlier tiles and earlier in this."""
    tile, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, ROWS)
    row = tile * ROWS + lane
    mine = keys + part.to(tl.int64) * m
    key = tl.load(mine + row, mask=row < m, other=0).to(tl.int32)
    place = tl.load(counts + (part * tl.num_programs(0) + tile).to(tl.int64) * BINS + key, mask=row < m, other=0)
    for first in range(0, BINS, BIN_CHUNK):
        bins = first + tl.arange(0, BIN_CHUNK)
        total = tl.load(totals + part * BINS + bins)
        place += tl.sum(tl.where(bins[None, :] < key[:, None], total[None, :], 0), 1)
    for first in range(0, ROWS, CHUNK):
        other = first + tl.arange(0, CHUNK)
        theirs = tl.load(mine + tile * ROWS + other, mask=tile * ROWS + other < m, other=-1).to(tl.int32)
        place += tl.sum(((theirs[None, :] == key[:, None]) & (other[None, :] < lane[:, None])).to(tl.int32), 1)
    entry, hits, inside = _hits(table, row, m, k, part, SIZE, TAPS)
    tap = part * SIZE + tl.arange(0, TAPS)
    tl.store(columns + tap.to(tl.int64)[None, :] * m + place[:, None], entry, mask=inside)
    tl.store(order + part.to(tl.int64) * m + place, row, mask=row < m)
    blocks = (m + MASK_ROWS - 1) // MASK_ROWS
    tl.atomic_or(masks + part.to(tl.int64) * blocks + place // MASK_ROWS, hits, mask=hits != 0, sem="relaxed")


@triton.jit(do_not_specialize=["m", "k"])
def gather_kernel(
    table, sorted_rows, columns, order, masks, m, k, SIZE: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """64 sorted rows of a part: their entries tap by tap, their mask, and the order as int32."""
    block, part = tl.program_id(0), tl.program_id(1)
    place = block * MASK_ROWS + tl.arange(0, MASK_ROWS)
    first = part.to(tl.int64) * m
    row = (tl.load(sorted_rows + first + place, mask=place < m, other=0) - first).to(tl.int32)
    tl.store(order + first + place, row, mask=place < m)
    entry, _, inside = _hits(table, tl.where(place < m, row, m), m, k, part, SIZE, TAPS)
    v = tl.arange(0, TAPS)
    tl.store(columns + (part * SIZE + v).to(tl.int64)[None, :] * m + place[:, None], entry, mask=inside)
    any_row = tl.max((entry >= 0).to(tl.int32), 0)
    tl.store(masks + part.to(tl.int64) * tl.num_programs(0) + block, tl.sum(any_row << v, 0))


_keys = triton_launcher(key_kernel)
_scan = triton_launcher(scan_kernel)
_place = triton_launcher(place_kernel)
_gather = triton_launcher(gather_kernel)


def sort_table(table: Tensor, parts: int, run: int, *, columns: Tensor, order: Tensor, masks: Tensor) -> None:
    """See ``ops.sort_table``."""
    m, k = table.shape
    size = part_size(k, parts)
    if not m:
        return
    table = table.contiguous()
    taps = triton.next_power_of_2(max(1, size))
    if size <= COUNTED_TAPS and m <= min(COUNTED_ROWS, run):
        _counted(table, parts, size, taps, columns, order, masks)
    else:
        _by_torch(table, parts, run, size, taps, columns, order, masks)


def _counted(table: Tensor, parts: int, size: int, taps: int, columns: Tensor, order: Tensor, masks: Tensor) -> None:
    m, k = table.shape
    bins, tiles = max(2, 1 << size), -(-m // TILE)
    scratch = torch.empty(parts * (bins * (tiles + 1) + -(-m // 2)), dtype=torch.int32, device=table.device)
    counts, totals, keys = scratch.split(
        (parts * bins * tiles, parts * bins, scratch.numel() - parts * bins * (tiles + 1))
    )
    keys = keys.view(torch.int16)
    _keys[(tiles, parts)](
        table, keys, counts, masks, m, k, m, 1, SIZE=size, TAPS=taps, BINS=bins, ROWS=TILE, num_warps=4
    )
    chunk = min(bins, 16)
    _scan[(bins // chunk, parts)](counts, totals, tiles, BINS=bins, CHUNK=chunk, TILES=64, num_warps=4)
    _place[(tiles, parts)](
        table, keys, counts, totals, columns, order, masks, m, k, SIZE=size, TAPS=taps, BINS=bins, ROWS=TILE, CHUNK=32,
        BIN_CHUNK=min(bins, 32), num_warps=8,
    )  # fmt: skip


def _by_torch(
    table: Tensor, parts: int, run: int, size: int, taps: int, columns: Tensor, order: Tensor, masks: Tensor
) -> None:
    m, k = table.shape
    runs = -(-m // run)
    bits = size + (parts * runs - 1).bit_length()
    dtype = torch.int16 if bits <= 15 else torch.int32 if bits <= 31 else torch.int64
    keys = torch.empty(parts * m, dtype=dtype, device=table.device)
    rows = max(64, 2048 // taps)
    _keys[(-(-m // rows), parts)](
        table, keys, keys, masks, m, k, run, runs, SIZE=size, TAPS=taps, BINS=0, ROWS=rows, num_warps=4
    )
    sorted_rows = keys.sort(stable=True)[1]
    _gather[(-(-m // ROWS_PER_MASK), parts)](
        table, sorted_rows, columns, order, masks, m, k, SIZE=size, TAPS=taps, num_warps=4
    )
