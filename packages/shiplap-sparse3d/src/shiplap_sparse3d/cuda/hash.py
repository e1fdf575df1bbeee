"""Rows by coordinate: a hash table of blocks of 2 x 2 x 2 cells, built and read by Triton kernels.

A slot has the number of a block and, in another array, the rows of its eight cells. The neighbours of a voxel lie in
few blocks, so most reads of a kernel window share memory sectors. Numbers are exact, so rows need not be compared.
There are two slots for each row, with linear probing. The slot of a block depends on the order of the threads; the rows
found in it do not. Numbers and rows are stored + 1, so that 0 means empty and a table of zeros is an empty table.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "SLOT_BYTES",
    "cell_addresses",
    "find_rows",
    "first_slot",
    "insert_rows",
    "is_inside",
    "load_coords",
    "number_of",
    "report_row",
    "search_blocks",
]

SLOT_BYTES = 40  # int64, and eight of int32
STATUS_BITS = tl.constexpr(40)  # status.ROW_BITS


@triton.jit
def load_coords(coords, row, mask):
    """Return the columns (scene, x, y, z) of each ``row`` of ``coords``, or padding (-1) where ``mask`` is false."""
    at = coords + row.to(tl.int64) * 4
    b = tl.load(at, mask=mask, other=-1)
    x = tl.load(at + 1, mask=mask, other=-1)
    y = tl.load(at + 2, mask=mask, other=-1)
    z = tl.load(at + 3, mask=mask, other=-1)
    return b, x, y, z


@triton.jit
def is_inside(b, x, y, z, width, height, depth, batches):
    """Return whether each voxel lies in one of ``batches`` scenes and in the grid of ``width`` x ``height`` x ``depth``
    cells.
    """
    return (b >= 0) & (b < batches) & (x >= 0) & (x < width) & (y >= 0) & (y < height) & (z >= 0) & (z < depth)


@triton.jit
def report_row(status, code, row, bad):
    """Write ``code`` and one of the rows where ``bad`` is true, if there is one, to the 64-bit word at the address
    ``status``. The host raises an error from this word later.
    """
    # Any one of several bad rows may win: an error names one row.
    at = status.to(tl.int64).to(tl.pointer_type(tl.int64)) + row * 0
    tl.store(at, (code.to(tl.int64) << STATUS_BITS) | row.to(tl.int64), mask=bad)


@triton.jit
def _half_size(size):
    """Return ``size / 2``, rounded up. This is the number of blocks of 2 x 2 x 2 cells along an axis of ``size``
    cells.
    """
    return (size >> 1) + (size & 1)


@triton.jit
def number_of(b, x, y, z, width, height, depth):
    """Return the number, from 1 on, of the block of 2 x 2 x 2 cells that contains each cell. It is the key in the hash,
    where 0 is an empty slot.
    """
    # From 1, since 0 is an empty slot.
    line = (b.to(tl.int64) * _half_size(width) + (x >> 1)) * _half_size(height) + (y >> 1)
    return line * _half_size(depth) + (z >> 1) + 1


@triton.jit
def first_slot(number, capacity):
    """Return the slot of the hash, below ``capacity``, at which the search for the block with this ``number`` begins. A
    block is 2 x 2 x 2 cells.
    """
    h = number.to(tl.uint32) * 0x9E3779B1 + (number >> 32).to(tl.uint32) * 0x85EBCA77
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    # A multiplication maps the hash to a slot without a division.
    return tl.umulhi(h ^ (h >> 15), capacity)


@triton.jit
def cell_addresses(slots, slot, x, y, z, capacity):
    """Return the addresses of the row numbers (+ 1) of cells in the hash at the address ``slots``. Slot ``slot`` has
    eight of them, one for each cell of a block of 2 x 2 x 2 cells, and (x, y, z) selects one.
    """
    rows = (slots.to(tl.int64) + capacity.to(tl.int64) * 8).to(tl.pointer_type(tl.int32))
    return rows + slot.to(tl.int64) * 8 + ((x & 1) * 4 + (y & 1) * 2 + (z & 1))


@triton.jit
def insert_rows(slots, row, b, x, y, z, active, width, height, depth, capacity):
    """Insert the ``active`` rows into the hash of blocks at the address ``slots``. Return, for each row, the number + 1
    of a row that had its cell before, or 0 if there was none. Of several rows with the same coordinates the last one
    remains.
    """
    # Launch programs pass addresses of the workspace as integers.
    entries, capacity = slots.to(tl.int64).to(tl.pointer_type(tl.int64)), capacity.to(tl.uint32)
    number, wanting = number_of(b, x, y, z, width, height, depth), active
    slot = first_slot(number, capacity)
    while tl.max(wanting.to(tl.int32), 0) > 0:
        # There is no masked compare-and-swap: who is done compares with what no slot holds.
        old = tl.atomic_cas(entries + slot, tl.where(wanting, 0, -1).to(tl.int64), number, sem="relaxed")
        wanting = wanting & (old != 0) & (old != number)
        slot = tl.where(wanting, tl.where(slot + 1 == capacity, 0, slot + 1), slot)
    # The maximum does not depend on the order of threads, as the last write would.
    return tl.atomic_max(cell_addresses(slots, slot, x, y, z, capacity), row + 1, mask=active, sem="relaxed")


@triton.jit
def search_blocks(slots, number, active, capacity, WORDS: tl.constexpr = 1):
    """Return the hash slots of the blocks with the given ``number``, and whether each block exists, both ``[rows,
    blocks]``. Only ``active`` blocks are searched. A slot has ``WORDS`` 64-bit words, of which the first is the block's
    number.
    """
    slots, capacity = slots.to(tl.int64).to(tl.pointer_type(tl.int64)), capacity.to(tl.uint32)
    slot, searching, there = first_slot(number, capacity), active, active & False
    while tl.max(tl.max(searching.to(tl.int32), 1), 0) > 0:
        seen = tl.load(slots + slot.to(tl.int64) * WORDS, mask=searching, other=0)
        # A search ends at the number or at an empty slot. Half of the slots are empty, so probes are short.
        there = there | (searching & (seen == number))
        searching = searching & (seen != 0) & (seen != number)
        slot = tl.where(searching, tl.where(slot + 1 == capacity, 0, slot + 1), slot)
    return slot, there


@triton.jit
def find_rows(slots, b, x, y, z, active, width, height, depth, capacity):
    """Return the row of the voxel at each cell (b, x, y, z), ``[rows, taps]``, found in the hash at the address
    ``slots``. It is -1 if there is none or ``active`` is false.
    """
    slot, there = search_blocks(slots, number_of(b, x, y, z, width, height, depth), active, capacity)
    return tl.load(cell_addresses(slots, slot, x, y, z, capacity), mask=there, other=0) - 1
