"""Ops that do the work of several others in one launch: on a GPU a launch costs more than most of their work."""

from __future__ import annotations

from jaxtyping import Int32
from torch import Tensor

import shiplap as sl
from shiplap_sparse3d import ops
from shiplap_sparse3d.coords import check_scenes

__all__ = ["conv_plan", "subm_plan"]


@sl.op(
    "sparse3d::subm_plan",
    dims={"k": "prod(kernel)", "b": "cdiv(n, 64)"},
    outputs=("columns", "order", "masks"),
    requires=(
        *ops.GEOMETRY,
        "len(dilation) == 3",
        "min(dilation) >= 1",
        "parts >= 1",
        "parts <= prod(kernel)",
        "cdiv(prod(kernel), parts) <= 31",
        "run >= 1",
        "scenes >= 0",
    ),
)
def subm_plan(
    coords: Int32[Tensor, "n 4"],
    spatial_shape: list[int],
    kernel: list[int],
    dilation: list[int],
    parts: int,
    run: int = 1 << 18,
    scenes: int = 0,
) -> tuple[Int32[Tensor, "k n"], Int32[Tensor, "parts n"], Int32[Tensor, "parts b"]]:
    """Return the sorted neighbour table of a submanifold convolution, as the ops ``subm_table`` and ``sort_table`` make
    it one after the other.

    The result is its columns by tap, the output of each row in each of ``parts`` groups of columns, and the columns
    in which any row of each block of 64 rows has a neighbour.

    ``scenes`` is the number of scenes, or 0 if it is not known. Raise ``SL211`` as those ops do, and for a row of a
    scene that does not exist.
    """
    if scenes:
        check_scenes("subm_plan", coords, scenes)
    # The op is defined as this composition. A GPU runs it as one launch program.
    table = ops.subm_table.reference(coords, spatial_shape, kernel, dilation)
    sorted_table: tuple[Tensor, Tensor, Tensor] = ops.sort_table.reference(table, parts, run)
    return sorted_table


@sl.op(
    "sparse3d::conv_plan",
    dims={
        "k": "prod(kernel)",
        "b": "cdiv(m, 64)",
        "k_t": "prod(kernel) * min(parts_t, 1)",
        "b_t": "cdiv(n, 64)",
    },
    outputs=("columns", "order", "masks", "columns_t", "order_t", "masks_t"),
    requires=(
        *ops.WINDOW,
        "parts >= 1",
        "parts <= prod(kernel)",
        "cdiv(prod(kernel), parts) <= 31",
        "parts_t >= 0",
        "parts_t <= prod(kernel)",
        "prod(kernel) * min(parts_t, 1) <= 31 * parts_t",
        "run >= 1",
    ),
)
def conv_plan(
    coords: Int32[Tensor, "n 4"],
    out_coords: Int32[Tensor, "m 4"],
    spatial_shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    parts: int,
    parts_t: int,
    run: int = 1 << 18,
) -> tuple[
    Int32[Tensor, "k m"],
    Int32[Tensor, "parts m"],
    Int32[Tensor, "parts b"],
    Int32[Tensor, "k_t n"],
    Int32[Tensor, "parts_t n"],
    Int32[Tensor, "parts_t b_t"],
]:
    """Return the sorted neighbour tables of a strided convolution and of its transpose, as the ops ``conv_table`` and
    ``sort_table`` make them. For each table the result is its columns by tap, its order and its masks.

    ``parts`` and ``parts_t`` are the numbers of parts of the two tables, groups of columns that are sorted separately.
    If ``parts_t`` is 0, there is no transpose, and its tensors are empty. Raise ``SL211`` as those ops do.
    """
    table = ops.conv_table.reference(coords, out_coords, spatial_shape, kernel, stride, padding, dilation)
    sorted_table: tuple[Tensor, Tensor, Tensor] = ops.sort_table.reference(table, parts, run)
    if parts_t:
        back: tuple[Tensor, Tensor, Tensor] = ops.sort_table.reference(
            ops.transpose_table.reference(table, coords.shape[0]), parts_t, run
        )
    else:
        n = coords.shape[0]
        back = table.new_empty(0, n), table.new_empty(0, n), table.new_empty(0, -(-n // ops.ROWS_PER_MASK))
    return *sorted_table, *back
