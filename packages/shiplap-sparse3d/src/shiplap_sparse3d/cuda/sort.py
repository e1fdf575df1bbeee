"""``sort_table`` in Triton: rows of each part by the Gray rank of their hits.

Few rows in parts of few taps are sorted by one program a part. More of them in parts that have few ranks are placed by
one counting sort: a histogram of each tile of rows, their running sums, then each row to where it belongs. The rest
goes through ``torch.sort``, which is stable too. Addresses are integers, into one workspace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.extend import triton_launcher
from shiplap_sparse3d.ops import ROWS_PER_MASK, part_size

__all__ = ["Form", "form_of", "pow2", "scratch_bytes", "sort_at", "sort_rows", "sort_table", "store_key", "tap_blocks"]

TILE = tl.constexpr(128)  # rows of a histogram; a row finds its place in the tile by comparing with all of them
ALONE_TAPS, ALONE_ROWS = 4, 8192  # a part up to here has one program
COUNTED_TAPS = 9  # parts up to here are counted: 512 ranks
COUNTED_ROWS = 1 << 17  # tables up to here: beyond, the histograms outweigh the rows
MASK_ROWS = tl.constexpr(64)  # ROWS_PER_MASK


class Form(NamedTuple):
    """How a table is sorted.

    Attributes:
        size: taps of a part. bins: ranks that are counted, or 0. key: dtype of sort keys, None if there are none.
        run, runs: rows of a run, and runs of a part. zeros: bytes of the histograms, which start as zeros.
        keys: where in the scratch the keys are; before them are the histograms and their sums.
    """

    size: int
    bins: int
    key: Any
    run: int
    runs: int
    zeros: int
    keys: int


def form_of(m: int, k: int, parts: int, run: int) -> Form:
    """How to sort ``m`` rows of ``k`` taps in runs of ``run``."""
    size = part_size(k, parts)
    if m <= min(ALONE_ROWS, run) and size <= ALONE_TAPS:
        return Form(size, 0, None, run, 1, 0, 0)
    if m <= min(COUNTED_ROWS, run) and size <= COUNTED_TAPS:
        bins = max(2, 1 << size)
        zeros = 4 * parts * bins * -(-m // TILE.value)
        return Form(size, bins, tl.int16, run, 1, zeros, zeros + 4 * parts * bins)
    runs = -(-m // run)
    bits = size + (parts * runs - 1).bit_length()
    return Form(size, 0, tl.int16 if bits <= 15 else tl.int32 if bits <= 31 else tl.int64, run, runs, 0, 0)


def scratch_bytes(m: int, parts: int) -> int:
    """The most that any form needs, in whole 64-bit words, since keys may lie behind it; declared as ``cuda.SORT``."""
    return -(-parts * (20 * m + 8192) // 8) * 8


@triton.jit
def _hits(table, row, m, k, part, SIZE: tl.constexpr, TAPS: tl.constexpr):
    """Entries of the rows under the taps of a part, and one bit for each that is there."""
    v = tl.arange(0, TAPS)
    tap = part * SIZE + v
    inside = (row < m)[:, None] & ((v < SIZE) & (tap < k))[None, :]
    table = table.to(tl.int64).to(tl.pointer_type(tl.int32))
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


@triton.jit
def store_key(
    keys, counts, masks, hits, row, m, part, run, runs, SIZE: tl.constexpr, KEY: tl.constexpr, BINS: tl.constexpr
):
    """Keys of rows with these ``hits``. ``BINS``: counted in their tiles, masks cleared; 0: keys tell part and run."""
    key = _key(hits, SIZE)
    place = keys.to(tl.int64).to(tl.pointer_type(KEY)) + m.to(tl.int64) * part + row
    if BINS:
        tl.store(place, key.to(KEY), mask=row < m)
        tiles, blocks = (m + TILE - 1) // TILE, (m + MASK_ROWS - 1) // MASK_ROWS
        count = counts.to(tl.int64).to(tl.pointer_type(tl.int32))
        tl.atomic_add(count + (part * tiles + row // TILE).to(tl.int64) * BINS + key, 1, mask=row < m, sem="relaxed")
        block = masks + blocks.to(tl.int64) * part + row // MASK_ROWS
        tl.store(block, tl.zeros_like(row), mask=(row < m) & (row % MASK_ROWS == 0))
    else:
        tl.store(place, ((part * runs + row // run).to(KEY) << SIZE) | key.to(KEY), mask=row < m)


@triton.jit(do_not_specialize=["table", "keys", "counts", "m", "k", "run", "runs"])
def key_kernel(
    table: tl.int64,
    keys: tl.int64,
    counts: tl.int64,
    masks,
    m,
    k,
    run,
    runs,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    KEY: tl.constexpr,
    BINS: tl.constexpr,
):
    """What a sort needs of a tile of rows under one part."""
    part, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _, hits, _ = _hits(table, row, m, k, part, SIZE, TAPS)
    store_key(keys, counts, masks, hits, row, m, part, run, runs, SIZE, KEY, BINS)


@triton.jit(do_not_specialize=["table", "m", "k"])
def alone_kernel(
    table: tl.int64,
    columns,
    order,
    masks,
    m,
    k,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """All rows of a part, ``ROWS`` at a time: counted, then placed. Masks follow from the ranks in a block."""
    part, bins = tl.program_id(0), tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for first in range(0, m, ROWS):
        row = first + tl.arange(0, ROWS)
        _, hits, _ = _hits(table, row, m, k, part, SIZE, TAPS)
        total += tl.sum(((_key(hits, SIZE)[:, None] == bins[None, :]) & (row < m)[:, None]).to(tl.int32), 0)
    begin = tl.cumsum(total, 0) - total
    before, tap = begin, (part * SIZE + tl.arange(0, TAPS)).to(tl.int64)
    for first in range(0, m, ROWS):
        row = first + tl.arange(0, ROWS)
        entry, hits, inside = _hits(table, row, m, k, part, SIZE, TAPS)
        same = ((_key(hits, SIZE)[:, None] == bins[None, :]) & (row < m)[:, None]).to(tl.int32)
        place = tl.sum(same * (tl.cumsum(same, 0) - 1 + before[None, :]), 1)
        before += tl.sum(same, 0)
        tl.store(columns + tap[None, :] * m + place[:, None], entry, mask=inside)
        tl.store(order + part.to(tl.int64) * m + place, row, mask=row < m)
    rank = ((1 << SIZE) - 1) - bins
    hit = rank ^ (rank >> 1)
    blocks = (m + MASK_ROWS - 1) // MASK_ROWS
    for first in range(0, blocks, ROWS // MASK_ROWS):
        block = first + tl.arange(0, ROWS // MASK_ROWS)
        within = (begin[None, :] < (block * MASK_ROWS + MASK_ROWS)[:, None]) & (total > 0)[None, :]
        within = within & ((begin + total)[None, :] > (block * MASK_ROWS)[:, None])
        mask = tl.zeros_like(block)
        for v in tl.static_range(SIZE):
            mask |= tl.max(tl.where(within, (hit >> v)[None, :] & 1, 0), 1) << v
        tl.store(masks + part.to(tl.int64) * blocks + block, mask, mask=block < blocks)


@triton.jit(do_not_specialize=["counts", "totals", "tiles"])
def scan_kernel(
    counts: tl.int64, totals: tl.int64, tiles, BINS: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr
):
    """Histograms → for each tile how many of that key are in the tiles before it; the sums go to ``totals``."""
    counts = counts.to(tl.int64).to(tl.pointer_type(tl.int32))
    totals = totals.to(tl.int64).to(tl.pointer_type(tl.int32))
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


@triton.jit(do_not_specialize=["table", "keys", "counts", "totals", "m", "k"])
def place_kernel(
    table: tl.int64,
    keys: tl.int64,
    counts: tl.int64,
    totals: tl.int64,
    columns,
    order,
    masks,
    m,
    k,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Rows of a tile to their places: after smaller keys, after the same key in earlier tiles and earlier in this."""
    counts = counts.to(tl.int64).to(tl.pointer_type(tl.int32))
    totals = totals.to(tl.int64).to(tl.pointer_type(tl.int32))
    tile, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, TILE)
    row = tile * TILE + lane
    mine = keys.to(tl.int64).to(tl.pointer_type(tl.int16)) + part.to(tl.int64) * m
    key = tl.load(mine + row, mask=row < m, other=0).to(tl.int32)
    place = tl.load(counts + (part * tl.num_programs(0) + tile).to(tl.int64) * BINS + key, mask=row < m, other=0)
    total = tl.load(totals + part * BINS + tl.arange(0, BINS))
    place += tl.gather(tl.cumsum(total, 0) - total, key, 0)
    for first in range(0, TILE, CHUNK):
        other = first + tl.arange(0, CHUNK)
        theirs = tl.load(mine + tile * TILE + other, mask=tile * TILE + other < m, other=-1).to(tl.int32)
        place += tl.sum(((theirs[None, :] == key[:, None]) & (other[None, :] < lane[:, None])).to(tl.int32), 1)
    entry, hits, inside = _hits(table, row, m, k, part, SIZE, TAPS)
    tap = part * SIZE + tl.arange(0, TAPS)
    tl.store(columns + tap.to(tl.int64)[None, :] * m + place[:, None], entry, mask=inside)
    tl.store(order + part.to(tl.int64) * m + place, row, mask=row < m)
    blocks = (m + MASK_ROWS - 1) // MASK_ROWS
    tl.atomic_or(masks + part.to(tl.int64) * blocks + place // MASK_ROWS, hits, mask=hits != 0, sem="relaxed")


@triton.jit(do_not_specialize=["table", "m", "k"])
def gather_kernel(table: tl.int64, sorted_rows, columns, order, masks, m, k, SIZE: tl.constexpr, TAPS: tl.constexpr):
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
_alone = triton_launcher(alone_kernel)
_scan = triton_launcher(scan_kernel)
_place = triton_launcher(place_kernel)
_gather = triton_launcher(gather_kernel)


def sort_table(
    table: Tensor, parts: int, run: int, *, columns: Tensor, order: Tensor, masks: Tensor, workspace: Tensor
) -> None:
    """See ``ops.sort_table``."""
    m, k = table.shape
    dense = table.contiguous()  # held while the kernels are launched: what they allocate must not take its place
    if m:
        sort_at(dense.data_ptr(), m, k, parts, run, workspace, 0, columns, order, masks)


def sort_at(
    table: int,
    m: int,
    k: int,
    parts: int,
    run: int,
    workspace: Tensor,
    scratch: int,
    columns: Tensor,
    order: Tensor,
    masks: Tensor,
) -> None:
    """The sorted form of the table at address ``table``, with what is ``scratch`` bytes into the workspace."""
    form, at = form_of(m, k, parts, run), workspace.data_ptr() + scratch
    if form.zeros:
        workspace[scratch : scratch + form.zeros].zero_()
    if form.key is not None:
        taps = pow2(form.size)
        rows = max(64, 2048 // taps)
        _keys[(-(-m // rows), parts)](
            table,
            at + form.keys,
            at,
            masks,
            m,
            k,
            form.run,
            form.runs,
            SIZE=form.size,
            TAPS=taps,
            ROWS=rows,
            KEY=form.key,
            BINS=form.bins,
            num_warps=4,
        )
    sort_rows(form, table, workspace, scratch, m, k, parts, columns, order, masks)


def pow2(size: int) -> int:
    """The least power of two from ``size`` on. (Triton's own function of that takes 5 µs; Xeon, 2026-11.)"""
    return 1 << max(0, size - 1).bit_length()


def sort_rows(
    form: Form,
    table: int,
    workspace: Tensor,
    scratch: int,
    m: int,
    k: int,
    parts: int,
    columns: Tensor,
    order: Tensor,
    masks: Tensor,
) -> None:
    """``sort_at`` once keys are there; keys and counts lie ``scratch`` bytes into the workspace."""
    size, taps = form.size, pow2(form.size)
    if form.key is None:
        rows = min(1024, max(MASK_ROWS.value, pow2(m)))
        _alone[(parts,)](
            table, columns, order, masks, m, k, SIZE=size, TAPS=taps, BINS=max(2, 1 << size), ROWS=rows, num_warps=8
        )
    elif form.bins:
        bins, counts, tiles = form.bins, workspace.data_ptr() + scratch, -(-m // TILE.value)
        totals, chunk = counts + form.zeros, min(bins, 16)
        _scan[(bins // chunk, parts)](counts, totals, tiles, BINS=bins, CHUNK=chunk, TILES=64, num_warps=4)
        _place[(tiles, parts)](
            table,
            counts + form.keys,
            counts,
            totals,
            columns,
            order,
            masks,
            m,
            k,
            SIZE=size,
            TAPS=taps,
            BINS=bins,
            CHUNK=32,
            num_warps=4,
        )
    else:
        dtype = {tl.int16: torch.int16, tl.int32: torch.int32, tl.int64: torch.int64}[form.key]
        keys = workspace[scratch : scratch + parts * m * dtype.itemsize].view(dtype)
        rows_of_places = keys.sort(stable=True)[1]
        _gather[(-(-m // ROWS_PER_MASK), parts)](
            table, rows_of_places, columns, order, masks, m, k, SIZE=size, TAPS=taps, num_warps=4
        )


@triton.jit(do_not_specialize=["parts", "b", "size"])
def tap_kernel(masks, blocks, counts, parts, b, size, BLOCK: tl.constexpr):
    """The blocks that hit one tap from the front of its row, and as many zeros as there are others from the back."""
    tap, before = tl.program_id(0), 0
    part, bit = tap // size, tl.minimum(tap % size, 31)
    mine = blocks + tap.to(tl.int64) * b
    for first in range(0, b, BLOCK):
        block = first + tl.arange(0, BLOCK)
        mask = tl.load(masks + part.to(tl.int64) * b + block, mask=(block < b) & (part < parts), other=0)
        hit = (mask >> bit) & 1
        place = before + tl.cumsum(hit, 0) - hit  # of hits; of the others as many are before as are not there
        tl.store(mine + tl.where(hit > 0, place, b - 1 - (block - place)), tl.where(hit > 0, block, 0), mask=block < b)
        before += tl.sum(hit, 0)
    tl.store(counts + tap, before)


_taps_of_blocks = triton_launcher(tap_kernel)


def tap_blocks(masks: Tensor, taps: int, *, blocks: Tensor, counts: Tensor) -> None:
    """See ``ops.tap_blocks``."""
    parts, b = masks.shape
    if taps:
        wide = b > 512
        _taps_of_blocks[(taps,)](
            masks.contiguous(),
            blocks,
            counts,
            parts,
            b,
            max(1, part_size(taps, parts)),
            BLOCK=4096 if wide else 512,
            num_warps=16 if wide else 4,
        )
