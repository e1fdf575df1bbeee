"""Convolutions onto given voxels by any offsets: the tables that need no grid.

Rows have a scene and any number of coordinates, which may be negative. A row whose scene is -1 is padding. The input
row under tap ``v`` of output ``o`` is the one at ``o * stride + offsets[v]``. Stride, transpose, masks, unions,
pooling, shuffles and sampling are such tables; those of boxes in a grid of up to three axes are those of ``ops.py``,
whose kernels are faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal

import torch
from jaxtyping import Int32
from torch import Tensor

import shiplap as sl
from shiplap.plugin_api import error
from shiplap.plugin_api.compiling import assert_in_graph
from shiplap.plugin_api.memos import built_outside_modes
from shiplap_sparse3d.coords import RowLookup, refuse_rows, runs_without_python
from shiplap_sparse3d.ops import distinct_voxels, transpose_table
from shiplap_sparse3d.plan import Plan

__all__ = ["box_offsets", "connect_by_offsets", "offset_cells", "offset_table"]

_STEP = ("d >= 1", "len(stride) == d", "min(stride) >= 1", "stride[0] == 1")
_INT32 = torch.iinfo(torch.int32)


def _tap_targets(rows: Tensor, offsets: Tensor, stride: Sequence[int]) -> Tensor:
    """Return ``row * stride + offset`` for each of ``rows [n, d]`` and each of ``offsets [k, d]``, as ``int64 [n * k,
    d]``. The ``k`` results of a row follow each other. They are -1 if the row is padding (-1).
    """
    moved = (rows.long() * torch.tensor(stride, device=rows.device))[:, None] + offsets.long()
    # Padding that moved could equal the coordinates of a voxel.
    return torch.where((rows[:, :1] == -1)[:, None], -1, moved).flatten(0, 1)


def _refuse_repeats(op: str, find: RowLookup, rows: int) -> None:
    """Raise ``SL211`` if a row of coordinates occurs more than once. ``find`` is the lookup of these rows, and ``rows``
    is their number. ``op`` is the op's name in the error.
    """
    twins = torch.zeros(rows, dtype=torch.bool, device=find.rows.device)
    twins[find.repeats()] = True
    refuse_rows(op, twins, "duplicate coordinates: row {row} occurs more than once")


@sl.op("sparse3d::offset_table", requires=_STEP, tags=torch.Tag.cudagraph_unsafe)  # it raises for equal rows
def offset_table(
    coords: Int32[Tensor, "n d"], outputs: Int32[Tensor, "m d"], offsets: Int32[Tensor, "k d"], stride: list[int]
) -> Int32[Tensor, "m k"]:
    """Return the number of the row of ``coords`` that equals ``outputs * stride + offsets``, for each output and each
    offset, as ``int32 [m, k]``. It is -1 if there is none. ``outputs`` may have equal rows. Raise ``SL211`` for
    duplicate rows of ``coords``.

    A row whose first number is -1 is padding, and has no neighbours. ``stride`` has one number for each column.
    """
    table, repeated = _match_rows(coords, outputs, offsets, stride)
    refuse_rows("offset_table", repeated, "duplicate coordinates: row {row}")
    return table


def _match_rows(coords: Tensor, outputs: Tensor, offsets: Tensor, stride: list[int]) -> tuple[Tensor, Tensor]:
    """Return ``(table, repeated)``. ``table[o, v]`` is the number of the row of ``coords`` that equals ``outputs[o] *
    stride + offsets[v]``, or -1, as ``int32 [m, k]``. ``repeated`` is the mask ``bool [n]`` that is true for all but
    one of equal rows of ``coords``.
    """
    # Whole rows are compared, so that no number of columns or range of values is too large.
    n, taps = coords.shape[0], outputs.shape[0] * offsets.shape[0]
    every = torch.cat([coords.long(), _tap_targets(outputs, offsets, stride)])
    distinct, number = torch.unique(every, dim=0, return_inverse=True)
    here, voxels = torch.arange(n, device=coords.device), coords[:, 0] != -1
    # Padding is entered behind the distinct rows, where no target is.
    at = torch.where(voxels, number.narrow(0, 0, n), distinct.shape[0])
    row_of = here.new_full((distinct.shape[0] + 1,), -1).scatter(0, at, here)
    table = row_of[number.narrow(0, n, taps)].view(outputs.shape[0], offsets.shape[0]).int()
    return table, voxels & (row_of[at] != here)


def rows_at(coords: Tensor, outputs: Tensor, offsets: Tensor, stride: list[int]) -> Tensor:
    """Return ``int32 [m, k]``, for each of the ``m`` voxels ``outputs`` and each of the ``k`` ``offsets`` the number of
    the row of ``coords`` that equals ``output * stride + offset``. The number is -1 if there is no such row.

    The op ``offset_table`` computes the numbers. A program that is being exported gets operators of torch instead. Both
    raise ``SL211`` for duplicate rows of ``coords``.
    """
    if not runs_without_python(coords):
        return offset_table(coords, outputs, offsets, stride)
    table, repeated = _match_rows(coords, outputs, offsets, stride)
    assert_in_graph(~repeated.any(), "SL211: duplicate coordinates")
    return table


def _offset_table(coords: Tensor, outputs: Tensor, offsets: Tensor, stride: list[int]) -> Tensor:
    """Compute the op ``offset_table`` with sorted keys, as its kernel for CPU and CUDA. Return the table ``int32 [m,
    k]`` of the rows of ``coords`` at ``outputs * stride + offsets``, or -1 if there is none. Raise ``SL211`` for
    duplicate rows of ``coords``.
    """
    find = RowLookup(coords)
    _refuse_repeats("offset_table", find, coords.shape[0])
    columns = [find(_tap_targets(outputs, tap[None], stride)) for tap in offsets]
    return torch.stack(columns, 1) if columns else offsets.new_empty(outputs.shape[0], 0)


@sl.op(
    "sparse3d::offset_cells",
    bounds={"m": "n * k"},
    requires=(*_STEP, "len(low) == d", "len(high) == d", "low[0] >= 0"),
)
def offset_cells(
    coords: Int32[Tensor, "n d"],
    offsets: Int32[Tensor, "k d"],
    stride: list[int],
    low: list[int],
    high: list[int],
    transposed: bool = False,
) -> Int32[Tensor, "m d"]:
    """Return the distinct outputs that an input reaches, ascending. They are the integer rows with ``coords = output *
    stride + offset`` for one of ``offsets``. If ``transposed``, they are ``output = coords * stride + offset``. Outputs
    lie in ``[low, high)`` in each column.

    An input is a row of ``coords``. Rows whose first number is -1 are padding, and reach nothing. ``stride`` has one
    number for each column.
    """
    reached = [coords.long().new_empty(0, coords.shape[1])]
    step = torch.tensor(stride, device=coords.device)
    bounds = torch.tensor([low, high], device=coords.device)
    wide = coords[coords[:, 0] != -1].long()
    for tap in offsets.long():
        moved = wide * step + tap if transposed else wide - tap
        outputs = moved if transposed else torch.div(moved, step, rounding_mode="floor")
        # An output exists where the division by the stride has no remainder.
        whole = torch.ones_like(outputs[:, 0], dtype=torch.bool) if transposed else (outputs * step == moved).all(1)
        reached.append(outputs[whole & (outputs >= bounds[0]).all(1) & (outputs < bounds[1]).all(1)])
    candidates = torch.cat(reached)
    return (torch.unique(candidates, dim=0) if candidates.shape[0] else candidates).int()


def _reached(
    coords: Tensor, offsets: Tensor, stride: list[int], low: list[int], high: list[int], transposed: bool
) -> Tensor:
    """Return the outputs in ``[low, high)`` that the inputs ``coords`` reach by ``offsets``, as ``int32 [m, d]``, in
    the order of inputs and offsets. An output that several inputs reach is repeated. If ``transposed`` is true, outputs
    lie at ``input * stride + offset``, and otherwise inputs lie at ``output * stride + offset``.
    """
    step, wide = torch.tensor(stride, device=coords.device), coords[coords[:, 0] != -1].long()[:, None]
    moved = wide * step + offsets.long() if transposed else wide - offsets.long()
    outputs = moved if transposed else torch.div(moved, step, rounding_mode="floor")
    bounds = torch.tensor([low, high], device=coords.device)
    inside = ((outputs >= bounds[0]) & (outputs < bounds[1])).all(2)
    return outputs[inside if transposed else inside & (outputs * step == moved).all(2)].int()


def _offset_cells(
    coords: Tensor, offsets: Tensor, stride: list[int], low: list[int], high: list[int], transposed: bool = False
) -> Tensor:
    """Compute the op ``offset_cells`` with sorted keys, as its kernel for CPU and CUDA. The arguments are those of the
    op. Return the distinct outputs within the bounds that an input reaches, ``int32 [m, d]``, in ascending order.
    """
    candidates = _reached(coords, offsets, stride, low, high, transposed)
    find = RowLookup(candidates)
    # The sorted keys of equal rows are equal, and those of ascending rows ascend.
    fresh = torch.ones_like(find.keys, dtype=torch.bool)
    fresh[1:] = find.keys[1:] != find.keys[:-1]
    return candidates[find.rows[fresh]]


def reached_cells(
    coords: Tensor, offsets: Tensor, stride: list[int], low: list[int], high: list[int], transposed: bool = False
) -> Tensor:
    """Return the distinct outputs in ``[low, high)`` that an input of ``coords`` reaches by ``offsets``, ascending. If
    ``transposed`` is true, outputs lie at ``input * stride + offset``, and otherwise inputs lie at ``output * stride +
    offset``.

    The op ``offset_cells`` computes them. In a program that is being exported, operators of torch do.
    """
    if not runs_without_python(coords):
        return offset_cells(coords, offsets, stride, low, high, transposed)
    cells = torch.unique(_reached(coords, offsets, stride, low, high, transposed), dim=0)
    torch._check(cells.shape[0] <= coords.shape[0] * offsets.shape[0])
    return cells


for _device in ("cpu", "cuda"):
    offset_table.kernel(_device, name="torch")(_offset_table)
    offset_cells.kernel(_device, name="torch")(_offset_cells)


def box_offsets(
    kernel: Sequence[int],
    dilation: Sequence[int],
    *,
    padding: Sequence[int] | None = None,
    region: Literal["cube", "cross"] = "cube",
) -> list[tuple[int, ...]]:
    """Return the offsets of the cells of a kernel (its taps) from its output, one tuple for each tap, in the order of a
    convolution's weight. The last axis varies fastest. Raise ``SL208`` for an unknown ``region``.

    Args:
        kernel: the number of taps on each axis.
        dilation: the distance between neighbouring taps on each axis, in cells.
        padding: how far the first tap of an axis lies below the output, by default ``(kernel - 1) // 2 * dilation``.
        region: ``"cube"`` for all taps, or ``"cross"`` for those on an axis through the middle tap.
    """
    if region not in ("cube", "cross"):
        raise error("SL208", where="box_offsets, argument 'region'", got=repr(region), expected="'cube' or 'cross'")
    middle = [(k - 1) // 2 for k in kernel]
    shift = [m * d for m, d in zip(middle, dilation, strict=True)] if padding is None else [*padding]
    taps: Iterable[tuple[int, ...]] = product(*map(range, kernel))
    if region == "cross":
        # On an axis through the middle, at most one coordinate differs from it.
        taps = (tap for tap in taps if sum(t != m for t, m in zip(tap, middle, strict=True)) <= 1)
    return [tuple(t * d - s for t, d, s in zip(tap, dilation, shift, strict=True)) for tap in taps]


def unbounded(axes: int) -> tuple[list[int], list[int]]:
    """Return the bounds ``(low, high)`` for ``offset_cells`` that allow all outputs with a scene and ``axes``
    coordinates. They exclude only scenes below 0 and the largest int32.
    """
    return [0, *[_INT32.min] * axes], [_INT32.max] * (axes + 1)


@built_outside_modes
def connect_by_offsets(
    coords: Tensor, outputs: Tensor, offsets: Tensor, stride: Sequence[int], *, transposed: bool = False
) -> Plan:
    """Return the plan (neighbour tables) of convolutions from the voxels ``coords`` onto the voxels ``outputs``, with
    one tap for each of ``offsets``.

    ``offsets`` is ``int32 [k, d]``, with a column for the scene as in ``stride``. If ``transposed`` is true, outputs
    lie at ``input * stride + offset``. Otherwise inputs lie at ``output * stride + offset``.
    """
    if not transposed:
        return Plan(rows_at(coords, outputs, offsets, list(stride)), coords.shape[0])
    table = rows_at(outputs, coords, offsets, list(stride))
    return Plan(transpose_table(table, outputs.shape[0]), coords.shape[0], back=(table, None, None))


@built_outside_modes
def distinct_cells(coords: Tensor) -> Tensor:
    """Return the distinct rows of ``coords [n, d]`` that are voxels and not padding (-1), in ascending order."""
    columns = coords.shape[1]
    nothing, ones = coords.new_zeros(1, columns), [1] * columns
    return reached_cells(coords, nothing, ones, *unbounded(columns - 1))


@built_outside_modes
def find_rows(coords: Tensor, wanted: Tensor) -> Tensor:
    """Return the number of the row of ``coords`` that equals each row of ``wanted``, as ``int32 [m, 1]``, or -1 if
    there is none.
    """
    columns = coords.shape[1]
    return rows_at(coords, wanted, coords.new_zeros(1, columns), [1] * columns)


@built_outside_modes
def join_cells(coords: Sequence[Tensor], by_offsets: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the distinct rows of all ``coords`` together, ascending. For each of ``coords``, return the numbers of its
    rows among the distinct ones, ``int32 [n, 1]``. If ``by_offsets`` is true, rows may be padding (-1) or have more
    than four columns. Otherwise the op ``unique_coords`` is used, which accepts neither.
    """
    every = torch.cat([*coords])
    if by_offsets:
        cells = distinct_cells(every)
        numbers = find_rows(cells, every)
    else:
        cells, inverse, _ = distinct_voxels(every)
        numbers = inverse[:, None]
    return cells, [*numbers.split([rows.shape[0] for rows in coords])]
