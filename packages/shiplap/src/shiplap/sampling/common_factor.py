"""A common factor of all numbers of a result, which a comparison of single numbers of 16 bits does not show.

A kernel may round a few times to 16 bits on the way, so that each number may be off by some units of the last place,
6 % in bfloat16. Such errors have either sign, and their mean over a result is far smaller. A factor of a whole result,
as of a missing scale, has one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SINGLE = 16.0  # units of the last place by which a number is off at most if it counts here: others have other causes
SHARED = 2.0  # units by which all numbers may be off alike, by constants and scales that are rounded to 16 bits
SEPARATE = 4.0  # units by which a single number may be off, which shrinks with the root of their number
OWN = 3.0  # multiple of the error of the reference itself in 16 bits


def describe_common_factor(got: Tensor, own: Tensor, wide: Tensor, tolerance: float = 0.0) -> str:
    """Return a text that names the factor by which all numbers of the result ``got`` differ from those expected. Return
    an empty string for a factor that rounding explains, and for a result that has not 16 bits.

    ``own`` is the result of the reference in its own precision, and ``wide`` that in float64. ``tolerance`` is a
    relative deviation that the declaration admits. The factor is that of least squares.
    """
    if not got.is_floating_point() or got.itemsize != 2 or got.shape != wide.shape:
        return ""
    eps = torch.finfo(got.dtype).eps
    g, o, w = (t.detach().to(torch.float64).flatten() for t in (got, own, wide))
    # A number of the range of 16 bits where the last place means something, and not subnormal.
    normal = torch.isfinite(g) & torch.isfinite(o) & torch.isfinite(w) & (w.abs() > torch.finfo(got.dtype).tiny / eps)
    counts = normal & ((g - w).abs() <= SINGLE * eps * w.abs())
    g, o, w = (torch.where(counts, t, 0.0) for t in (g, o, w))
    largest = float(w.abs().max()) if w.numel() else 0.0
    if not largest:
        return ""
    g, o, w = g / largest, o / largest, w / largest
    size = float((w * w).sum())
    factor, plain = float((g * w).sum()) / size, float((o * w).sum()) / size
    few = math.sqrt(float((w * w).square().sum())) / size  # 1 for one number, and 1 / sqrt(n) for n numbers of one size
    limit = eps * (SHARED + SEPARATE * few) + OWN * abs(plain - 1) + tolerance
    return f"all numbers are about {factor:.4g} times those expected" if abs(factor - 1) > limit else ""
