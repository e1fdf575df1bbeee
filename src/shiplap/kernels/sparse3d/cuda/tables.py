"""``subm_table``, ``conv_table`` and ``transpose_table`` in Triton: a hash of the coordinates, then lookups.

Every entry is looked up, also where a submanifold table could be mirrored: neighbouring lookups share cache lines, rows
are written whole, and no two programs write the same place.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from shiplap.impl import triton_launcher
from shiplap.kernels.sparse3d.coords import MAX_CELLS, output_shape
from shiplap.kernels.sparse3d.cuda import status
from shiplap.kernels.sparse3d.cuda.hash import find, insert, is_inside, load_coords, report

__all__ = ["build_hash", "conv_table", "subm_table", "transpose_table"]

OUTSIDE = "coords row {row} is outside spatial_shape (or its grid has 2^63 cells or more)"
TWICE = "duplicate coordinates: row {row} occurs more than once"
OUTPUT_OUTSIDE = "out_coords row {row} is outside the output grid (or that has 2^63 cells or more)"
ENTRY = "row {row} has an entry outside [-1, rows)"
ENTRY_TWICE = "an entry of row {row} occurs twice under its tap"

INSERT_BLOCK = 256
LOOKUPS = 512  # entries of a table that one program looks up
LOOKUP_WARPS = 2


@triton.jit(do_not_specialize=["n", "width", "height", "depth", "batches", "row_bits", "mask", "code"])
def insert_kernel(
    coords, slots, status, n, width, height, depth, batches, row_bits, mask, code, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows of ``coords`` into ``slots``; padding is left out, and so is what lies outside the grid."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, x, y, z = load_coords(coords, row, row < n)
    good = is_inside(b, x, y, z, width, height, depth, batches)
    report(status, code, row, (b != -1) & ~good)
    insert(slots.to(tl.pointer_type(tl.int32)), row, b, x, y, z, good, row_bits, mask)


@triton.jit
def _under(at, stride, padding, dilation, tap, SUBM: tl.constexpr):
    """``[rows, taps]``: the coordinate under each tap, in 64 bit since dilations are not bounded."""
    at = at.to(tl.int64)
    return ((at if SUBM else at * stride) - padding)[:, None] + (tap.to(tl.int64) * dilation)[None, :]


@triton.jit(
    do_not_specialize=[
        "n", "m", "width", "height", "depth", "width_q", "height_q", "depth_q", "batches", "sx", "sy", "sz",
        "px", "py", "pz", "dx", "dy", "dz", "row_bits", "mask", "code", "k",
    ]
)  # fmt: skip
def lookup_kernel(
    coords, queries, slots, table, status, n, m, width, height, depth, width_q, height_q, depth_q, batches,
    sx, sy, sz, px, py, pz, dx, dy, dz, row_bits, mask, code,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr, SUBM: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """``table[j, v]``: the row of ``coords`` under tap v of query j. A submanifold query finds itself, or its twin."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, x, y, z = load_coords(queries, row, row < m)
    good = is_inside(b, x, y, z, width_q, height_q, depth_q, batches)
    if not SUBM:
        report(status, code, row, (b != -1) & ~good)
    tap = tl.program_id(1) * TAPS + tl.arange(0, TAPS)
    x = _under(x, sx, px, dx, tap // (KY * KZ), SUBM)
    y = _under(y, sy, py, dy, tap // KZ % KY, SUBM)
    z = _under(z, sz, pz, dz, tap % KZ, SUBM)
    K: tl.constexpr = KX * KY * KZ
    b = b[:, None]
    there = is_inside(b, x, y, z, width, height, depth, 0x80000000) & good[:, None] & (tap < K)[None, :]
    found = find(
        slots.to(tl.pointer_type(tl.int32)), coords, b, x.to(tl.int32), y.to(tl.int32), z.to(tl.int32), there,
        row_bits, mask,
    )  # fmt: skip
    tl.store(table + row.to(tl.int64)[:, None] * K + tap[None, :], found, mask=(row < m)[:, None] & (tap < K)[None, :])
    if SUBM:
        CENTRE: tl.constexpr = ((KX // 2) * KY + KY // 2) * KZ + KZ // 2
        twin = there & (tap == CENTRE)[None, :] & (found != row[:, None])
        report(status, code, row[:, None] + tap[None, :] * 0, twin)


@triton.jit(do_not_specialize=["n", "width", "height", "depth", "batches", "row_bits", "mask", "code"])
def twins_kernel(
    coords, slots, status, n, width, height, depth, batches, row_bits, mask, code, BLOCK: tl.constexpr
):  # fmt: skip
    """Reports rows of which there is a later copy: they find that one."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, x, y, z = load_coords(coords, row, row < n)
    there = is_inside(b, x, y, z, width, height, depth, batches)[:, None]
    b, x, y, z = b[:, None], x[:, None], y[:, None], z[:, None]
    found = find(slots.to(tl.pointer_type(tl.int32)), coords, b, x, y, z, there, row_bits, mask)
    report(status, code, row[:, None], there & (found != row[:, None]))


_twins = triton_launcher(twins_kernel)
_insert = triton_launcher(insert_kernel)
_lookup = triton_launcher(lookup_kernel)


def batches_below(shape: Sequence[int]) -> int:
    """How many scenes of this grid have fewer than 2^63 cells together."""
    return min(2**31 - 1, (MAX_CELLS - 1) // max(1, shape[0] * shape[1] * shape[2]))


def build_hash(op: str, coords: Tensor, shape: Sequence[int], slots: Tensor, word: int) -> tuple[int, int]:
    """Fill ``slots`` (uint8, a power of two of int32) from ``coords``: ``(row_bits, capacity - 1)``."""
    n = coords.shape[0]
    row_bits, mask = max(1, (n - 1).bit_length()), slots.numel() // 4 - 1
    slots.fill_(255)
    _insert[(-(-n // INSERT_BLOCK),)](
        coords, slots, word, n, *shape, batches_below(shape), row_bits, mask, status.code_of(op, OUTSIDE),
        BLOCK=INSERT_BLOCK, num_warps=4,
    )  # fmt: skip
    return row_bits, mask


def _look_up(
    op: str, coords: Tensor, queries: Tensor, slots: Tensor, table: Tensor, shape: Sequence[int],
    grid: Sequence[int], window: Sequence[Sequence[int]], subm: bool,
) -> None:  # fmt: skip
    kernel, stride, padding, dilation = window
    word, (n, m) = status.word(coords.device), (coords.shape[0], queries.shape[0])
    if not table.numel():
        return
    if not n:
        table.fill_(-1)
        return
    coords, queries = coords.contiguous(), queries.contiguous()
    row_bits, mask = build_hash(op, coords, shape, slots, word)
    if not subm:
        _twins[(-(-n // INSERT_BLOCK),)](
            coords, slots, word, n, *shape, batches_below(shape), row_bits, mask, status.code_of(op, TWICE),
            BLOCK=INSERT_BLOCK, num_warps=4,
        )  # fmt: skip
    taps = min(32, triton.next_power_of_2(table.shape[1]))
    rows = LOOKUPS // taps
    _lookup[(-(-m // rows), -(-table.shape[1] // taps))](
        coords, queries, slots, table, word, n, m, *shape, *grid, batches_below(grid), *stride, *padding, *dilation,
        row_bits, mask, status.code_of(op, TWICE if subm else OUTPUT_OUTSIDE),
        KX=kernel[0], KY=kernel[1], KZ=kernel[2], SUBM=subm, ROWS=rows, TAPS=taps, num_warps=LOOKUP_WARPS,
    )  # fmt: skip


def subm_table(
    coords: Tensor, shape: list[int], kernel: list[int], dilation: list[int], *, out: Tensor, workspace: Tensor
) -> None:
    """See ``ops.subm_table``."""
    padding = [k // 2 * d for k, d in zip(kernel, dilation, strict=True)]
    window = kernel, (1, 1, 1), padding, dilation
    _look_up("subm_table", coords, coords, workspace, out, shape, shape, window, True)


def conv_table(
    coords: Tensor, out_coords: Tensor, shape: list[int], kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int], *, out: Tensor, workspace: Tensor,
) -> None:  # fmt: skip
    """See ``ops.conv_table``."""
    window = kernel, stride, padding, dilation
    grid = output_shape(shape, *window)
    _look_up("conv_table", coords, out_coords, workspace, out, shape, grid, window, False)


@triton.jit(do_not_specialize=["entries", "k", "rows", "code", "code_twice"])
def transpose_kernel(table, out, status, entries, k, rows, code, code_twice, BLOCK: tl.constexpr):
    """``out[table[j, v], v] = j``; of two such j the larger one stays."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(table + at, mask=at < entries, other=-1)
    row = at // k
    good = (entry >= 0) & (entry < rows)
    old = tl.atomic_max(out + entry.to(tl.int64) * k + at % k, row.to(tl.int32), mask=good, sem="relaxed")
    report(status, code, row, (entry < -1) | (entry >= rows))
    report(status, code_twice, row, good & (old != -1))


_transpose = triton_launcher(transpose_kernel)


def transpose_table(table: Tensor, rows: int, *, out: Tensor) -> None:
    """See ``ops.transpose_table``."""
    word, entries = status.word(table.device), table.numel()
    out.fill_(-1)
    if entries:
        _transpose[(-(-entries // 1024),)](
            table.contiguous(), out, word, entries, table.shape[1], rows, status.code_of("transpose_table", ENTRY),
            status.code_of("transpose_table", ENTRY_TWICE), BLOCK=1024, num_warps=4,
        )  # fmt: skip
