"""Output voxels of a strided convolution in Triton: candidates, a hash set of their keys, a sort of what it kept."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.extend import triton_launcher
from shiplap_sparse3d.coords import output_shape
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.hash import is_inside, load_coords, report
from shiplap_sparse3d.cuda.lookup import OUTSIDE, batches_below

__all__ = ["out_coords", "out_coords_bounded"]

MANY = "more than {row} output voxels, which is the capacity"
BLOCK = 256
NO_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # an empty slot; sorts after every key
LINE = tl.constexpr(2)  # as in hash.py
IN_LINE = tl.constexpr(3)


@triton.jit
def _reached(at, stride, padding, dilation, j, SIZE: tl.constexpr, UNIT: tl.constexpr):
    """The j-th output that ``at`` may reach along an axis, and whether it does. ``UNIT``: dilation 1, few j's."""
    moved = at.to(tl.int64) + padding
    if UNIT:
        out, tap = moved // stride - j, moved % stride + j * stride
        return out, (tap < SIZE) & (out >= 0)
    moved -= j.to(tl.int64) * dilation
    return moved // stride, (moved >= 0) & (moved % stride == 0)


@triton.jit
def _slot(key, mask):
    line = key >> LINE
    h = (line ^ (line >> 32)).to(tl.uint32) * 0x9E3779B1 + (line >> 32).to(tl.uint32) * 0x85EBCA77
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    h = h ^ (h >> 15)
    return ((h << LINE).to(tl.int32) | (key.to(tl.int32) & IN_LINE)) & mask


