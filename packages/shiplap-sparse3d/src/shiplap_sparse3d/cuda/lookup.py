"""Rows under the taps of queries, in Triton: the part that all tables share.

Voxels are put into a hash (hash.py) and looked up: kernels of at most three cells per axis block by block, of which a
window meets eight; others tap by tap. Few voxels are compared with each other instead, which takes one launch of three.
Every entry is looked up, also where a submanifold table could be mirrored: neighbouring lookups share cache lines, rows
are written whole, and no two programs write the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.extend import triton_launcher
from shiplap_sparse3d.coords import MAX_CELLS
from shiplap_sparse3d.cuda import sort, status
from shiplap_sparse3d.cuda.hash import (
    SLOT_BYTES,
    find,
    insert,
    is_inside,
    load_coords,
    number_of,
    places,
    report,
    search,
    slots_for,
)

__all__ = ["OUTSIDE", "Target", "Window", "around", "batches_below", "look_up"]

OUTSIDE = "coords row {row} is outside spatial_shape (or its grid has 2^63 cells or more)"
TWICE = "duplicate coordinates: row {row} occurs more than once"

INSERTS = 64  # rows of a program; one warp each, which waits for its own slowest search only
LOOKUPS = 256  # entries of a program
BLOCK_ROWS, BLOCK_WARPS = 8, 1  # queries of a program that looks up blocks, and its warps
NEAR = 1024  # voxels up to here are compared with each other
NEAR_ROWS, NEAR_OTHERS = 4, 256


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
    """Rows of ``coords`` into ``slots``; padding is left out, and so is what lies outside the grid."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, x, y, z = load_coords(coords, row, row < n)
    good = is_inside(b, x, y, z, width, height, depth, batches)
    report(status, code, row, (b != -1) & ~good)
    twin = insert(slots, row, b, x, y, z, good, width, height, depth, capacity)
    report(status, code_twice, row, good & (twin != 0))


@triton.jit
def _under(at, stride, padding, dilation, tap, WIDE: tl.constexpr):
    """``[rows, taps]``: the coordinate under each tap."""
    if WIDE:
        at, tap = at.to(tl.int64), tap.to(tl.int64)
    return (at * stride - padding)[:, None] + (tap * dilation)[None, :]


