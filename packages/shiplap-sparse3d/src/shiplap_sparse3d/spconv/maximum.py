"""spconv's maximum over a window. Both of its algorithms start from zero, and checkpoints were trained with that."""

from __future__ import annotations

from torch import Tensor

from shiplap_sparse3d import pooling

__all__ = ["max_pool_from_zero", "max_pool_from_zero_grad"]


def max_pool_from_zero(features: Tensor, table: Tensor, table_t: Tensor | None = None) -> Tensor:
    """Return, for each output and channel, the larger of zero and the largest of its inputs, as ``[m, c]``. ``table [m,
    k]`` holds the rows of ``features [n, c]`` that each output reads, or -1.

    Where every row under the taps is negative, the result is zero and no input has a gradient.
    ``sparse3d.SparseMaxPool3d``, which is not a layer of spconv, starts from the first row instead. ``table_t`` is the
    transpose of ``table``. If it is None, the gradient builds it.
    """
    largest = pooling.max_pool(features, table, table_t)
    return largest.masked_fill(largest < 0, 0)  # clamp_min has no gradient at its bound since torch 2.15


def max_pool_from_zero_grad(features: Tensor, grad: Tensor, table: Tensor, table_t: Tensor) -> Tensor:
    """Return the gradient ``[n, c]`` of :func:`max_pool_from_zero` with respect to its features. ``grad [m, c]`` is the
    gradient of its result. ``table_t`` is the transpose of ``table``.
    """
    largest, taps = pooling.max_pool_with_taps(features, table)
    return pooling.max_pool_grad(grad.masked_fill(largest < 0, 0), taps, table_t)
