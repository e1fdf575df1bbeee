"""Tables of neighbours, sorted or not, and their transposes in Triton: a hash of the coordinates, then lookups.

Every entry is looked up, also where a submanifold table could be mirrored: neighbouring lookups share cache lines, rows
are written whole, and no two programs write the same place.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.impl import triton_launcher
from shiplap.kernels.sparse3d.coords import MAX_CELLS, output_shape
from shiplap.kernels.sparse3d.cuda import sort, status
from shiplap.kernels.sparse3d.cuda.hash import SLOT_BYTES, find, insert, is_inside, load_coords, report, slots_for

__all__ = ["build_hash", "conv_plan", "conv_table", "subm_plan", "subm_table", "transpose_table"]

OUTSIDE = "coords row {row} is outside spatial_shape (or its grid has 2^63 cells or more)"
TWICE = "duplicate coordinates: row {row} occurs more than once"
OUTPUT_OUTSIDE = "out_coords row {row} is outside the output grid (or that has 2^63 cells or more)"
OUTPUT_TWICE = "duplicate coordinates: out_coords row {row} occurs more than once"
ENTRY = "row {row} has an entry outside [-1, rows)"
ENTRY_TWICE = "an entry of row {row} occurs twice under its tap"

INSERTS = 64  # rows of a program; one warp each, which waits for its own slowest search only
LOOKUPS = 256  # entries of a program


@triton.jit(do_not_specialize=["slots", "n", "width", "height", "depth", "batches", "capacity", "code", "code_twice"])
def insert_kernel(
    coords, slots, status, n, width, height, depth, batches, capacity, code, code_twice, BLOCK: tl.constexpr
):  # fmt: skip
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
        "slots", "table", "keys", "counts", "m", "k", "width", "height", "depth", "width_q", "height_q", "depth_q",
        "batches", "sx", "sy", "sz", "px", "py", "pz", "dx", "dy", "dz", "capacity", "code", "run", "runs",
    ]
)  # fmt: skip
def lookup_kernel(
    queries, slots, table, keys, counts, masks, status, m, k, width, height, depth, width_q, height_q, depth_q,
    batches, sx, sy, sz, px, py, pz, dx, dy, dz, capacity, code, run, runs,
    KY: tl.constexpr, KZ: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, TAPS: tl.constexpr,
    ROWS: tl.constexpr, KEY: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
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


_insert = triton_launcher(insert_kernel)
_lookup = triton_launcher(lookup_kernel)


class Window(NamedTuple):
    """What is looked up: from ``shape`` under the taps of queries in ``grid``."""

    shape: Sequence[int]
    grid: Sequence[int]
    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def wide(self) -> bool:
        """Whether a coordinate under a tap may not fit 32 bits."""
        axes = zip(*self, strict=True)
        return max(max(w, g * s + p + k * d) for w, g, k, s, p, d in axes) >= 2**31


def batches_below(shape: Sequence[int]) -> int:
    """How many scenes of this grid have fewer than 2^63 cells together."""
    return min(2**31 - 1, (MAX_CELLS - 1) // max(1, shape[0] * shape[1] * shape[2]))


def build_hash(op: str, coords: Tensor, shape: Sequence[int], workspace: Tensor, word: int, zeros: int = 0) -> int:
    """Fill the hash at the start of ``workspace`` (``zeros`` bytes behind it are cleared too): its capacity."""
    n = coords.shape[0]
    capacity = slots_for(n)
    used = SLOT_BYTES * capacity + zeros
    if workspace.numel() > 2 * used or workspace.numel() > 1 << 20:
        workspace = workspace[: -(-used // 8) * 8].view(torch.int64)  # wide stores
    workspace.zero_()
    _insert[(-(-n // INSERTS),)](
        coords, workspace.data_ptr(), word, n, *shape, batches_below(shape), capacity, status.code_of(op, OUTSIDE),
        status.code_of(op, TWICE), BLOCK=INSERTS, num_warps=1,
    )  # fmt: skip
    return capacity


def _look_up(
    op: str, coords: Tensor, queries: Tensor, window: Window, table: Tensor, workspace: Tensor, message: str
) -> None:  # fmt: skip
    word, k = status.word(coords.device), table.shape[1]
    if not table.numel():
        return
    if not coords.shape[0]:
        table.fill_(-1)
        return
    capacity = build_hash(op, coords.contiguous(), window.shape, workspace, word)
    _launch(window, queries.contiguous(), capacity, workspace, table.data_ptr(), word, k, status.code_of(op, message))


def _launch(
    window: Window, queries: Tensor, capacity: int, slots: Tensor, table: int, word: int, k: int, code: int,
    form: sort.Form | None = None, keys: int = 0, counts: int = 0, masks: Tensor | None = None,
) -> None:  # fmt: skip
    """Look up all taps, part by part if the table is to be sorted."""
    shape, grid, kernel, stride, padding, dilation = window
    m = queries.shape[0]
    size = form.size if form else min(k, 32)
    taps = triton.next_power_of_2(size)
    rows = LOOKUPS // taps
    run, runs, key, bins = (form.run, form.runs, form.key, form.bins) if form else (1, 1, None, 0)
    _lookup[(-(-m // rows), -(-k // size))](
        queries, slots.data_ptr(), table, keys, counts, masks, word, m, k, *shape, *grid, batches_below(grid), *stride,
        *padding, *dilation, capacity, code, run, runs, KY=kernel[1], KZ=kernel[2], WIDE=window.wide, SIZE=size,
        TAPS=taps, ROWS=rows, KEY=key, BINS=bins, num_warps=1,
    )  # fmt: skip


def _around(shape: list[int], kernel: list[int], dilation: list[int]) -> Window:
    padding = [k // 2 * d for k, d in zip(kernel, dilation, strict=True)]
    return Window(shape, shape, kernel, (1, 1, 1), padding, dilation)


def subm_table(
    coords: Tensor, shape: list[int], kernel: list[int], dilation: list[int], *, out: Tensor, workspace: Tensor
) -> None:
    """See ``ops.subm_table``."""
    _look_up("subm_table", coords, coords, _around(shape, kernel, dilation), out, workspace, OUTSIDE)


def conv_table(
    coords: Tensor, out_coords: Tensor, shape: list[int], kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int], *, out: Tensor, workspace: Tensor,
) -> None:  # fmt: skip
    """See ``ops.conv_table``."""
    grid = output_shape(shape, kernel, stride, padding, dilation)
    window = Window(shape, grid, kernel, stride, padding, dilation)
    _look_up("conv_table", coords, out_coords, window, out, workspace, OUTPUT_OUTSIDE)


def subm_plan(
    coords: Tensor, shape: list[int], kernel: list[int], dilation: list[int], parts: int, run: int, *,
    columns: Tensor, order: Tensor, masks: Tensor, workspace: Tensor,
) -> None:  # fmt: skip
    """See ``planning.subm_plan``: the table lies in the workspace, behind the hash and what sorting needs."""
    word, (k, n) = status.word(coords.device), columns.shape
    if not n:
        return
    coords, form = coords.contiguous(), sort.form_of(n, k, parts, run)
    scratch = SLOT_BYTES * slots_for(n)
    table = scratch + sort.scratch_bytes(n, parts)
    capacity = build_hash("subm_plan", coords, shape, workspace, word, form.zeros)
    base, code = workspace.data_ptr(), status.code_of("subm_plan", OUTSIDE)
    _launch(
        _around(shape, kernel, dilation), coords, capacity, workspace, base + table, word, k, code,
        form, base + scratch + form.keys, base + scratch, masks,
    )  # fmt: skip
    sort.sort_rows(form, base + table, workspace, scratch, n, k, parts, columns, order, masks)


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
    word = status.word(table.device)
    _turn(table.contiguous(), rows, out, word, "transpose_table", ENTRY_TWICE)


def _turn(table: Tensor, rows: int, out: Tensor, word: int, op: str, twice: str) -> None:
    entries = table.numel()
    out.fill_(-1)
    if entries:
        _transpose[(-(-entries // 1024),)](
            table, out, word, entries, table.shape[1], rows, status.code_of(op, ENTRY), status.code_of(op, twice),
            BLOCK=1024, num_warps=4,
        )  # fmt: skip


def conv_plan(
    coords: Tensor, out_coords: Tensor, shape: list[int], kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int], parts: int, parts_t: int, run: int, *, columns: Tensor, order: Tensor, masks: Tensor,
    columns_t: Tensor, order_t: Tensor, masks_t: Tensor, workspace: Tensor,
) -> None:  # fmt: skip
    """See ``planning.conv_plan``. In the workspace: the hash, what sorting needs, then the tables."""
    word, (k, m), n = status.word(coords.device), columns.shape, coords.shape[0]
    if not (m and n):
        _no_hits(columns, order, masks)
        _no_hits(columns_t, order_t, masks_t)
        return
    grid = output_shape(shape, kernel, stride, padding, dilation)
    window, form = Window(shape, grid, kernel, stride, padding, dilation), sort.form_of(m, k, parts, run)
    scratch = SLOT_BYTES * slots_for(n)
    scratch_t = scratch + sort.scratch_bytes(m, parts)
    table = scratch_t + sort.scratch_bytes(n, parts_t)
    capacity = build_hash("conv_plan", coords.contiguous(), shape, workspace, word, form.zeros)
    base, code = workspace.data_ptr(), status.code_of("conv_plan", OUTPUT_OUTSIDE)
    _launch(
        window, out_coords.contiguous(), capacity, workspace, base + table, word, k, code, form,
        base + scratch + form.keys, base + scratch, masks,
    )  # fmt: skip
    sort.sort_rows(form, base + table, workspace, scratch, m, k, parts, columns, order, masks)
    if parts_t:
        tables = workspace[table : table + 4 * k * (m + n)].view(torch.int32)
        back = tables[m * k :]
        _turn(tables[: m * k].view(m, k), n, back, word, "conv_plan", OUTPUT_TWICE)
        sort.sort_at(back.data_ptr(), n, k, parts_t, run, workspace, scratch_t, columns_t, order_t, masks_t)


def _no_hits(columns: Tensor, order: Tensor, masks: Tensor) -> None:
    """The sorted form of a table in which there is nothing."""
    columns.fill_(-1)
    masks.zero_()
    if order.numel():
        order.copy_(torch.arange(order.shape[1], dtype=order.dtype, device=order.device).expand_as(order))
