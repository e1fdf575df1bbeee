"""Rows by coordinate: an open-addressing hash table in one int32 a slot, built and read by Triton kernels.

A slot holds ``fingerprint << row_bits | row``, or -1. Linear probing, and the larger value always takes the slot
(``atomic_max``) while the smaller one moves on: the table ends the same whatever the order of the threads, and a search
stops at the first slot whose fingerprint is smaller than its own. Rows are compared by their coordinates, so keys have
no width and equal fingerprints do no harm. Capacity is at least twice the number of rows, and probes are bounded by it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["find", "insert", "is_inside", "load_coords", "report"]

LINE = tl.constexpr(2)  # log2 of the neighbours along z that lie side by side: they share a memory sector
IN_LINE = tl.constexpr(3)  # 2**LINE - 1
STATUS_BITS = tl.constexpr(40)  # status.ROW_BITS


@triton.jit
def load_coords(coords, row, mask):
    """The four columns of ``row``; padding where ``mask`` is off."""
    at = coords + row.to(tl.int64) * 4
    b = tl.load(at, mask=mask, other=-1)
    x = tl.load(at + 1, mask=mask, other=-1)
    y = tl.load(at + 2, mask=mask, other=-1)
    z = tl.load(at + 3, mask=mask, other=-1)
    return b, x, y, z


@triton.jit
def is_inside(b, x, y, z, width, height, depth, batches):
    return (b >= 0) & (b < batches) & (x >= 0) & (x < width) & (y >= 0) & (y < height) & (z >= 0) & (z < depth)


@triton.jit
def report(status, code, row, bad):
    """One word to the host, where there is something to tell."""
    at = status.to(tl.int64).to(tl.pointer_type(tl.int64)) + row * 0
    tl.store(at, (code.to(tl.int64) << STATUS_BITS) | row.to(tl.int64), mask=bad)


@triton.jit
def _mixed(b, x, y, z):
    """A hash of the line of cells."""
    h = b.to(tl.uint32) * 0x9E3779B1 + x.to(tl.uint32) * 0x85EBCA77 + y.to(tl.uint32) * 0xC2B2AE3D
    h += (z >> LINE).to(tl.uint32) * 0x27D4EB2F
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def _home(h, z, mask):
    """The first slot to look at."""
    return ((h << LINE).to(tl.int32) | (z & IN_LINE)) & mask


@triton.jit
def _fingerprint(h, z, row_bits):
    """What fits above the row in 31 bits; neighbours in a line differ."""
    return (((h >> 1) + z.to(tl.uint32) * 0x3C6EF35F) & 0x7FFFFFFF).to(tl.int32) >> row_bits


@triton.jit
def insert(slots, row, b, x, y, z, active, row_bits, mask):
    """Put the ``active`` rows in; ``mask`` is the capacity - 1."""
    h = _mixed(b, x, y, z)
    at, value = _home(h, z, mask), (_fingerprint(h, z, row_bits) << row_bits) | row
    step = 0
    while (tl.max(active.to(tl.int32), 0) > 0) & (step <= mask):
        old = tl.atomic_max(slots + at, value, mask=active, sem="relaxed")
        active = active & (old != -1)
        value = tl.minimum(value, old)  # the larger one stays
        at = (at + 1) & mask
        step += 1


@triton.jit
def find(slots, coords, b, x, y, z, active, row_bits, mask):
    """``[rows, taps]``: the row with these coordinates, of several the last one, or -1."""
    h = _mixed(b, x, y, z)
    at, wanted = _home(h, z, mask), _fingerprint(h, z, row_bits)
    found = tl.where(active, -1, -1)
    step = 0
    while (tl.max(tl.max(active.to(tl.int32), 1), 0) > 0) & (step <= mask):
        slot = tl.load(slots + at, mask=active, other=-1)
        fingerprint = slot >> row_bits
        row = slot - (fingerprint << row_bits)
        likely = active & (fingerprint == wanted)
        rb, rx, ry, rz = load_coords(coords, row, likely)
        same = likely & (rb == b) & (rx == x) & (ry == y) & (rz == z)
        found = tl.where(same, row, found)
        active = active & (fingerprint >= wanted) & ~same
        at = (at + 1) & mask
        step += 1
    return found
