"""Plain formulas of operators that sum along rows, so that the rounding errors of their sums can be estimated.

Torch calls a softmax or a norm as one operator, inside of which a kernel adds thousands of terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """Return the softmax of ``x`` along ``dim``, computed from exponentials and their sum. ``half_to_float`` is
    ignored, since ``x`` is float64.
    """
    terms = (x - x.amax(dim, keepdim=True)).exp()
    return terms / terms.sum(dim, keepdim=True)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """Return the logarithm of the softmax of ``x`` along ``dim``, computed from the sum of exponentials.
    ``half_to_float`` is ignored, since ``x`` is float64.
    """
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """Return the logarithm of the sum of exponentials of ``x`` over the dims ``dim``. The maximum is subtracted first
    where it is finite. If ``keepdim`` is true, the result keeps the summed dims with size 1. Otherwise it lacks them.
    """
    dims = list(dim)
    top = x.amax(dims, keepdim=True)
    # The difference of two infinities would be NaN.
    top = torch.where(top.abs() == torch.inf, 0.0, top)
    summed: Tensor = (x - top).exp().sum(dims, keepdim=keepdim).log()
    return summed + (top if keepdim else top.squeeze(tuple(dims)))


def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean of ``x`` over ``dim`` (all dims if None), computed by ``sum`` alone. The
    correction of the variance is 1 if ``correction`` is None. If ``keepdim`` is true, the results keep the reduced dims
    with size 1. Otherwise they lack them.
    """
    dims = list(dim) if dim else list(range(x.dim()))
    count = 1
    for d in dims:
        count *= x.shape[d]
    mean = x.sum(dims, keepdim=True) / count
    squares = (x - mean).square().sum(dims, keepdim=True)
    # As torch does, which divides by 0 where there are too few elements.
    var = squares / max(0.0, count - (1 if correction is None else correction))
    return (var, mean) if keepdim else (var.squeeze(tuple(dims)), mean.squeeze(tuple(dims)))


def _var(x: Tensor, dim: Sequence[int] | None = None, **keywords: Any) -> Tensor:
    """Return the variance of ``x`` over ``dim`` (all dims if None), computed by ``sum`` alone. ``keywords`` are those
    of ``_var_mean``.
    """
    return _var_mean(x, dim, **keywords)[0]


def _std(x: Tensor, dim: Sequence[int] | None = None, **keywords: Any) -> Tensor:
    """Return the standard deviation of ``x`` over ``dim`` (all dims if None), computed by ``sum`` alone. ``keywords``
    are those of ``_var_mean``.
    """
    return _var_mean(x, dim, **keywords)[0].sqrt()


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the layer norm of ``x`` over its last dims, then the mean and the reciprocal standard deviation of each
    row. ``shape`` holds the sizes of these dims. ``eps`` is added to the variance. ``weight`` and ``bias`` are applied
    to the normalised rows unless they are None.
    """
    dims = list(range(x.dim() - len(shape), x.dim()))
    var, mean = _var_mean(x, dims, correction=0, keepdim=True)
    rstd = (var + eps).rsqrt()
    out = (x - mean) * rstd
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, rstd


def _vector_norm(
    x: Tensor, order: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Return the 2-norm of ``x`` over ``dim`` (all dims if None). If ``keepdim`` is true, the result keeps these dims
    with size 1. Otherwise it lacks them. Return ``NotImplemented`` if ``order`` is not 2, if ``x`` is complex or if
    ``dtype`` is given.
    """
    if order != 2 or x.is_complex() or dtype is not None:
        return NotImplemented
    dims = list(range(x.dim())) if dim is None else list(dim)
    return x.square().sum(dims, keepdim=keepdim).sqrt()


ROW_FORMULAS: dict[str, Callable[..., Any]] = {
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "var_mean": _var_mean,
    "var": _var,
    "std": _std,
    "native_layer_norm": _layer_norm,
    "linalg_vector_norm": _vector_norm,
}
"""Operator of torch → a function of the same arguments that computes the same from plainer operators."""


def row_formula(name: str, args: Sequence[Any]) -> Callable[..., Any] | None:
    """Return a function that takes the arguments of the aten operator ``name`` and computes its result from elementary
    operators. Return None if there is no such formula, or if the first of ``args`` is not a tensor of float64 with at
    least one dim and one element.
    """
    x = args[0] if args else None
    if not isinstance(x, Tensor) or not x.numel() or not x.dim() or not x.is_floating_point() or x.itemsize < 8:
        return None
    return ROW_FORMULAS.get(name)
