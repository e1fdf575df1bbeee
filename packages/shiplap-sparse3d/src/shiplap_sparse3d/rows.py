"""The choice of rows as an op, so that a graph can rely on their number not growing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

import shiplap as sl
from shiplap_sparse3d.coords import runs_without_python

__all__ = ["cells_in_use", "chosen_rows", "rows_where"]


@sl.op("sparse3d::chosen_rows", bounds={"m": "n"})
def chosen_rows(mask: Bool[Tensor, "n"]) -> Int64[Tensor, "m"]:
    """Return the numbers of the rows where ``mask`` is true, ascending. This is an op, so that a graph has the bound
    ``n`` for their number. The host waits for a GPU.
    """
    return mask.nonzero()[:, 0]


def rows_where(mask: Tensor) -> Tensor:
    """Return the numbers of the rows where ``mask`` is true, ascending. The op ``chosen_rows`` computes them. In a
    program that is being exported, an operator of torch does.
    """
    if not runs_without_python(mask):
        return chosen_rows(mask)
    rows = mask.nonzero()[:, 0]
    torch._check(rows.shape[0] <= mask.shape[0])
    return rows


@chosen_rows.kernel("cpu", name="torch")
def _(mask: Tensor) -> Tensor:
    """Return the numbers of the rows where ``mask`` is true, ascending. This is the CPU kernel of ``chosen_rows``."""
    return mask.nonzero()[:, 0]


@chosen_rows.kernel("cuda", name="torch")
def _(mask: Tensor) -> Tensor:
    """Return the numbers of the rows where ``mask`` is true, ascending. This is the CUDA kernel of ``chosen_rows``."""
    return mask.nonzero()[:, 0]


def cells_in_use(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cells of ``rows [b, *spatial, c]`` in which any channel is not zero, and their features ``[n, c]``.
    The cells are ``int32 [n, 1 + axes]``, the scene and the index along each axis, in ascending order.
    """
    flat = rows.flatten(0, -2)
    chosen = rows_where((flat != 0).any(1))
    return torch.stack(_unravel_numbers(chosen, rows.shape[:-1]), 1).int(), flat.index_select(0, chosen)


def _unravel_numbers(numbers: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return a list with the index along each axis for the flat ``numbers`` of elements in an array with these
    ``sizes``. The last axis varies fastest.
    """
    columns = []
    for size in reversed(sizes):
        columns.append(numbers % size)
        numbers = numbers // size
    return columns[::-1]
