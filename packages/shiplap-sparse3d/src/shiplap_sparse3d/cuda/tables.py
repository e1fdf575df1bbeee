"""Tables of neighbours, sorted or not, and their transposes, on CUDA: lookups (lookup.py), then sorts (sort.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.extend import triton_launcher
from shiplap_sparse3d.coords import output_shape
from shiplap_sparse3d.cuda import sort, status
from shiplap_sparse3d.cuda.hash import SLOT_BYTES, report, slots_for
from shiplap_sparse3d.cuda.lookup import OUTSIDE, Target, Window, around, look_up

__all__ = ["conv_plan", "conv_table", "subm_plan", "subm_table", "transpose_table"]

OUTPUT_OUTSIDE = "out_coords row {row} is outside the output grid (or that has 2^63 cells or more)"
OUTPUT_TWICE = "duplicate coordinates: out_coords row {row} occurs more than once"
ENTRY = "row {row} has an entry outside [-1, rows)"
ENTRY_TWICE = "an entry of row {row} occurs twice under its tap"


def subm_table(
    coords: Tensor, shape: list[int], kernel: list[int], dilation: list[int], *, out: Tensor, workspace: Tensor
) -> None:
    """See ``ops.subm_table``."""
    word = status.word(coords.device)
    if out.numel():
        coords, target = coords.contiguous(), Target(out.data_ptr(), out.shape[1])
        look_up("subm_table", coords, coords, around(shape, kernel, dilation), target, word, OUTSIDE, workspace)


def conv_table(
    coords: Tensor,
    out_coords: Tensor,
    shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    *,
    out: Tensor,
    workspace: Tensor,
) -> None:
    """See ``ops.conv_table``."""
    word = status.word(coords.device)
    if not coords.shape[0]:
        out.fill_(-1)
    elif out.numel():
        window = Window(
            shape, output_shape(shape, kernel, stride, padding, dilation), kernel, stride, padding, dilation
        )
        target = Target(out.data_ptr(), out.shape[1])
        look_up("conv_table", coords, out_coords, window, target, word, OUTPUT_OUTSIDE, workspace)


def subm_plan(
    coords: Tensor,
    shape: list[int],
    kernel: list[int],
    dilation: list[int],
    parts: int,
    run: int,
    *,
    columns: Tensor,
    order: Tensor,
    masks: Tensor,
    workspace: Tensor,
) -> None:
    """See ``planning.subm_plan``: the table lies in the workspace, behind the hash and what sorting needs."""
    word, (k, n) = status.word(coords.device), columns.shape
    if not n:
        return
    coords, form = coords.contiguous(), sort.form_of(n, k, parts, run)
    scratch = SLOT_BYTES * slots_for(n)
    base = workspace.data_ptr()
    table, at = base + scratch + sort.scratch_bytes(n, parts), base + scratch
    target = Target(table, k, form, at + form.keys, at, masks)
    look_up("subm_plan", coords, coords, around(shape, kernel, dilation), target, word, OUTSIDE, workspace)
    sort.sort_rows(form, table, workspace, scratch, n, k, parts, columns, order, masks)


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
            table,
            out,
            word,
            entries,
            table.shape[1],
            rows,
            status.code_of(op, ENTRY),
            status.code_of(op, twice),
            BLOCK=1024,
            num_warps=4,
        )


def conv_plan(
    coords: Tensor,
    out_coords: Tensor,
    shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    parts: int,
    parts_t: int,
    run: int,
    *,
    columns: Tensor,
    order: Tensor,
    masks: Tensor,
    columns_t: Tensor,
    order_t: Tensor,
    masks_t: Tensor,
    workspace: Tensor,
) -> None:
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
    table, base = scratch_t + sort.scratch_bytes(n, parts_t), workspace.data_ptr()
    target = Target(base + table, k, form, base + scratch + form.keys, base + scratch, masks)
    look_up("conv_plan", coords, out_coords, window, target, word, OUTPUT_OUTSIDE, workspace)
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
