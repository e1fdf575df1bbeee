"""Grids and numbers of scenes as models pass them: Python's integers, arrays, or sizes that depend on data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from shiplap.plugin_api import error
from shiplap.plugin_api.compiling import assert_in_graph, constant_result
from shiplap_sparse3d.coords import is_of_data
from shiplap_sparse3d.rows import rows_where

__all__ = ["assume_rows", "cells_of", "check_least", "name_rows"]


def cells_of(spatial_shape: Sequence[int] | np.ndarray[Any, Any] | Tensor) -> list[int]:
    """Return the number of cells per axis, ``spatial_shape``, as a list of Python's own integers. While a graph is
    compiled, the list holds sizes of the graph.

    An array's numbers become constants, which each run of the graph asserts. A grid is a setting of a model, and layers
    behind ``dense()`` need constants. A tensor's numbers come from the data, so they stay symbolic.
    """
    if not is_compiling():
        return [int(v) for v in spatial_shape]
    return [_of_graph(spatial_shape[axis]) for axis in range(len(spatial_shape))]


def _of_graph(cells: Any) -> int:
    """Return ``cells``, one size of a grid, for a graph that is being compiled. A size from a tensor is symbolic. A
    number from an array is a constant, and the graph asserts at run time that the array still holds it.
    """
    if isinstance(cells, (int, Tensor)):
        return int(cells)
    number: int = _constant_number(cells)
    assert_in_graph(torch.as_tensor(cells) == number, _OTHER_ARRAY)
    return number


_OTHER_ARRAY = (
    "SL209: spatial_shape is an array, and holds other numbers than when torch.compile made this graph of them; "
    "pass a list of ints, which the graph can follow"
)


@constant_result
def _constant_number(value: Any) -> int:
    """Return ``int(value)``. A compiled graph holds the result as a constant."""
    return int(value)


def check_least(where: str, sizes: Sequence[int], got: Callable[[], str], fix: str = "") -> None:
    """Raise ``SL208`` unless all ``sizes`` are at least 1. ``got()`` returns the string that describes what was found.

    ``got`` is called only for the error, because Dynamo cannot format a size. A graph asserts sizes that depend on data
    at run time. ``where`` is the location in the error, and ``fix`` is the remedy that it suggests.
    """
    if not is_compiling():
        small = min(sizes) < 1
    else:
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # here: it is slow to import

        small = any(guard_or_false(size < 1) for size in sizes)
    if small:
        raise error("SL208", where=where, got=got(), expected="1 or more", fix=fix)
    if is_compiling():
        for size in sizes:
            torch._check(size >= 1)


def assume_rows(rows: int, *, training: bool = False) -> None:
    """Assert, in a graph that is being compiled, that ``rows`` is at least 2 if ``training`` is true, and at least 1
    otherwise. Outside of compilation, do nothing.

    Batch norm branches on the number of rows, and needs the fact. The assertion runs with the graph. It is left out if
    the compiler already knows whether it holds.
    """
    if not is_compiling():
        return
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # here: it is slow to import

    least = 2 if training else 1
    # Only a size without a known answer is asserted.
    if not guard_or_false(rows >= least) and not guard_or_false(rows < least):
        torch._check(rows >= least)


def name_rows(indices: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``indices`` and ``features`` unchanged, except in a graph whose number of rows is a sum of sizes that
    depend on data. There, return them with a new symbol as the number of rows.

    Torch looks up known facts about a symbol, but not about a sum, for which :func:`assume_rows` would have no effect.
    """
    if not is_compiling() or not is_of_data(indices.shape[0]):
        return indices, features
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # here: it is slow to import

    if not guard_or_true(indices.shape[0] == 0):  # a symbol, of which one row at least was assumed
        return indices, features
    rows = rows_where(torch.ones(indices.shape[0], dtype=torch.bool, device=indices.device)).shape[0]
    torch._check(rows >= 1)
    return indices.narrow(0, 0, rows), features.narrow(0, 0, rows)