@triton.jit(
    do_not_specialize=[
        "slots",
        "table",
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
    table: tl.int64,
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
):
    """``table[j, v]``: the row of the hash under tap v of query j; what its sort needs if ``KEY`` is a dtype.

    A program looks up the ``SIZE`` taps of one part.
    """
    part, v = tl.program_id(1), tl.arange(0, TAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, x, y, z = load_coords(queries, row, row < m)
    good = is_inside(b, x, y, z, width_q, height_q, depth_q, batches)
    report(status, code, row, (b != -1) & ~good)
    tap = part * SIZE + v
    x = _under(x, sx, px, dx, tap // (KY * KZ), WIDE)
    y = _under(y, sy, py, dy, tap // KZ % KY, WIDE)
    z = _under(z, sz, pz, dz, tap % KZ, WIDE)
    b, own = b[:, None], ((v < SIZE) & (tap < k))[None, :]
    there = is_inside(b, x, y, z, width, height, depth, 0x80000000) & good[:, None] & own
    x, y, z = x.to(tl.int32), y.to(tl.int32), z.to(tl.int32)
    found = find(slots, b, x, y, z, there, width, height, depth, capacity)
    place = table.to(tl.int64).to(tl.pointer_type(tl.int32)) + row.to(tl.int64)[:, None] * k + tap[None, :]
    tl.store(place, found, mask=(row < m)[:, None] & own)
    if KEY is not None:
        hits = tl.sum((found >= 0).to(tl.int32) << v[None, :], 1)
        sort.store_key(keys, counts, masks, hits, row, m, part, run, runs, SIZE, KEY, BINS)


@triton.jit(
    do_not_specialize=[
        "slots",
        "table",
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
    table: tl.int64,
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
):
    """``lookup_kernel`` for dilation 1 and at most three cells per axis: eight blocks are looked up, then their cells.

    Each tap is one cell of one block.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, x, y, z = load_coords(queries, row, row < m)
    good = is_inside(b, x, y, z, width_q, height_q, depth_q, batches)
    report(status, code, row, (b != -1) & ~good)
    if WIDE:
        x, y, z = x.to(tl.int64), y.to(tl.int64), z.to(tl.int64)
    x, y, z = (x * sx - px)[:, None], (y * sy - py)[:, None], (z * sz - pz)[:, None]
    near = tl.arange(0, 8)[None, :]
    bx, by, bz = (x >> 1) * 2 + (near >> 2) * 2, (y >> 1) * 2 + (near & 2), (z >> 1) * 2 + (near & 1) * 2
    there = is_inside(b[:, None], bx, by, bz, width, height, depth, 0x80000000) & good[:, None]
    number = number_of(b[:, None], bx.to(tl.int32), by.to(tl.int32), bz.to(tl.int32), width, height, depth)
    slot, there = search(slots, number, there, capacity)
    cell = tl.arange(0, 8)[None, None, :]
    cx, cy, cz = cell >> 2, (cell >> 1) & 1, cell & 1
    tx, ty, tz = (bx - x)[:, :, None] + cx, (by - y)[:, :, None] + cy, (bz - z)[:, :, None] + cz
    own = (tx >= 0) & (tx < KX) & (ty >= 0) & (ty < KY) & (tz >= 0) & (tz < KZ)
    found = tl.load(places(slots, slot[:, :, None], cx, cy, cz, capacity), mask=own & there[:, :, None], other=0) - 1
    tap = ((tx * KY + ty) * KZ + tz).to(tl.int32)
    place = table.to(tl.int64).to(tl.pointer_type(tl.int32)) + row.to(tl.int64)[:, None, None] * (KX * KY * KZ) + tap
    tl.store(place, found, mask=own & (row < m)[:, None, None])
    if KEY is not None:
        hits = tl.sum(tl.sum(tl.where(own & (found >= 0), 1 << (tap & 31), 0), 2), 1)
        for part in range(PARTS):
            mine = (hits >> (part * SIZE)) & ((1 << SIZE) - 1)
            sort.store_key(keys, counts, masks, mine, row, m, part, run, runs, SIZE, KEY, BINS)


@triton.jit
def _tap(offset, dilation, SIZE: tl.constexpr):
    """The tap at ``offset`` from the first, and whether it is one."""
    tap = offset // dilation
    return tap, (offset >= 0) & (tap < SIZE) & (tap * dilation == offset)


@triton.jit(
    do_not_specialize=[
        "table",
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
    table: tl.int64,
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
    """The table of voxels among themselves: a program compares its rows with all of them."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, x, y, z = load_coords(coords, row, row < n)
    good = is_inside(b, x, y, z, width, height, depth, batches)
    report(status, code, row, (b != -1) & ~good)
    place = table.to(tl.int64).to(tl.pointer_type(tl.int32)) + row.to(tl.int64)[:, None] * k
    for first in range(0, k, 32):
        tap = first + tl.arange(0, 32)[None, :]
        tl.store(place + tap, -1, mask=(row < n)[:, None] & (tap < k))
    tl.debug_barrier()
    if WIDE:
        x, y, z = x.to(tl.int64), y.to(tl.int64), z.to(tl.int64)
    x, y, z = x - px, y - py, z - pz
    for first in range(0, n, OTHERS):
        other = first + tl.arange(0, OTHERS)
        ob, ox, oy, oz = load_coords(coords, other, other < n)
        there = is_inside(ob, ox, oy, oz, width, height, depth, batches)
        tx, in_x = _tap(ox[None, :] - x[:, None], dx, KX)
        ty, in_y = _tap(oy[None, :] - y[:, None], dy, KY)
        tz, in_z = _tap(oz[None, :] - z[:, None], dz, KZ)
        hit = good[:, None] & there[None, :] & (b[:, None] == ob[None, :]) & in_x & in_y & in_z
        tap = ((tx * KY + ty) * KZ + tz).to(tl.int32)
        tl.store(place + tap, other[None, :] + tl.zeros_like(tap), mask=hit)
        own = ((KX // 2) * KY + KY // 2) * KZ + KZ // 2
        again = hit & (tap == own) & (other[None, :] != row[:, None])
        report(status, code_twice, row[:, None] + tl.zeros_like(tap), again)


_insert = triton_launcher(insert_kernel)
_lookup = triton_launcher(lookup_kernel)
_blocks = triton_launcher(block_kernel)
_near = triton_launcher(near_kernel)


class Window(NamedTuple):
    """What is looked up: from ``shape`` under the taps of queries in ``grid``."""

    shape: Sequence[int]
    grid: Sequence[int]
    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def few_blocks(self) -> bool:
        """Whether the taps of a query lie in eight blocks of the hash."""
        return max(self.kernel) <= 3 and max(self.dilation) == 1

    @property
    def wide(self) -> bool:
        """Whether a coordinate under a tap may not fit 32 bits."""
        _, grid, kernel, stride, padding, dilation = self
        return max(grid) * max(stride) + max(padding) + max(kernel) * max(dilation) >= 2**31


def batches_below(shape: Sequence[int]) -> int:
    """How many scenes of this grid have fewer than 2^63 cells together."""
    return min(2**31 - 1, (MAX_CELLS - 1) // max(1, shape[0] * shape[1] * shape[2]))


def around(shape: list[int], kernel: list[int], dilation: list[int]) -> Window:
    """The window of a submanifold table."""
    padding = [k // 2 * d for k, d in zip(kernel, dilation, strict=True)]
    return Window(shape, shape, kernel, (1, 1, 1), padding, dilation)


class Target(NamedTuple):
    """Where a lookup writes, by address: the table ``[m, k]``, and what its sort needs if ``form`` asks for keys."""

    table: int
    k: int
    form: sort.Form | None = None
    keys: int = 0
    counts: int = 0
    masks: Tensor | None = None


def look_up(
    op: str,
    coords: Tensor,
    queries: Tensor,
    window: Window,
    target: Target,
    word: int,
    message: str,
    workspace: Tensor,
) -> None:
    """Look up all taps of all queries. ``workspace`` starts with the hash; counts, which start as 0, are behind it."""
    form = target.form
    n, keyed = coords.shape[0], form is not None and form.key is not None
    coords = coords.contiguous()
    if queries is coords and n <= NEAR and not keyed:
        shape, _, kernel, _, padding, dilation = window
        _near[(-(-n // NEAR_ROWS),)](
            coords,
            target.table,
            word,
            n,
            target.k,
            *shape,
            batches_below(shape),
            *padding,
            *dilation,
            status.code_of(op, OUTSIDE),
            status.code_of(op, TWICE),
            KX=kernel[0],
            KY=kernel[1],
            KZ=kernel[2],
            WIDE=window.wide,
            ROWS=NEAR_ROWS,
            OTHERS=NEAR_OTHERS,
            num_warps=4,
        )
        return
    capacity = _build_hash(op, coords, window.shape, workspace, word, form.zeros if form else 0)
    launch = _look_up_blocks if window.few_blocks else _look_up_taps
    launch(window, queries.contiguous(), capacity, workspace.data_ptr(), target, word, status.code_of(op, message))


def _build_hash(op: str, coords: Tensor, shape: Sequence[int], workspace: Tensor, word: int, zeros: int) -> int:
    """Fill the hash at the start of ``workspace`` (``zeros`` bytes behind it are cleared too): its capacity."""
    n = coords.shape[0]
    capacity = slots_for(n)
    used = SLOT_BYTES * capacity + zeros
    if workspace.numel() > 2 * used or workspace.numel() > 1 << 20:
        workspace = workspace[: -(-used // 8) * 8].view(torch.int64)  # wide stores
    workspace.zero_()
    _insert[(-(-n // INSERTS),)](
        coords,
        workspace.data_ptr(),
        word,
        n,
        *shape,
        batches_below(shape),
        capacity,
        status.code_of(op, OUTSIDE),
        status.code_of(op, TWICE),
        BLOCK=INSERTS,
        num_warps=1,
    )
    return capacity


def _look_up_blocks(
    window: Window, queries: Tensor, capacity: int, slots: int, target: Target, word: int, code: int
) -> None:
    shape, grid, kernel, stride, padding, _ = window
    table, k, form, keys, counts, masks = target
    m = queries.shape[0]
    size, run, runs, key, bins = (form.size, form.run, form.runs, form.key, form.bins) if form else (k, 1, 1, None, 0)
    _blocks[(-(-m // BLOCK_ROWS),)](
        queries,
        slots,
        table,
        keys,
        counts,
        masks,
        word,
        m,
        *shape,
        *grid,
        batches_below(grid),
        *stride,
        *padding,
        capacity,
        code,
        run,
        runs,
        KX=kernel[0],
        KY=kernel[1],
        KZ=kernel[2],
        WIDE=window.wide,
        SIZE=size,
        PARTS=-(-k // size),
        ROWS=BLOCK_ROWS,
        KEY=key,
        BINS=bins,
        num_warps=BLOCK_WARPS,
    )


def _look_up_taps(
    window: Window, queries: Tensor, capacity: int, slots: int, target: Target, word: int, code: int
) -> None:
    shape, grid, kernel, stride, padding, dilation = window
    table, k, form, keys, counts, masks = target
    m, size = queries.shape[0], form.size if form else min(k, 32)
    taps = sort.pow2(size)
    rows = LOOKUPS // taps
    run, runs, key, bins = (form.run, form.runs, form.key, form.bins) if form else (1, 1, None, 0)
    _lookup[(-(-m // rows), -(-k // size))](
        queries,
        slots,
        table,
        keys,
        counts,
        masks,
        word,
        m,
        k,
        *shape,
        *grid,
        batches_below(grid),
        *stride,
        *padding,
        *dilation,
        capacity,
        code,
        run,
        runs,
        KY=kernel[1],
        KZ=kernel[2],
        WIDE=window.wide,
        SIZE=size,
        TAPS=taps,
        ROWS=rows,
        KEY=key,
        BINS=bins,
        num_warps=1,
    )
