"""Ops that make what several others make, in one go: on a GPU a launch or a call costs more than most of their work."""

from __future__ import annotations

from jaxtyping import Int32
from torch import Tensor

import shiplap as sl
from shiplap.kernels.sparse3d import ops

__all__ = ["subm_plan"]


@sl.op(
    "sparse3d::subm_plan", dims={"k": "prod(kernel)", "b": "cdiv(n, 64)"}, outputs=("columns", "order", "masks"),
    requires=(
        *ops._GEOMETRY, "len(dilation) == 3", "min(dilation) >= 1", "parts >= 1", "cdiv(prod(kernel), parts) <= 31",
        "run >= 1",
    ),
)  # fmt: skip
def subm_plan(
    coords: Int32[Tensor, "n 4"],
    spatial_shape: list[int],
    kernel: list[int],
    dilation: list[int],
    parts: int,
    run: int = 1 << 18,
) -> tuple[Int32[Tensor, "k n"], Int32[Tensor, "parts n"], Int32[Tensor, "parts b"]]:
    """``sort_table(subm_table(coords, spatial_shape, kernel, dilation), parts, run)``. Raises SL211 as those do."""
    table = ops.subm_table.reference(coords, spatial_shape, kernel, dilation)
    found: tuple[Tensor, Tensor, Tensor] = ops.sort_table.reference(table, parts, run)
    return found
