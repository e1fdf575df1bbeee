"""A common factor of all numbers of a result, which a comparison of single numbers of 16 bits does not show.

A kernel may round a few times to 16 bits on the way, so that each number may be off by some units of the last place,
6 % in bfloat16. Such errors have either sign, and their mean over a result is far smaller. A factor of a whole result,
as of a missing scale, has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

SINGLE = 16.0  # units of the last place by which a number is off at most if it counts here: others have other causes
SMALLEST = 16.0  # times the smallest normal number of the dtype: factors of smaller numbers may be subnormal on the way
SHARED = 2.0  # units by which all numbers may be off alike, by constants and scales that are rounded to 16 bits
SEPARATE = 6.0  # units by which a single number may be off, which shrinks with the root of the number of distinct ones
OWN = 3.0  # multiple of the error of the reference itself in 16 bits
PART = 1 << 22  # numbers that are looked at at once, since copies of large results in float64 would fill the memory
GROUPS = 65521  # into which numbers are put by their values: a prime, so that values of a pattern fall into all


def describe_common_factor(got: Tensor, own: Tensor, wide: Tensor, tolerance: float = 0.0) -> str:
    """Return a text that names the factor by which all numbers of the result ``got`` differ from those expected. Return
    an empty string for a factor that rounding explains, and for a result that has not 16 bits.

    ``own`` is the result of the reference in its own precision, and ``wide`` that in float64. ``tolerance`` is a
    relative deviation that the declaration admits. The factor is that of least squares.
    """
    if not got.is_floating_point() or got.itemsize != 2 or got.shape != wide.shape:
        return ""
    sums = torch.zeros(4, dtype=torch.float64, device=wide.device)
    for g, o, w in _counting_numbers(got, own, wide):
        sums += torch.stack([w.dot(w), g.dot(w), o.dot(w), (o - w).square().sum()])
    size, by_got, by_own, squares = sums.tolist()
    if not size:
        return ""
    eps, factor = torch.finfo(got.dtype).eps, by_got / size
    limit = eps * SHARED + OWN * abs(by_own / size - 1) + tolerance
    if abs(factor - 1) <= limit:
        return ""
    # The errors of the reference may cancel by chance, as those of the result may not.
    single = eps * SEPARATE + OWN * math.sqrt(squares / size)
    if abs(factor - 1) <= limit + single * _share_of_one(got, own, wide):
        return ""
    return f"all numbers are about {factor:.4g} times those expected"


def _counting_numbers(got: Tensor, own: Tensor, wide: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the numbers of ``got``, ``own`` and ``wide`` in float64, in parts. Numbers that do not count are 0. If
    ``own`` and ``wide`` are one tensor, so are their numbers.
    """
    info = torch.finfo(got.dtype)
    others = [own] if own is not wide else []
    for part in zip(*(t.detach().reshape(-1).split(PART) for t in (got, wide, *others)), strict=True):
        g, w, *rest = (t.to(torch.float64) for t in part)
        # A number of the range of 16 bits where the last place means something, and not subnormal. One that is not
        # finite is within no distance of another, and no distance of an infinite one is a number.
        near = (g - w).abs() <= SINGLE * info.eps * w.abs()
        counts = near & (w.abs() > SMALLEST * info.tiny) & (w.abs() < torch.inf)
        for other in rest:
            counts &= torch.isfinite(other)
        g, w, *rest = (torch.where(counts, t, 0.0) for t in (g, w, *rest))
        yield g, rest[0] if rest else w, w


def _share_of_one(got: Tensor, own: Tensor, wide: Tensor) -> float:
    """Return the share that the error of one number has in the error of the common factor. It is 1 for one number, and
    1 / sqrt(n) for n distinct numbers of one size. Equal numbers, as of equal inputs, have one error.
    """
    groups = torch.zeros(GROUPS, dtype=torch.float64, device=wide.device)
    for _, _, w in _counting_numbers(got, own, wide):
        groups.index_add_(0, (w.abs().float().view(torch.int32) % GROUPS).long(), w * w)
    return math.sqrt(float(groups.square().sum())) / float(groups.sum())
