"""Submanifold tables of many voxels: a bit for each cell of a brick of 4 x 4 x 4 cells.

If the grids of all scenes have few bricks compared with the voxels, each brick has a word of bits. Otherwise the bricks
with voxels are in a hash. On a surface some twenty voxels share a brick, so the words stay in the L2 cache, which a
slot for each voxel does not. A window of three cells per axis meets at most eight bricks. The bits of their words tell
which of its cells are voxels, and the sort of a table needs nothing else. Once the order of the rows is known, each row
is looked up again, and its entries are written to their final places, so a table in the order of the voxels is never
made. The rows of a brick's voxels are adjacent, in the order of its bits, in a list whose start the brick stores.
``brick_plan.py`` has the launches and the layout of the workspace.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shiplap_sparse3d.cuda import sort
from shiplap_sparse3d.cuda.hash import first_slot, is_inside, report_row, search_blocks

__all__ = [
    "ENTRIES",
    "PLACES",
    "SIZES",
    "brick_entries_kernel",
    "brick_hits_kernel",
    "brick_insert_kernel",
    "brick_start_kernel",
]

ENTRIES = tl.constexpr(64)  # rows of a program that writes: those of one mask


@triton.jit
def _coords_of(coords, row, inside):
    """Return the columns (scene, x, y, z) of each ``row`` of ``coords``, with -1 where ``inside`` is false. The four
    are read together, since rows in random order lie in different cache lines.
    """
    at = coords + row.to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    columns = tl.reshape(tl.load(at, mask=inside[:, None], other=-1), (row.shape[0], 2, 2))
    by, xz = tl.split(columns)
    b, y = tl.split(by)
    x, z = tl.split(xz)
    return b, x, y, z


@triton.jit
def _quarter(size):
    """Return ``size / 4``, rounded up. This is the number of bricks (blocks of 4 x 4 x 4 cells) along an axis of
    ``size`` cells.
    """
    return (size >> 2) + ((size & 3) != 0).to(tl.int32)


@triton.jit
def _brick_number(b, x, y, z, width, height, depth):
    """Return the number of a brick (a block of 4 x 4 x 4 cells) in the grid, from its scene and its coordinates in
    bricks. ``width``, ``height`` and ``depth`` count cells.
    """
    return ((b * _quarter(width) + x) * _quarter(height) + y) * _quarter(depth) + z


@triton.jit
def _word_address(slots, slot, DENSE: tl.constexpr):
    """Return the address of the 64-bit word with the bits of a brick (a block of 4 x 4 x 4 cells). If ``DENSE`` is
    true, it is element ``slot`` of an array. Otherwise it is in slot ``slot`` of a hash, in which the brick's number +
    1 precedes the word.
    """
    at = slot.to(tl.int64)
    if not DENSE:
        at = at * 2 + 1
    return _word_pointer(slots) + at


@triton.jit
def _word_of_ones(word):
    """Return the number of set bits of each 64-bit word, in a form that the compiler turns into one instruction."""
    x = word.to(tl.uint64, bitcast=True)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _count_below(word, bit):
    """Return the number of set bits of ``word`` below position ``bit``. This is the index of a cell among the voxels of
    its brick (a block of 4 x 4 x 4 cells with one bit each).
    """
    return _word_of_ones(word & ((tl.full(bit.shape, 1, tl.int64) << bit.to(tl.int64)) - 1))


@triton.jit
def _int_pointer(address):
    """Return the integer ``address`` as a pointer to int32."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int32))


