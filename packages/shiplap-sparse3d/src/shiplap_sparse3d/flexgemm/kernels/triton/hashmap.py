"""``flex_gemm.kernels.triton.hashmap``: rows of integers found by their values.

A map is ``int32 [n]``: the numbers of the distinct rows, in ascending order of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shiplap_sparse3d.flexgemm.ops.utils import distinct_rows, lookup_pytorch

__all__ = ["hashmap_build", "hashmap_lookup", "hashmap_unique"]


def hashmap_build(keys: Tensor) -> Tensor:
    """Return the hash map of the rows ``keys [n, d]``, which is a tensor ``int32 [distinct]``. It holds the number of
    the first row with each distinct value, in ascending order of these values.
    """
    return _first_rows(*distinct_rows(keys))


def hashmap_lookup(hashmap: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    """Return the number of the row of ``keys [n, d]`` that equals each of ``queries [q, d]``, as ``int32 [q]``. It is
    -1 if there is none. ``hashmap`` is the result of :func:`hashmap_build` for ``keys``, and only the rows that it
    lists are searched.
    """
    found = lookup_pytorch(keys.index_select(0, hashmap), queries)
    # An empty map has no row to index, and everything is -1 already.
    return torch.where(found >= 0, hashmap[found.clamp_min(0)], -1) if len(hashmap) else found.int()


def hashmap_unique(keys: Tensor, return_index: bool = False, return_inverse: bool = False) -> Any:
    """Return the distinct rows of ``keys [n, d]`` in ascending order, or a tuple that begins with this tensor if a flag
    is true.

    If ``return_index`` is true, the next tensor has the number of the first row of ``keys`` that equals each distinct
    row. If ``return_inverse`` is true, the last tensor has the number of the distinct row that equals each row of
    ``keys``. The numbers are ``int32`` and count from 0.
    """
    rows, number = distinct_rows(keys)
    results = (rows, *([_first_rows(rows, number)] if return_index else []), *([number] if return_inverse else []))
    return results if len(results) > 1 else rows


def _first_rows(rows: Tensor, number: Tensor) -> Tensor:
    """Return the lowest index at which ``number`` holds each of 0, 1, 2 and so on, as ``int32 [distinct]``. ``number
    [n]`` is the number of the distinct row that equals each input. Of ``rows``, the distinct rows, only the length is
    read.
    """
    here = torch.arange(number.shape[0], dtype=torch.int32, device=number.device)
    first = torch.full((rows.shape[0],), number.shape[0], dtype=torch.int32, device=number.device)
    return first.scatter_reduce(0, number.long(), here, reduce="amin")
