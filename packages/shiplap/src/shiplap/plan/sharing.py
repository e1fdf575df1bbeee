"""The exact test of whether two tensors share an element, since the two halves of a cache may lie side by side.

``shares_memory`` in ``shiplap/checks.h`` is the same test in C++, by the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from torch import Tensor

from shiplap import torch_private
from shiplap.torch_private.symbolic_sizes import size_in_call

Axes: TypeAlias = list[tuple[int, int]]  # (stride in bytes, size), the largest stride first
FEW_ADDRESSES = 1 << 16  # bytes that are compared one by one


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether a byte of memory belongs to both tensors. Return True also if the exact answer would take too
    long.
    """
    apart = b.data_ptr() - a.data_ptr()
    if apart < 0:
        a, b, apart = b, a, -apart
    if a.is_contiguous() and apart >= a.nbytes:  # nearly every call: not a frame more than that takes
        return False
    if a.numel() == 0 or b.numel() == 0:
        return False
    return strided_ranges_meet(apart, (a.shape, a.stride(), a.itemsize), (b.shape, b.stride(), b.itemsize))


def any_shares_memory(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether any two of ``tensors`` share a byte of memory. Members that are None are ignored."""
    there = [t for t in tensors if t is not None]
    return any(shares_memory(a, b) for i, a in enumerate(there) for b in there[:i])


def fakes_share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two fake tensors are views of one storage that share an element with the sizes of the current
    call. Return False if a size is not known.
    """
    if not torch_private.same_storage(a, b):
        return False
    # Offsets of storages count elements of each tensor's own dtype.
    facts = [*(int(t.itemsize) for t in (a, b)), a.storage_offset(), b.storage_offset()]
    first, second = ([*t.shape, *t.stride()] for t in (a, b))
    known = [size_in_call(v) for v in (*facts, *first, *second)]
    if None in known:
        return False
    left, right, begin, other, *rest = [v for v in known if v is not None]
    begin, other = begin * left, other * right
    one = rest[: a.dim()], rest[a.dim() : 2 * a.dim()], left
    two = rest[2 * a.dim() : 2 * a.dim() + b.dim()], rest[2 * a.dim() + b.dim() :], right
    # A tensor without elements has no memory to share.
    if 0 in one[0] or 0 in two[0]:
        return False
    return (
        strided_ranges_meet(other - begin, one, two) if begin <= other else strided_ranges_meet(begin - other, two, one)
    )


def strided_ranges_meet(
    distance: int,
    a: tuple[Sequence[int], Sequence[int], int],
    b: tuple[Sequence[int], Sequence[int], int],
) -> bool:
    """Return whether two strided tensors share a byte of memory. Each is given as its shape, its strides and the bytes
    of an element.

    ``b`` begins ``distance`` bytes after ``a``. ``distance`` is at least 0. Return True also if the exact answer would
    take too long.
    """
    first, second = _address_axes(*a), _address_axes(*b)
    # The first range ends before the second begins.
    if distance > sum((size - 1) * stride for stride, size in first):
        return False
    # Fewer axes may leave each address one place on the grid, where more axes do not.
    for left, right in ((first, second), (_merge_axes(first), _merge_axes(second))):
        known = _boxes_share_address(distance, left, right)
        if known is not None:
            return known
    # Refusing such a call is safe; comparing its addresses one by one would take too long.
    if _count_addresses(first) + _count_addresses(second) > FEW_ADDRESSES:
        return True
    return bool(np.intersect1d(_address_offsets(first), _address_offsets(second) + distance).size)


def _address_axes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Axes:
    """Return the axes of a strided tensor along which addresses differ, as pairs (stride in bytes, size), largest
    stride first.

    Axes with the same stride are joined into one. The bytes of an element are the last axis.
    """
    axes: dict[int, int] = {}
    pairs = [(stride * itemsize, size) for stride, size in zip(strides, shape, strict=True)]
    # The bytes of one element are an axis like the others.
    for stride, size in (*pairs, (1, itemsize)):
        if stride and size > 1:
            axes[stride] = axes.get(stride, 1) + size - 1
    return sorted(axes.items(), reverse=True)


def _merge_axes(axes: Axes) -> Axes:
    """Return axes, pairs of a stride and a size, that describe the same addresses as ``axes``. Two axes become one if
    one of them continues the other without a gap.
    """
    merged: Axes = []
    # From the innermost axis outwards, which a contiguous part continues.
    for stride, size in reversed(axes):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = merged[-1][0], merged[-1][1] * size
        else:
            merged.append((stride, size))
    return merged[::-1]


def _boxes_share_address(distance: int, a: Axes, b: Axes) -> bool | None:
    """Return whether the tensors with the axes ``a`` and ``b``, pairs (stride in bytes, size), share an address. ``b``
    begins ``distance`` bytes after ``a``.

    Addresses are written as coordinates on a grid with one axis for each stride, and the extents of the tensors along
    each axis are compared. Return None if an address has several coordinates on that grid, since the comparison is then
    not exact.
    """
    left, right = dict(a), dict(b)
    strides = sorted({*left, *right, 1}, reverse=True)
    begins, meeting, reach = [], True, 0
    for stride in strides:
        begins.append(distance // stride)
        distance %= stride
    for stride, begin in reversed(list(zip(strides, begins, strict=True))):
        last = max(left.get(stride, 1), begin + right.get(stride, 1)) - 1
        # The smaller strides reach beyond this one, so that an address has several places.
        if reach >= stride:
            return None
        meeting = meeting and begin < left.get(stride, 1)
        reach += last * stride
    return meeting


def _count_addresses(axes: Axes) -> int:
    """Return the number of addresses along ``axes``, which is the product of their sizes."""
    # As a float: the product of large sizes overflows 64-bit integers.
    return int(np.prod([size for _, size in axes], dtype=np.float64))


def _address_offsets(axes: Iterable[tuple[int, int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the byte offsets of all elements along ``axes``, pairs of (stride, size), as a flat int64 array."""
    offsets = np.zeros(1, dtype=np.int64)
    for stride, size in axes:
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return offsets