@triton.jit
def _word_pointer(address):
    """Return the integer ``address`` as a pointer to int64."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))


SIZES = ["n", "width", "height", "depth", "batches", "capacity"]
PLACES = ["slots", "counters", "starts", "rows", "own", "taken"]


@triton.jit
def _take_slots(slots, number, good, room):
    """Return the slot in the hash of bricks (blocks of 4 x 4 x 4 cells) for each key ``number`` where the mask ``good``
    is set, as int32. A key is a brick's number + 1. A key that is missing takes a free slot. ``room`` is the number of
    slots.
    """
    entries, slot = _word_pointer(slots), first_slot(number, room)
    seen = tl.load(entries + slot.to(tl.int64) * 2, mask=good, other=0)  # most bricks are there already
    wanting = good & (seen != number)
    while tl.max(wanting.to(tl.int32), 0) > 0:
        # There is no masked compare-and-swap: who is done compares with what no slot holds.
        free = tl.where(wanting, 0, -1).to(tl.int64)
        old = tl.atomic_cas(entries + slot.to(tl.int64) * 2, free, number, sem="relaxed")
        wanting = wanting & (old != 0) & (old != number)
        slot = tl.where(wanting, tl.where(slot + 1 == room, 0, slot + 1), slot)
    return slot.to(tl.int32)


@triton.jit(do_not_specialize=[*PLACES, *SIZES, "status", "code", "code_twice"])
def brick_insert_kernel(
    coords,
    slots: tl.int64,
    counters: tl.int64,
    own: tl.int64,
    taken: tl.int64,
    status: tl.int64,
    n,
    width,
    height,
    depth,
    batches,
    capacity,
    code,
    code_twice,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set the bit of each row's cell in the 64-bit word of its brick (a block of 4 x 4 x 4 cells). Write the slot that
    holds the word of each row to ``own``, and all used slots to ``taken``. Rows outside the grid and duplicates are
    reported in a status word, from which the host raises ``SL211`` later.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, x, y, z = _coords_of(coords, row, row < n)
    good = is_inside(b, x, y, z, width, height, depth, batches)
    report_row(status, code, row, (b != -1) & ~good)
    if DENSE:
        slot = _brick_number(b, x >> 2, y >> 2, z >> 2, width, height, depth)
    else:
        number = _brick_number(b.to(tl.int64), x >> 2, y >> 2, z >> 2, width, height, depth) + 1
        slot = _take_slots(slots, number, good, capacity.to(tl.uint32))
        # A later kernel needs the slot again, and a load is cheaper than a second search.
        tl.store(_int_pointer(own) + row, slot, mask=row < n)
    bit = ((x & 3) * 16 + (y & 3) * 4 + (z & 3)).to(tl.int64)
    word = tl.full((BLOCK,), 1, tl.int64) << bit
    # The old word also shows whether the cell was taken, which is a duplicate voxel.
    old = tl.atomic_or(_word_address(slots, slot, DENSE), word, mask=good, sem="relaxed")
    report_row(status, code_twice, row, good & (((old >> bit) & 1) != 0))
    # The row that sets the first bit of a brick lists it, so each brick is listed once.
    made = good & (old == 0)
    new = made.to(tl.int32)
    total = tl.sum(new, 0)
    if total > 0:
        first = tl.atomic_add(_int_pointer(counters), total, sem="relaxed")
        tl.store(_int_pointer(taken) + first + tl.cumsum(new, 0) - 1, slot, mask=made)


@triton.jit(do_not_specialize=PLACES)
def brick_start_kernel(
    slots: tl.int64, counters: tl.int64, starts: tl.int64, taken: tl.int64, DENSE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write to ``starts`` where the rows of each used brick (a block of 4 x 4 x 4 cells with one bit each) begin in the
    list of all rows. A brick has as many rows as set bits.
    """
    at, bricks = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.load(_int_pointer(counters))
    if tl.program_id(0) * BLOCK < bricks:
        slot = tl.load(_int_pointer(taken) + at, mask=at < bricks, other=0)
        voxels = _word_of_ones(tl.load(_word_address(slots, slot, DENSE), mask=at < bricks, other=0))
        # One atomic for a block of bricks. Their order varies, but each brick keeps its rows together.
        first = tl.atomic_add(_int_pointer(counters) + 1, tl.sum(voxels, 0), sem="relaxed")
        tl.store(_int_pointer(starts) + slot, first + tl.cumsum(voxels, 0) - voxels, mask=at < bricks)


@triton.jit
def _bricks_of_window(
    slots,
    b,
    x,
    y,
    z,
    good,
    width,
    height,
    depth,
    capacity,
    KX: tl.constexpr,
    KY: tl.constexpr,
    KZ: tl.constexpr,
    DENSE: tl.constexpr,
):
    """Return the slots ``[rows, 8]`` of the eight bricks (blocks of 4 x 4 x 4 cells) that the windows from (x, y, z) on
    may meet, and the bricks' 64-bit words. A missing brick has the word 0.
    """
    near = tl.arange(0, 8)[None, :]
    # A window of three cells, or fewer, crosses at most one border of bricks per axis.
    nx, ny, nz = near >> 2, (near >> 1) & 1, near & 1
    bx, by, bz = (x >> 2)[:, None] + nx, (y >> 2)[:, None] + ny, (z >> 2)[:, None] + nz
    met = (nx * 4 < ((x & 3) + KX)[:, None]) & (ny * 4 < ((y & 3) + KY)[:, None]) & (nz * 4 < ((z & 3) + KZ)[:, None])
    met = met & (bx >= 0) & (bx < _quarter(width)) & (by >= 0) & (by < _quarter(height)) & (bz >= 0)
    met = met & (bz < _quarter(depth)) & good[:, None]
    if DENSE:
        slot = _brick_number(b[:, None], bx, by, bz, width, height, depth)
    else:
        number = _brick_number(b.to(tl.int64)[:, None], bx, by, bz, width, height, depth) + 1
        slot, met = search_blocks(slots, number, met, capacity, 2)
    return slot, tl.load(_word_address(slots, slot, DENSE), mask=met, other=0)


