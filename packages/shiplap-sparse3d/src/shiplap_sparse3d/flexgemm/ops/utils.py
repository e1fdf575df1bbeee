"""``flex_gemm.ops.utils``: dense volumes, the order of coordinates, and hash maps of FlexGEMM's dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d.coords import check_rows, refuse_rows
from shiplap_sparse3d.offsets import box_offsets, distinct_cells, find_rows

__all__ = [
    "coalesce_coords",
    "distinct_rows",
    "init_hashmap",
    "lookup_pytorch",
    "make_conv_kernel_delta",
    "sort_coords",
    "sparse_to_dense",
    "with_scene",
]


def with_scene(rows: Tensor) -> Tensor:
    """Return integer rows ``[n, d]`` as ``int32 [n, 1 + d]``, with a first column of zeros for the scene. Functions of
    voxels read the first column as the scene, in which -1 stands for a padding row. Raise ``SL211`` for values beyond
    int32, which is not checked while a graph is traced.
    """
    if rows.dtype == torch.int64 and not torch.compiler.is_compiling():
        refuse_rows("offset_table", (rows != rows.int()).any(1), "row {row} has a value beyond int32")
    return torch.nn.functional.pad(rows.int(), (1, 0))


def distinct_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct rows of the integers ``rows [n, d]``, ascending, and the number of the distinct row that
    equals each row, ``int32 [n]``.
    """
    wide = with_scene(rows)
    cells = distinct_cells(wide)
    return cells[:, 1:].to(rows.dtype).contiguous(), find_rows(cells, wide)[:, 0]


def init_hashmap(
    spatial_size: Sequence[int], hashmap_size: int, device: torch.device | str, with_values: bool = True
) -> Any:
    """Return an empty hash map as FlexGEMM's functions take it. If ``with_values`` is true, it is a pair of keys and
    values, and otherwise the keys only.

    There are ``hashmap_size`` keys with all bits set. They are ``uint32`` if the number of cells is below 2^32, and
    otherwise ``uint64``. The values are ``uint32`` and not initialised. ``spatial_size`` is ``(N, W, H, D)``, or ``(N,
    C, W, H, D)`` as in FlexGEMM 1.x. Raise ``SL208`` for 2^63 cells and more.
    """
    n, *grid = [*spatial_size[:1], *spatial_size[-3:]]
    cells = n * math.prod(grid)
    if cells >= 2**63:
        raise error("SL208", where="init_hashmap", got=f"{cells} cells", expected="less than 2^63")
    # FlexGEMM chooses the shorter keys where they number all cells.
    dtype = torch.uint32 if cells < 2**32 else torch.uint64
    keys = torch.full((hashmap_size,), torch.iinfo(dtype).max, dtype=dtype, device=device)
    return (keys, torch.empty(hashmap_size, dtype=torch.uint32, device=device)) if with_values else keys


def make_conv_kernel_delta(
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    batch_dims: int = 0,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the offsets of the taps of a box kernel around its output, ``[taps, batch_dims + axes]``, in the order of
    the weight. The first ``batch_dims`` columns, for the batch, are zeros. ``dtype`` and ``device`` are those of the
    result.
    """
    taps = torch.tensor(box_offsets(kernel_size, dilation), dtype=dtype, device=device)
    return torch.nn.functional.pad(taps, (batch_dims, 0))


def sparse_to_dense(feats: Tensor, coords: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of ``shape``, channels last, with ``feats [n, c]`` at the cells ``coords`` and zeros elsewhere. A
    row of ``coords`` has the batch indices and the coordinates of a cell. Raise ``SL202`` if the numbers of rows or
    channels do not match.
    """
    check_rows("sparse_to_dense", feats, coords.shape[0])
    axes = coords.shape[1]
    if tuple(shape[axes:]) != tuple(feats.shape[1:]):
        got = f"features {tuple(feats.shape)} of voxels with {axes} columns"
        raise error("SL202", where="sparse_to_dense", got=got, expected=f"those of shape {tuple(shape)}")
    return feats.new_zeros(*shape).index_put(tuple(coords.long().unbind(1)), feats)


def sort_coords(coords: Tensor, num_keys: int | None = None) -> Tensor:
    """Return the permutation ``int64 [n]`` that sorts the rows of ``coords`` by their first ``num_keys`` columns, the
    first of them being the most significant. Equal rows keep their order. If ``num_keys`` is None, all columns count.
    Raise ``SL208`` if there are fewer columns.
    """
    columns = coords.shape[1] if num_keys is None else num_keys
    if not 0 <= columns <= coords.shape[1]:
        expected = f"0 to {coords.shape[1]}"
        raise error("SL208", where="sort_coords, argument 'num_keys'", got=num_keys, expected=expected)
    order = torch.arange(coords.shape[0], device=coords.device)
    # Stable sorts from the last column on order rows by all columns.
    for column in reversed(range(columns)):
        order = order[coords[order, column].argsort(stable=True)]
    return order


_REDUCTIONS = ("sum", "mean", "amax", "amin", "prod")


def coalesce_coords(feats: Tensor, coords: Tensor, reduce: str = "sum", sort: bool = False) -> tuple[Tensor, Tensor]:
    """Return new features and coordinates in which equal rows of ``coords`` are merged into one. ``reduce`` (``"sum"``,
    ``"mean"``, ``"amax"``, ``"amin"`` or ``"prod"``) combines the features of equal rows. The coordinates are always
    ascending, whatever ``sort`` is. Raise ``SL208`` for another ``reduce``.
    """
    check_rows("coalesce_coords", feats, coords.shape[0])
    if reduce not in _REDUCTIONS:
        raise error("SL208", where="coalesce_coords", got=f"reduce {reduce!r}", expected=f"one of {_REDUCTIONS}")
    cells, number = distinct_rows(coords)
    index = number.long().view(-1, *[1] * (feats.dim() - 1)).expand_as(feats)
    merged = feats.new_zeros(cells.shape[0], *feats.shape[1:])
    return merged.scatter_reduce(0, index, feats, reduce=reduce, include_self=False), cells


def lookup_pytorch(key: Tensor, query: Tensor) -> Tensor:
    """Return the number of the row of ``key [k, d]`` that equals each row of ``query [..., d]``, as ``int64 [...]``. It
    is -1 if there is none.
    """
    found = find_rows(with_scene(key), with_scene(query.reshape(-1, key.shape[1])))
    return found[:, 0].long().view(query.shape[:-1])
