"""Sizes of the partial sums of a reduction, each of which a kernel rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

PARTS = 8  # runs of terms whose sums stand for all partial sums
EQUAL = 1e-6  # relative difference of terms that a kernel rounds alike
SURE = 0.25  # errors of equal terms are at most half a unit each, with no allowance for chance
DRIFT = 1.0  # of the drift of a sequential sum: with the factor of an allowance about three times it
SUMS = ("sum", "mean")
PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}  # position of the first factor

Runs = tuple[list[Tensor], list[int]]  # sums of runs of terms, and how many terms each has


def rounded_sums(name: str, func: Callable[..., Any], args: Sequence[Any], eps: float) -> Tensor | None:
    """Return the rounding error of each element of the result of the torch operator ``func``, called with ``args``, in
    units of ``eps``, the relative error of one operation. ``name`` is the operator's name. Return None for an operator
    that computes no sums.

    The error is estimated from the partial sums. It is the root of the sum of their squares. If all terms are equal, it
    is the sum of the partial sums times ``SURE``, since rounding then errs to one side. The drift of long sums is
    added. The sums of ``PARTS`` runs of terms stand for all partial sums. Source: Higham, Accuracy and Stability of
    Numerical Algorithms, chapter 4.
    """
    try:
        made = _product_part_sums(name, args) or _sum_part_sums(name, args) or _convolution_part_sums(name, func, args)
    except (RuntimeError, TypeError, ValueError, IndexError):  # a layout or signature that is not covered
        return None
    if made is None:
        return None
    runs, terms = torch.stack(made[0]), made[1]
    each = runs / torch.tensor(terms, dtype=runs.dtype, device=runs.device).reshape(-1, *[1] * (runs.dim() - 1))
    equal = ((each - each[0]).abs() <= EQUAL * each[0].abs()).all(0)
    sums, share = runs.cumsum(0).abs(), sum(terms) / len(terms)
    errors = torch.where(equal, sums.sum(0) * share * SURE, (sums.square().sum(0) * share).sqrt())
    return errors + _drift_of_sum(args, runs.cumsum(0), eps, mean=name == "mean") if name in SUMS else errors


def _product_part_sums(name: str, args: Sequence[Any]) -> Runs | None:
    """Return the sums of runs of terms of the matrix product ``name`` of ``args``, cut along its inner dim, and the
    number of terms of each run. Return None for another operator.
    """
    if name not in PRODUCTS:
        return None
    a, b = args[PRODUCTS[name] : PRODUCTS[name] + 2]
    left, right = a.chunk(PARTS, -1), b.chunk(PARTS, -1 if b.dim() == 1 else -2)
    return [torch.matmul(x, y) for x, y in zip(left, right, strict=True)], [max(1, x.shape[-1]) for x in left]


def _sum_part_sums(name: str, args: Sequence[Any]) -> Runs | None:
    """Return the sums of runs of terms of the sum or mean ``name`` of ``args``, cut along its longest dim, and the
    number of terms of each run. Return None for another operator.
    """
    if name not in SUMS or not args[0].dim():
        return None
    x, dims, longest = _reduced_dims(args)
    keep, parts = bool(len(args) > 2 and args[2]), x.chunk(PARTS, longest)
    by = max(1, prod(x.shape[d] for d in dims)) if name == "mean" else 1
    terms = [max(1, prod(p.shape[d] for d in dims)) for p in parts]
    return [p.sum(dims, keepdim=keep) / by for p in parts], terms


def _reduced_dims(args: Sequence[Any]) -> tuple[Tensor, list[int], int]:
    """Return the operand of a sum or mean with the arguments ``args``, the dims that it adds up, and the longest."""
    x, asked = args[0], args[1] if len(args) > 1 else None
    dims = [asked] if isinstance(asked, int) else list(asked or range(x.dim()))
    dims = [d % x.dim() for d in dims]
    return x, dims, max(dims, key=lambda d: x.shape[d])


def _drift_of_sum(args: Sequence[Any], sums: Tensor, eps: float, *, mean: bool) -> Tensor:
    """Return by how much a sequential sum or mean drifts to one side, in units of ``eps``.

    Next to a large partial sum, small terms are rounded to multiples of its last place. Of squares, more are lost than
    gained, so that the error of a sum of a million grows with their number, and not with its root. ``sums`` are the
    partial sums after each run of terms.
    """
    x, dims, longest = _reduced_dims(args)
    if x.is_complex():
        return torch.zeros_like(sums[0], dtype=torch.float64)
    by = max(1, prod(x.shape[d] for d in dims)) if mean else 1
    kept = [1 if d in dims else size for d, size in enumerate(x.shape)]
    drift = torch.zeros(kept, dtype=torch.float64, device=x.device)
    for part, total in zip(x.chunk(PARTS, longest), sums, strict=True):
        total = (total * by).reshape(kept).double()
        place = torch.ldexp(torch.full_like(total, eps / 2), torch.frexp(total).exponent)
        drift += (part - (part / place).round() * place).sum(dims, keepdim=True)
    return drift.nan_to_num(0.0, 0.0, 0.0).abs().reshape(sums[0].shape) * (DRIFT / by / eps)


def _convolution_part_sums(name: str, func: Callable[..., Any], args: Sequence[Any]) -> Runs | None:
    """Return the sums of runs of terms of the convolution ``name`` of ``args``, cut along its input channels, and the
    number of terms of each run. ``func`` is the convolution. Return None for another operator, for several groups, for
    a transposed convolution, or if arguments are omitted.
    """
    if name != "convolution" or len(args) != 9 or args[6] or args[8] != 1:
        return None
    pairs = list(zip(args[0].chunk(PARTS, -args[1].dim() + 1), args[1].chunk(PARTS, 1), strict=True))
    return [func(x, w, None, *args[3:]) for x, w in pairs], [max(1, prod(w.shape[1:])) for _, w in pairs]