@triton.jit
def _split_corners(of, ROWS: tl.constexpr):
    """Return the eight columns of ``of [rows, 8]`` as eight tensors. A column belongs to one of the bricks (blocks of 4
    x 4 x 4 cells) that a row's window may meet, two along each axis.
    """
    # Triton cannot index registers, so the columns are split off axis by axis.
    z0, z1 = tl.split(tl.reshape(of, (ROWS, 2, 2, 2)))
    z0y0, z0y1 = tl.split(z0)
    z1y0, z1y1 = tl.split(z1)
    a000, a100 = tl.split(z0y0)
    a010, a110 = tl.split(z0y1)
    a001, a101 = tl.split(z1y0)
    a011, a111 = tl.split(z1y1)
    return a000, a001, a010, a011, a100, a101, a110, a111


@triton.jit(do_not_specialize=[*PLACES, *SIZES, "keys", "counts", "px", "py", "pz", "run", "runs"])
def brick_hits_kernel(
    coords,
    slots: tl.int64,
    starts: tl.int64,
    rows: tl.int64,
    own: tl.int64,
    keys: tl.int64,
    counts: tl.int64,
    masks,
    n,
    width,
    height,
    depth,
    batches,
    px,
    py,
    pz,
    capacity,
    run,
    runs,
    KX: tl.constexpr,
    KY: tl.constexpr,
    KZ: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    KEY: tl.constexpr,
    BINS: tl.constexpr,
    PAGE: tl.constexpr,
    DENSE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the number of each row into the list of the rows of its brick (a block of 4 x 4 x 4 cells). Write the keys
    by which the neighbour table is sorted. A key comes from a number with a bit for each column of the table in which
    the row has a neighbour.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, x, y, z = _coords_of(coords, row, row < n)
    good = is_inside(b, x, y, z, width, height, depth, batches)
    if DENSE:
        mine = _brick_number(b, x >> 2, y >> 2, z >> 2, width, height, depth)
    else:
        mine = tl.load(_int_pointer(own) + row, mask=good, other=0)
    word = tl.load(_word_address(slots, mine, DENSE), mask=good, other=0)
    start = tl.load(_int_pointer(starts) + mine, mask=good, other=0)
    tl.store(_int_pointer(rows) + start + _count_below(word, (x & 3) * 16 + (y & 3) * 4 + (z & 3)), row, mask=good)
    x, y, z = x - px, y - py, z - pz
    _, words = _bricks_of_window(slots, b, x, y, z, good, width, height, depth, capacity, KX, KY, KZ, DENSE)
    a000, a001, a010, a011, a100, a101, a110, a111 = _split_corners(words, ROWS)
    hits = tl.zeros((ROWS,), tl.int32)
    for tx in tl.static_range(KX):
        # ``far``: the cell lies in the second brick along the axis.
        far, at_x = (x & 3) + tx >= 4, ((x + tx) & 3) * 16
        b00, b01 = tl.where(far, a100, a000), tl.where(far, a101, a001)
        b10, b11 = tl.where(far, a110, a010), tl.where(far, a111, a011)
        for ty in tl.static_range(KY):
            far_y, line = (y & 3) + ty >= 4, (at_x + ((y + ty) & 3) * 4).to(tl.int64)
            near_z, far_z = tl.where(far_y, b10, b00) >> line, tl.where(far_y, b11, b01) >> line
            # A line of eight cells along z from both bricks: all taps of the line are one shift away.
            cells = ((near_z & 15) | ((far_z & 15) << 4)).to(tl.int32)
            hits |= ((cells >> (z & 3)) & ((1 << KZ) - 1)) << ((tx * KY + ty) * KZ)
    for part in range(PARTS):
        of_part = (hits >> tl.minimum(part * SIZE, 31)) & ((1 << SIZE) - 1)  # the last parts may have no taps
        sort.store_key(keys, counts, masks, of_part, row, n, part, run, runs, SIZE, KEY, BINS, PAGE)


@triton.jit
def _bitwise_or(a, b):
    """Return ``a | b``, as the operation of a Triton reduction that joins the bits of several lanes."""
    return a | b


@triton.jit
def _write_entries(columns, rows, word, start, bit, hits, tap, part, place, m, SIZE: tl.constexpr):
    """Write the neighbour's row under the tap ``tap`` of each output to the elements ``place`` of the tap's row in
    ``columns``, or -1 if there is none. Return ``hits`` with the bit of this tap set where there is a neighbour.

    A neighbour exists where ``bit`` of the brick's ``word`` is set. ``start`` is where the rows of the brick (a block
    of 4 x 4 x 4 cells) begin in the list ``rows``.
    """
    above = word << (63 - bit).to(tl.int64)  # the tap's own bit is the sign, and those below follow
    hit = above < 0
    # Rows of a brick are in the order of its bits, so a count of bits is the place in the list.
    entry = tl.load(rows + (start + _word_of_ones(above) - 1), mask=hit, other=-1)
    tl.store(columns + (tap + part * 0).to(tl.int64) * m + place, entry, mask=place < m)
    return hits | (hit.to(tl.int32) << (tap - part * SIZE))


@triton.jit(do_not_specialize=[*PLACES, *SIZES, "sorted_rows", "m", "px", "py", "pz"])
def brick_entries_kernel(
    coords,
    slots: tl.int64,
    starts: tl.int64,
    rows: tl.int64,
    sorted_rows: tl.int64,
    columns,
    order,
    masks,
    m,
    width,
    height,
    depth,
    batches,
    px,
    py,
    pz,
    capacity,
    KX: tl.constexpr,
    KY: tl.constexpr,
    KZ: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    DENSE: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Write a block of 64 sorted rows of a neighbour table, for one part (a group of columns that is sorted
    separately). ``columns`` gets the neighbour's row in each column, or -1, and ``masks`` a bit for each column with
    any neighbour.

    If ``ORDERED`` is false, write the order of the rows to ``order`` as int32. Neighbours are found in bricks, blocks
    of 4 x 4 x 4 cells with one bit each.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    place = block * ENTRIES + tl.arange(0, ENTRIES)
    row = sort.ordered_rows(sorted_rows, order, place, part, m, ORDERED)
    b, x, y, z = _coords_of(coords, row, place < m)
    good = is_inside(b, x, y, z, width, height, depth, batches)
    x, y, z = x - px, y - py, z - pz
    slot, words = _bricks_of_window(slots, b, x, y, z, good, width, height, depth, capacity, KX, KY, KZ, DENSE)
    begin = tl.load(_int_pointer(starts) + slot.to(tl.int64), mask=words != 0, other=0)
    a000, a001, a010, a011, a100, a101, a110, a111 = _split_corners(words, ENTRIES)
    s000, s001, s010, s011, s100, s101, s110, s111 = _split_corners(begin, ENTRIES)
    listed, hits = _int_pointer(rows), tl.zeros((ENTRIES,), tl.int32)
    for tx in tl.static_range(KX):
        # Whether the tap reaches into the next brick along this axis.
        far = (x & 3) + tx >= 4
        b00, b01 = tl.where(far, a100, a000), tl.where(far, a101, a001)
        b10, b11 = tl.where(far, a110, a010), tl.where(far, a111, a011)
        t00, t01 = tl.where(far, s100, s000), tl.where(far, s101, s001)
        t10, t11 = tl.where(far, s110, s010), tl.where(far, s111, s011)
        for ty in tl.static_range(KY):
            far_y, line = (y & 3) + ty >= 4, ((x + tx) & 3) * 16 + ((y + ty) & 3) * 4
            c0, c1 = tl.where(far_y, b10, b00), tl.where(far_y, b11, b01)
            u0, u1 = tl.where(far_y, t10, t00), tl.where(far_y, t11, t01)
            for tz in tl.static_range(KZ):
                tap, far_z = (tx * KY + ty) * KZ + tz, (z & 3) + tz >= 4
                word, start = tl.where(far_z, c1, c0), tl.where(far_z, u1, u0)
                # A brick has one bit for each of its 64 cells.
                bit = line + ((z + tz) & 3)
                # Without a branch where all taps belong to one part.
                if PARTS == 1 or part == tap // SIZE:
                    hits = _write_entries(columns, listed, word, start, bit, hits, tap, part, place, m, SIZE)
    tl.store(masks + part.to(tl.int64) * tl.num_programs(0) + block, tl.reduce(hits, 0, _bitwise_or))