@triton.jit(
    do_not_specialize=[
        "n",
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
        "mask",
        "limit",
        "capacity",
        "code",
    ]
)
def reach_kernel(
    coords,
    slots,
    keys,
    count,
    status,
    n,
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
    mask,
    limit,
    capacity,
    code,
    KX: tl.constexpr,
    KY: tl.constexpr,
    KZ: tl.constexpr,
    JX: tl.constexpr,
    JY: tl.constexpr,
    JZ: tl.constexpr,
    UNIT: tl.constexpr,
    REACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys of the outputs that a block of inputs reaches: new ones into the set ``slots`` and the list ``keys``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, j = at // REACH, (at % REACH).to(tl.int32)
    b, x, y, z = load_coords(coords, row, row < n)
    good = is_inside(b, x, y, z, width, height, depth, batches)
    report(status, code, row, (b != -1) & ~good)
    x, x_there = _reached(x, sx, px, dx, j // (JY * JZ), KX, UNIT)
    y, y_there = _reached(y, sy, py, dy, j // JZ % JY, KY, UNIT)
    z, z_there = _reached(z, sz, pz, dz, j % JZ, KZ, UNIT)
    good = good & (j < JX * JY * JZ) & x_there & y_there & z_there
    good = good & (x < width_q) & (y < height_q) & (z < depth_q)
    key = ((b.to(tl.int64) * width_q + x) * height_q + y) * depth_q + z
    slots = slots.to(tl.pointer_type(tl.int64))
    slot = _slot(key, mask)
    active, new = good & (tl.load(count) <= capacity), good & False
    step = 0
    while (tl.max(active.to(tl.int32), 0) > 0) & (step <= limit):
        # There is no masked compare-and-swap: who is done compares with what no slot holds.
        old = tl.atomic_cas(slots + slot, tl.where(active, NO_KEY, -1).to(tl.int64), key, sem="relaxed")
        new = new | (active & (old == NO_KEY))
        active = active & (old != NO_KEY) & (old != key)
        slot = tl.where(active, (slot + 1) & mask, slot)
        step += 1
    new = new.to(tl.int32)
    # Whoever found no slot counts as one too many.
    added = tl.sum(new, 0).to(tl.int64) + tl.where(tl.max(active.to(tl.int32), 0) > 0, capacity.to(tl.int64) + 1, 0)
    first = tl.atomic_add(count, added, sem="relaxed")
    place = first + tl.cumsum(new, 0) - 1
    tl.store(keys + place, key, mask=(new > 0) & (place < capacity))


@triton.jit(do_not_specialize=["capacity", "width", "height", "depth", "code"])
def write_kernel(keys, rows_found, count, reached, status, capacity, width, height, depth, code, BLOCK: tl.constexpr):
    """Sorted keys → coordinates, padding behind them; the count as int32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + at, mask=at < capacity, other=NO_KEY)
    there = key != NO_KEY
    place = reached + at.to(tl.int64) * 4
    plane = tl.where(there, key, 0) // depth
    line = plane // height
    tl.store(place + 3, tl.where(there, key - plane * depth, -1).to(tl.int32), mask=at < capacity)
    tl.store(place + 2, tl.where(there, plane - line * height, -1).to(tl.int32), mask=at < capacity)
    tl.store(place + 1, tl.where(there, line % width, -1).to(tl.int32), mask=at < capacity)
    tl.store(place, tl.where(there, line // width, -1).to(tl.int32), mask=at < capacity)
    if tl.program_id(0) == 0:
        total = tl.load(rows_found)
        tl.store(count, tl.minimum(total, capacity).to(tl.int32))
        report(status, code, capacity, total > capacity)


_reach = triton_launcher(reach_kernel)
_write = triton_launcher(write_kernel)


def _candidates(window: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], bool]:
    """Candidate outputs of one input per axis, and whether they are counted from the nearest (dilation 1)."""
    kernel, stride, _, dilation = window
    unit = max(dilation) == 1
    return tuple(-(-k // s) if unit else k for k, s in zip(kernel, stride, strict=True)), unit


def bound(n: int, window: Sequence[Sequence[int]]) -> int:
    """No more outputs than this."""
    kernel, stride, _, dilation = window
    for k, s, d in zip(kernel, stride, dilation, strict=True):
        n *= -(-k // (s // gcd(s, d)))
    return n


def _keys(
    op: str, coords: Tensor, shape: Sequence[int], window: Sequence[Sequence[int]], capacity: int, word: int
) -> tuple[Tensor, Tensor]:
    """Keys of the outputs ``int64 [capacity]`` in any order, ``NO_KEY`` behind them, and how many, ``int64 [1]``."""
    n, grid = coords.shape[0], output_shape(shape, *window)
    (reach, unit), (kernel, stride, padding, dilation) = _candidates(window), window
    most = min(capacity, bound(n, window))
    capacity_of_set = triton.next_power_of_2(max(64, 2 * most))
    room = torch.full((capacity_of_set + capacity + 1,), NO_KEY.value, dtype=torch.int64, device=coords.device)
    slots, keys, count = room[:capacity_of_set], room[capacity_of_set:-1], room[-1:].zero_()
    if n and min(grid) and reach[0] * reach[1] * reach[2]:
        batches = min(batches_below(shape), batches_below(grid))
        lanes = triton.next_power_of_2(reach[0] * reach[1] * reach[2])
        # A set of too few slots is never searched to its end: a long search means that it is full, which is reported.
        limit = capacity_of_set if most < capacity else min(capacity_of_set, 4096)
        _reach[(-(-n * lanes // BLOCK),)](
            coords.contiguous(),
            slots,
            keys,
            count,
            word,
            n,
            *shape,
            *grid,
            batches,
            *stride,
            *padding,
            *dilation,
            capacity_of_set - 1,
            limit,
            capacity,
            status.code_of(op, OUTSIDE),
            KX=kernel[0],
            KY=kernel[1],
            KZ=kernel[2],
            JX=reach[0],
            JY=reach[1],
            JZ=reach[2],
            UNIT=unit,
            REACH=lanes,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return keys, count


def _decode(
    op: str, keys: Tensor, total: Tensor, grid: Sequence[int], word: int, reached: Tensor, count: Tensor
) -> None:
    capacity = keys.shape[0]
    _write[(max(1, -(-capacity // BLOCK)),)](
        keys, total, count, reached, word, capacity, *(max(1, g) for g in grid), status.code_of(op, MANY), BLOCK=BLOCK
    )


def out_coords_bounded(
    coords: Tensor,
    shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    capacity: int,
    *,
    reached: Tensor,
    count: Tensor,
) -> None:
    """See ``bounded.out_coords_bounded``."""
    op, window, word = "out_coords_bounded", (kernel, stride, padding, dilation), status.word(coords.device)
    keys, total = _keys(op, coords, shape, window, capacity, word)
    _decode(op, keys.sort()[0], total, output_shape(shape, *window), word, reached, count)


def out_coords(
    coords: Tensor, shape: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """See ``ops.out_coords``: reads back how many there are, and tries again where there are more than inputs.

    It reads back before it sorts: fewer keys are sorted, and the device is not idle while the next ops are launched.
    """
    op, window, word = "out_coords", (kernel, stride, padding, dilation), status.word(coords.device)
    most = bound(coords.shape[0], window)
    capacity = min(most, max(1024, coords.shape[0]))
    keys, total = _keys(op, coords, shape, window, capacity, word)
    m = int(total)
    if m > capacity:
        keys, total = _keys(op, coords, shape, window, most, word)
        m = int(total)
    reached, count = coords.new_empty(m, 4), coords.new_empty(1)
    _decode(op, keys[:m].sort()[0], total, output_shape(shape, *window), word, reached, count)
    return reached
