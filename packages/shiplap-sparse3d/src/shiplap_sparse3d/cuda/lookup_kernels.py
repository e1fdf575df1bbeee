"""The kernels of ``lookup.py``: rows into a hash, rows of the hash under the taps of queries, rows near each other."""

from __future__ import annotations

import triton
import triton.language as tl

from shiplap_sparse3d.cuda import sort
from shiplap_sparse3d.cuda.hash import (
    cell_addresses,
    find_rows,
    insert_rows,
    is_inside,
    load_coords,
    number_of,
    report_row,
    search_blocks,
)

__all__ = ["block_kernel", "insert_kernel", "lookup_kernel", "near_kernel"]


@triton.jit(
    do_not_specialize=["status", "slots", "n", "width", "height", "depth", "batches", "capacity", "code", "code_twice"]
)
def insert_kernel(
    coords,
    slots: tl.int64,
    status: tl.int64,
    n,
    width,
    height,
    depth,
    batches,
    capacity,
    code,
    code_twice,
    BLOCK: tl.constexpr,
):
    """Insert each row of ``coords`` except padding into the hash ``slots``. Rows outside the grid and duplicates are
    reported in a status word, from which the host raises ``SL211`` later.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, x, y, z = load_coords(coords, row, row < n)
    good = is_inside(b, x, y, z, width, height, depth, batches)
    report_row(status, code, row, (b != -1) & ~good)
    twin = insert_rows(slots, row, b, x, y, z, good, width, height, depth, capacity)
    # A cell that had a row already is a duplicate voxel.
    report_row(status, code_twice, row, good & (twin != 0))


@triton.jit
def _coord_under_tap(at, stride, padding, dilation, tap, WIDE: tl.constexpr):
    """Return the input coordinates ``at * stride - padding + tap * dilation`` that the cells ``tap`` of a kernel read
    along one axis, ``[rows, taps]``. They have 64 bits if ``WIDE`` is true.
    """
    if WIDE:
        at, tap = at.to(tl.int64), tap.to(tl.int64)
    return (at * stride - padding)[:, None] + (tap * dilation)[None, :]


@triton.jit(
    do_not_specialize=[
        "slots",
        "keys",
        "counts",
        "status",
        "m",
        "k",
        "width",
        "height",
        "depth",
        "width_q",
        "height_q",
        "depth_q",
        "batches",
        "sx",
        "sy",
        "sz",
        "px",
        "py",
        "pz",
        "dx",
        "dy",
        "dz",
        "capacity",
        "code",
        "run",
        "runs",
    ]
)
def lookup_kernel(
    queries,
    slots: tl.int64,
    table,
    keys: tl.int64,
    counts: tl.int64,
    masks,
    status: tl.int64,
    m,
    k,
    width,
    height,
    depth,
    width_q,
    height_q,
    depth_q,
    batches,
    sx,
    sy,
    sz,
    px,
    py,
    pz,
    dx,
    dy,
    dz,
    capacity,
    code,
    run,
    runs,
    KY: tl.constexpr,
    KZ: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    KEY: tl.constexpr,
    BINS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Write ``table[j, v]``, the row of the voxel at tap ``v`` (a cell of the kernel) of query ``j``, or -1 if there is
    none. The program handles the taps of one part, a group of ``SIZE`` taps that is sorted separately.

    Unless ``KEY`` is 0, write the keys by which the table is sorted, too. Invalid queries are reported in a status
    word, from which the host raises ``SL211`` later.
    """
    part, v = tl.program_id(1), tl.arange(0, TAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, x, y, z = load_coords(queries, row, row < m)
    good = is_inside(b, x, y, z, width_q, height_q, depth_q, batches)
    report_row(status, code, row, (b != -1) & ~good)
    tap = part * SIZE + v
    x = _coord_under_tap(x, sx, px, dx, tap // (KY * KZ), WIDE)
    y = _coord_under_tap(y, sy, py, dy, tap // KZ % KY, WIDE)
    z = _coord_under_tap(z, sz, pz, dz, tap % KZ, WIDE)
    b, own = b[:, None], ((v < SIZE) & (tap < k))[None, :]
    # The scene was checked with the query, so any number of batches will do here.
    there = is_inside(b, x, y, z, width, height, depth, 0x7FFFFFFF) & good[:, None] & own
    # Inside of the grid a coordinate fits 32 bits again.
    x, y, z = x.to(tl.int32), y.to(tl.int32), z.to(tl.int32)
    slot = find_rows(slots, b, x, y, z, there, width, height, depth, capacity)
    place = table + row.to(tl.int64)[:, None] * k + tap[None, :]
    tl.store(place, slot, mask=(row < m)[:, None] & own)
    if KEY > 0:
        hits = tl.sum((slot >= 0).to(tl.int32) << v[None, :], 1)
        sort.store_key(keys, counts, masks, hits, row, m, part, run, runs, SIZE, KEY, BINS, PAGE)


@triton.jit(
    do_not_specialize=[
        "slots",
        "keys",
        "counts",
        "status",
        "m",
        "width",
        "height",
        "depth",
        "width_q",
        "height_q",
        "depth_q",
        "batches",
        "sx",
        "sy",
        "sz",
        "px",
        "py",
        "pz",
        "capacity",
        "code",
        "run",
        "runs",
    ]
)
def block_kernel(
    queries,
    slots: tl.int64,
    table,
    keys: tl.int64,
    counts: tl.int64,
    masks,
    status: tl.int64,
    m,
    width,
    height,
    depth,
    width_q,
    height_q,
    depth_q,
    batches,
    sx,
    sy,
    sz,
    px,
    py,
    pz,
    capacity,
    code,
    run,
    runs,
    KX: tl.constexpr,
    KY: tl.constexpr,
    KZ: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEY: tl.constexpr,
    BINS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Write the same table and keys as ``lookup_kernel``, for windows with dilation 1 and at most three cells per axis.

    Such a window meets at most eight blocks of 2 x 2 x 2 cells, which are the slots of the hash. The eight blocks are
    searched for each query, and then their cells are read. Each tap is one cell of one block.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, x, y, z = load_coords(queries, row, row < m)
    good = is_inside(b, x, y, z, width_q, height_q, depth_q, batches)
    report_row(status, code, row, (b != -1) & ~good)
    if WIDE:
        x, y, z = x.to(tl.int64), y.to(tl.int64), z.to(tl.int64)
    x, y, z = (x * sx - px)[:, None], (y * sy - py)[:, None], (z * sz - pz)[:, None]
    near = tl.arange(0, 8)[None, :]
    # The first cells of the eight blocks around the window. A window of three cells meets two blocks per axis.
    bx, by, bz = (x >> 1) * 2 + (near >> 2) * 2, (y >> 1) * 2 + (near & 2), (z >> 1) * 2 + (near & 1) * 2
    there = is_inside(b[:, None], bx, by, bz, width, height, depth, 0x7FFFFFFF) & good[:, None]
    number = number_of(b[:, None], bx.to(tl.int32), by.to(tl.int32), bz.to(tl.int32), width, height, depth)
    slot, there = search_blocks(slots, number, there, capacity)
    cell = tl.arange(0, 8)[None, None, :]
    cx, cy, cz = cell >> 2, (cell >> 1) & 1, cell & 1
    tx, ty, tz = (bx - x)[:, :, None] + cx, (by - y)[:, :, None] + cy, (bz - z)[:, :, None] + cz
    # Cells of the blocks beyond the window belong to no tap.
    own = (tx >= 0) & (tx < KX) & (ty >= 0) & (ty < KY) & (tz >= 0) & (tz < KZ)
    neighbour = (
        tl.load(cell_addresses(slots, slot[:, :, None], cx, cy, cz, capacity), mask=own & there[:, :, None], other=0)
        - 1
    )
    tap = ((tx * KY + ty) * KZ + tz).to(tl.int32)
    place = table + row.to(tl.int64)[:, None, None] * (KX * KY * KZ) + tap
    tl.store(place, neighbour, mask=own & (row < m)[:, None, None])
    if KEY > 0:
        # At most 27 taps, so the hits of all parts fit one word.
        hits = tl.sum(tl.sum(tl.where(own & (neighbour >= 0), 1 << (tap & 31), 0), 2), 1)
        for part in range(PARTS):
            mine = (hits >> tl.minimum(part * SIZE, 31)) & ((1 << SIZE) - 1)  # the last parts may have no taps
            sort.store_key(keys, counts, masks, mine, row, m, part, run, runs, SIZE, KEY, BINS, PAGE)


@triton.jit
def _tap_at(offset, dilation, SIZE: tl.constexpr):
    """Return the tap of a kernel with ``SIZE`` taps that lies ``offset`` cells from the first one. Also return whether
    there is a tap at that offset.
    """
    tap = offset // dilation
    # Between the taps of a dilated kernel there is none.
    return tap, (offset >= 0) & (tap < SIZE) & (tap * dilation == offset)


@triton.jit(
    do_not_specialize=[
        "status",
        "n",
        "k",
        "width",
        "height",
        "depth",
        "batches",
        "px",
        "py",
        "pz",
        "dx",
        "dy",
        "dz",
        "code",
        "code_twice",
    ]
)
def near_kernel(
    coords,
    table,
    status: tl.int64,
    n,
    k,
    width,
    height,
    depth,
    batches,
    px,
    py,
    pz,
    dx,
    dy,
    dz,
    code,
    code_twice,
    KX: tl.constexpr,
    KY: tl.constexpr,
    KZ: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Write the neighbour table ``[n, k]`` of few voxels among themselves, with rows or -1. Each program compares its
    rows with all voxels. Rows outside the grid and duplicates are reported in a status word, from which the host raises
    ``SL211`` later.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, x, y, z = load_coords(coords, row, row < n)
    good = is_inside(b, x, y, z, width, height, depth, batches)
    report_row(status, code, row, (b != -1) & ~good)
    place = table + row.to(tl.int64)[:, None] * k
    for first in range(0, k, 32):
        tap = first + tl.arange(0, 32)[None, :]
        tl.store(place + tap, -1, mask=(row < n)[:, None] & (tap < k))
    # Other threads of the program write hits into these rows, which must come after the -1.
    tl.debug_barrier()
    if WIDE:
        x, y, z = x.to(tl.int64), y.to(tl.int64), z.to(tl.int64)
    x, y, z = x - px, y - py, z - pz
    for first in range(0, n, OTHERS):
        other = first + tl.arange(0, OTHERS)
        ob, ox, oy, oz = load_coords(coords, other, other < n)
        there = is_inside(ob, ox, oy, oz, width, height, depth, batches)
        tx, in_x = _tap_at(ox[None, :] - x[:, None], dx, KX)
        ty, in_y = _tap_at(oy[None, :] - y[:, None], dy, KY)
        tz, in_z = _tap_at(oz[None, :] - z[:, None], dz, KZ)
        hit = good[:, None] & there[None, :] & (b[:, None] == ob[None, :]) & in_x & in_y & in_z
        tap = ((tx * KY + ty) * KZ + tz).to(tl.int32)
        tl.store(place + tap, other[None, :] + tl.zeros_like(tap), mask=hit)
        own = ((KX // 2) * KY + KY // 2) * KZ + KZ // 2
        # Another row at the central tap lies in the same cell.
        repeated = hit & (tap == own) & (other[None, :] != row[:, None])
        report_row(status, code_twice, row[:, None] + tl.zeros_like(tap), repeated)
