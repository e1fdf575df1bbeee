"""Distances between results: of the reference from itself in float64, and between results for different inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shiplap.sampling.compare import part_length

# Draws of a form, elements of a result, and the share of an error from which on that of another draw exceeds it.
KNOWN, LARGE_ENOUGH, SHARE = 3, 1 << 16, 0.5


class OwnErrors:
    """The errors of a reference in its own precision, as comparisons with float64 have shown them, for each form of
    inputs (shapes and kind of values).

    The largest error of many elements hardly differs from draw to draw. After some draws of a form it is therefore
    known about how large it is at least, and results that differ by less need no comparison with float64, which takes
    ten times as long on a GPU.
    """

    def __init__(self) -> None:
        """Start without a known error."""
        self._largest: dict[str, list[list[float]]] = {}

    def clear(self) -> None:
        """Forget all errors, since the reference has other parameters now."""
        self._largest.clear()

    def note(self, form: str, own: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
        """Record the largest error of each result for a draw of the form with the label ``form``. ``own`` are the
        results in the precision of the reference, and ``wide`` those in float64.
        """
        self._largest.setdefault(form, []).append([_largest_error(o, w) for o, w in zip(own, wide, strict=True)])

    def likely(self, form: str, own: Sequence[Tensor]) -> list[float]:
        """Return an error for each of the results ``own`` that the largest error of a draw of ``form`` likely exceeds.

        It is half of the least of the largest errors so far, each as a share of the norm of its result. It is 0 for a
        result with few elements, and for a form of which fewer than three draws were compared with float64.
        """
        known = self._largest.get(form, [])
        if len(known) < KNOWN or any(len(errors) != len(own) for errors in known):
            return [0.0] * len(own)
        least = [SHARE * min(errors) for errors in zip(*known, strict=True)]
        large = (o.numel() >= LARGE_ENOUGH and error > 0.0 for error, o in zip(least, own, strict=True))
        return [e * _magnitude(o) if is_large else 0.0 for e, o, is_large in zip(least, own, large, strict=True)]


def _largest_error(own: Tensor, wide: Tensor) -> float:
    """Return the largest finite difference of two results as a share of the norm of ``own``, or 0 if they are no real
    floating-point numbers of one shape.
    """
    if not own.is_floating_point() or own.itemsize == 1 or own.shape != wide.shape or not own.numel():
        return 0.0
    length = part_length(own)
    parts = zip(own.reshape(-1).split(length), wide.reshape(-1).split(length), strict=True)
    largest = max(float(torch.nan_to_num(o.double() - w, 0.0, 0.0, 0.0).abs().max()) for o, w in parts)
    return largest / size if largest and (size := _magnitude(own)) else 0.0


def _magnitude(t: Tensor) -> float:
    """Return the norm of the finite elements of ``t``, or 0 if it is too large for its dtype. Draws of one form may
    differ in scale by powers of ten.
    """
    wide = torch.float32 if t.itemsize <= 4 else t.dtype
    norm = float(torch.linalg.vector_norm(t, dtype=wide))
    if not math.isfinite(norm):  # as a rule all elements are finite, which saves a copy
        norm = float(torch.linalg.vector_norm(torch.nan_to_num(t, 0.0, 0.0, 0.0), dtype=wide))
    return norm if math.isfinite(norm) else 0.0


def clearly_differ(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether any tensor of ``first`` clearly differs from the one at its position in ``second``. It does if the
    norm of their difference exceeds a tenth of the sum of their norms. Tensors of different shapes or of one-byte
    elements are not compared.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.shape == b.shape and a.numel()]
    return any(float((a - b).norm()) > 0.1 * float(a.norm() + b.norm()) for a, b in pairs if a.itemsize > 1)
