"""Results that are sets of rows, brought into one order before they are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shiplap.declare import OpSpec

ORDERED_COLUMNS = 16  # columns of each result by which rows are ordered
MAX_MATCHED_ROWS = 2048  # rows that are matched one by one


def _unordered_rows(spec: OpSpec, outs: Sequence[Tensor]) -> tuple[list[int], Tensor | None]:
    """Return the indices of the results whose rows have no order, and a float64 matrix with the first columns of all
    these results side by side. At most ``ORDERED_COLUMNS`` (16) columns of each result are included. The matrix is None
    if there are no such results or if they differ in their number of rows. A comparison of shapes reports such a
    difference.

    The matrix is None if there are no such results or if they differ in their number of rows. A comparison of shapes
    reports the latter.
    """
    places = [i for i, name in enumerate(spec.results) if name in spec.unordered]
    if len(outs) < len(spec.results) or not places:
        return places, None
    chosen = [outs[i].detach() for i in places]
    count = chosen[0].shape[0] if chosen[0].dim() else -1
    if any(t.dim() == 0 or t.shape[0] != count or t.is_complex() for t in chosen):
        return places, None
    wide = [_exact_doubles(t.reshape(count, t[0].numel() if count else 0)[:, :ORDERED_COLUMNS]) for t in chosen]
    return places, torch.cat(wide, 1)


def _exact_doubles(t: Tensor) -> Tensor:
    """Return the matrix ``t`` in float64 without loss. Each int64 column becomes two, its upper and its lower 32 bits,
    since float64 does not hold 64 bits.
    """
    return torch.cat((t >> 32, t & 0xFFFFFFFF), 1).double() if t.dtype == torch.int64 else t.double()


def sort_unordered_rows(spec: OpSpec, outs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return ``outs`` with sorted rows in each result that the declaration calls unordered. The rows of all unordered
    results are compared side by side, and all get the same permutation.
    """
    if not spec.unordered:
        return outs
    places, rows = _unordered_rows(spec, outs)
    if rows is None:
        return outs
    order = torch.arange(rows.shape[0], device=rows.device)
    # Stable sorts from the last column to the first sort the rows lexicographically.
    for column in range(rows.shape[1] - 1, -1, -1):
        order = order[rows[order, column].argsort(stable=True)]
    return tuple(t[order] if i in places else t for i, t in enumerate(outs))


def match_unordered_rows(spec: OpSpec, outs: Sequence[Tensor], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return ``outs`` with the rows of unordered results permuted, so that each row has the index of the nearest row of
    ``like``.

    ``like`` are the results to compare with. Both are sorted, but rounding may have changed the order of rows. If there
    are more than ``MAX_MATCHED_ROWS`` rows or if the shapes differ, ``outs`` are returned unchanged.
    """
    places, rows = _unordered_rows(spec, outs)
    _, wanted = _unordered_rows(spec, like)
    if rows is None or wanted is None or rows.shape != wanted.shape or not 0 < rows.shape[0] <= MAX_MATCHED_ROWS:
        return tuple(outs)
    # A distance to NaN or infinity would have no nearest row.
    distance = torch.cdist(wanted.nan_to_num(0, 1e300, -1e300).cpu(), rows.nan_to_num(0, 1e300, -1e300).cpu(), p=1)
    order = list[int]()
    for row in distance:
        nearest = int(row.argmin())
        order.append(nearest)
        distance[:, nearest] = float("inf")
    at = torch.tensor(order, device=rows.device)
    return tuple(t[at] if i in places else t for i, t in enumerate(outs))
