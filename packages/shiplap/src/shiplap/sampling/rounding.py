"""Estimation of the rounding errors of a result: the reference runs in float64 with random errors added to each
operator.

The inputs and outputs of each operator are changed by a random relative error of the size of the kernel's own rounding.
Operators that move, compare, choose or round to whole numbers are exact and get no error. The variation of the result
is the error that a correct kernel of that precision may have: small for well conditioned arithmetic, large where terms
cancel. Fused operators are decomposed first, since their inner roundings count as well.
Torch calls a softmax or a norm as one operator, inside of which a kernel adds thousands of terms. Such an operator has
a plain formula here. The partial sums of a reduction have the sizes in which a kernel rounds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from shiplap.sampling.common_factor import describe_common_factor
from shiplap.sampling.compare import Difference, Reduction, compare_within_tolerance
from shiplap.torch_private.dispatcher_calls import TorchDispatchMode, without_memory
from shiplap.torch_private.graph_nodes import core_decompositions
from shiplap.torch_private.graph_objects import map_leaves

RUNS = 5  # runs with random errors
FACTOR = 8.0  # multiple of the largest deviation in these runs
MORE_RUNS, DOUBTFUL = 20, 16.0  # further runs, where an error exceeds the tolerance by no more than this factor
ENLARGED = 64.0  # factor of errors of float64, which the runs in float64 would otherwise round to 0 or 1 of them
SHARE = 0.25  # of a rounding unit, for each of the partial sums: with ``FACTOR`` about ten times their usual error


def rounding_unit(dtype: torch.dtype) -> float:
    """Return the relative rounding error of one operation of a kernel whose results have ``dtype``. It is the machine
    epsilon of float64 for float64 and complex128, and otherwise that of float32. Kernels are assumed to add up narrow
    floats in float32.
    """
    return torch.finfo(torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32).eps


def rounding_allowance(
    run: Callable[[], Sequence[Tensor]], wide: Sequence[Tensor], eps: float, seeds: Sequence[int] = range(RUNS)
) -> list[Tensor] | None:
    """Return, for each result, a tensor with the deviation of each element that rounding errors of relative size
    ``eps`` explain. Return None if the reference cannot run with added errors.

    ``run`` computes the reference in float64. ``wide`` are its results without added errors. It runs once for each of
    ``seeds``, from which the errors are drawn, and for float64 once more with enlarged errors. The deviation is
    infinite if rounding determines whether the element is finite.
    """
    worst = [torch.zeros(w.shape, dtype=torch.float64, device=w.device) for w in wide]
    # A jump, as of ``floor`` at a whole number, does not grow with the errors: runs with plain errors have its size.
    scales = (ENLARGED, 1.0) if eps <= torch.finfo(torch.float64).eps else (1.0,)
    for seed, scale in product(seeds, scales):
        try:
            with _RoundingMode(eps * scale, seed):
                results = [t.detach() for t in run()]
        except Exception:  # an operator of the reference may refuse the mode by any exception
            return None
        if any(f.shape != w.shape for f, w in zip(results, wide, strict=True)):
            return None
        for at, (f, w) in enumerate(zip(results, wide, strict=True)):
            if f.is_floating_point() or f.is_complex():
                worst[at] = torch.maximum(worst[at], _element_distance(f, w.detach()) / scale)
    return [FACTOR * (w + _typical_row_spread(w)) for w in worst]


def _element_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the absolute difference of the elements of ``a`` and ``b``. It is 0 for two NaNs or equal infinities, and
    otherwise infinity if one of the two numbers is not finite.
    """
    dtype = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(dtype), b.to(dtype)  # torch compares no float8 with another dtype
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    gap = (a - b).abs()
    return torch.where(same, 0.0, torch.where(torch.isfinite(gap), gap, torch.inf))


def _typical_row_spread(spread: Tensor) -> Tensor:
    """Return the root mean square of the finite elements of each row of ``spread``, with a last dim of 1. A tensor
    without dims or elements is returned as it is, with 0 in place of infinity. The few random deviations of one element
    may all be small by chance, so the row is used.
    """
    finite = torch.where(torch.isfinite(spread), spread, 0.0)
    return finite.square().mean(-1, keepdim=True).sqrt() if spread.dim() and spread.numel() else finite


class _RoundingMode(TorchDispatchMode):
    """A torch mode that multiplies inputs and outputs of operators by ``1 + eps * u``, with ``u`` random and uniform in
    [-1, 1].
    """

    def __init__(self, eps: float, seed: int) -> None:
        """Make a mode that multiplies the operands and results of torch operators by random factors between ``1 - eps``
        and ``1 + eps``. ``seed`` determines the factors.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps, self.seed = eps, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator ``func`` with random rounding errors in its operands, its result and its partial sums. An
        operator without rounding errors runs unchanged. A composite operator runs as the operators of which it is
        composed.
        """
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name in EXACT_OPERATORS and func._overloadname != "decimals":  # round to decimals multiplies and divides
            return func(*args, **kwargs)
        plainer = row_formula(name, args) or core_decompositions().get(func)
        if plainer is not None:
            # A mode is off while it handles a call, and the parts have rounding errors of their own.
            with self:
                result = plainer(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        schema = func._schema
        growth = _rounding_growth(schema.name, args)
        aliases = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
        if aliases:  # a view or an in-place operator: its inputs must not be copied
            result = func(*args, **kwargs)
            if growth > 1 and _can_round(result):
                result.mul_(self._noise(result, growth))
            return result
        args, kwargs = (map_leaves(self._off, values) for values in (args, kwargs))
        result = map_leaves(partial(self._off, growth=growth), func(*args, **kwargs))
        sums = rounded_sums(name, func, args, self.eps) if _can_round(result) else None
        if sums is not None and sums.shape == result.shape:
            result += sums * (self._noise(sums, SHARE) - 1)
        return result

    def _off(self, t: Any, growth: float = 1.0) -> Any:
        """Return ``t`` with each element multiplied by a random factor between ``1 - growth * eps`` and ``1 + growth *
        eps``. A value for which ``_can_round`` is false is returned unchanged.
        """
        return t * self._noise(t, growth) if _can_round(t) else t

    def _noise(self, t: Tensor, growth: float) -> Tensor:
        """Return a tensor of the shape of ``t`` with random factors, which are uniform between ``1 - growth * eps`` and
        ``1 + growth * eps``.
        """
        width = growth * self.eps
        # A CPU takes seconds to draw as many numbers as a large result on a GPU has.
        place = t.device if t.device.type == "cuda" else torch.device("cpu")
        if place not in self._generators:
            self._generators[place] = torch.Generator(place).manual_seed(self.seed)
        noise = torch.rand(t.shape, generator=self._generators[place], device=place, dtype=torch.float64)
        return noise.mul_(2).sub_(1).mul_(width).add_(1).to(t.device, torch.float64 if not t.is_complex() else t.dtype)


def _can_round(t: Any) -> bool:
    """Return whether ``t`` is a nonempty floating-point or complex tensor with elements of at least four bytes. Return
    False for a tensor without memory, as on the meta device.
    """
    wide = isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.itemsize >= 4
    return wide and t.numel() > 0 and not without_memory(t)


# Operators without rounding errors: on the same numbers, every kernel must make the same decision.
EXACT_OPERATORS = frozenset(
    (
        *("round", "floor", "ceil", "trunc", "sign", "sgn", "signbit", "abs", "neg", "copysign", "heaviside"),
        *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_not", "searchsorted", "bucketize"),
        *("maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max", "relu", "threshold", "hardtanh"),
        *("max", "min", "amax", "amin", "argmax", "argmin", "sort", "argsort", "topk", "where", "masked_fill"),
        *("clone", "copy", "cat", "stack", "index", "index_select", "gather", "take", "flip", "roll", "repeat"),
        *("frexp", "nextafter", "fmod", "cummax", "cummin", "kthvalue", "median", "nanmedian", "mode", "nonzero"),
        *("_unique2", "unique_dim", "unique_consecutive", "scatter", "masked_scatter", "index_fill", "slice_scatter"),
        *(
            "select_scatter",
            "max_pool2d_with_indices",
            "max_pool3d_with_indices",
            "reflection_pad2d",
            "replication_pad2d",
        ),
        *("constant_pad_nd", "tril", "triu", "embedding", "masked_select", "repeat_interleave", "lift_fresh"),
        *("_to_copy", "scalar_tensor", "full", "ones", "zeros", "arange", "rand", "randn", "randint", "randperm"),
    )
)
SCAN_OPERATORS = ("aten::cumsum", "aten::cumprod", "aten::logcumsumexp")
SCATTER_OPERATORS = (
    "aten::index_add",
    "aten::scatter_add",
    "aten::index_put",
    "aten::scatter_reduce",
    "aten::index_reduce",
)


def _rounding_growth(name: str, args: Any) -> float:
    """Return the factor by which the rounding error of the operator ``name``, called with ``args``, exceeds that of one
    operation.

    For scans (such as ``cumsum``) and scatters (such as ``index_add``) it is the square root of the number of
    additions. For all other operators it is 1. The sums of other operators, such as a matrix product, are allowed for
    elsewhere, by the dims of the op's declaration.
    """
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if first is None:
        return 1.0
    if name.startswith(SCAN_OPERATORS):
        dim = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        return math.sqrt(max(1, first.shape[dim] if first.dim() else 1))
    if name.startswith(SCATTER_OPERATORS):
        return math.sqrt(max([1, *(v.numel() for v in _tensor_leaves(args[1:]) if not v.is_floating_point())]))
    return 1.0


def _tensor_leaves(values: Any) -> list[Tensor]:
    """Return the tensors inside nested lists, tuples and dicts, in order."""
    leaves: list[Tensor] = []
    map_leaves(lambda t: leaves.append(t) if isinstance(t, Tensor) else None, values)
    return leaves


def describe_kind_difference(got: Sequence[Tensor], own: Sequence[Tensor]) -> str:
    """Return a text that says how the dtypes or shapes of ``got`` differ from those of ``own``, the results of the
    reference. Return an empty string if they agree.
    """
    mine, theirs = ([(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in ts] for ts in (got, own))
    return "" if mine == theirs else f"results {mine}, those of the reference are {theirs}"


def compare_with_rounding(
    got: Sequence[Tensor],
    own: Sequence[Tensor],
    wide: Sequence[Tensor],
    sums: Reduction,
    recompute: Callable[[], Sequence[Tensor]],
    tolerance: float = 0.0,
) -> Difference:
    """Return the difference of ``got`` from the reference, as ``compare_within_tolerance`` does. If they differ,
    compare them again with a tolerance that grows by the estimated effect of rounding.

    ``own`` is the reference in its own precision, and ``wide`` is the reference in float64. ``recompute`` runs the
    reference in float64 again, to find how far rounding errors of single operations can carry the result. ``tolerance``
    is a relative deviation that the declaration admits.
    """
    check = partial(compare_within_tolerance, got, own, wide, sums, wide_sums=True, tolerance=tolerance)
    difference = check(near="none")
    if not difference.problem:
        return Difference(_describe_common_factors(got, own, wide, tolerance), difference.error)
    if not _may_be_rounding(got, own):
        return difference
    unit = rounding_unit(narrowest_dtype(got))
    allowed = rounding_allowance(recompute, wide, unit)
    if allowed is None:  # the size of the row stands for the rounding errors
        return check(near="row")
    difference = check(near="none", allowed=allowed)
    # Of thousands of elements, one may have small deviations in all of a few runs by chance.
    if difference.problem and difference.error <= DOUBTFUL:
        more = rounding_allowance(recompute, wide, unit, range(RUNS, RUNS + MORE_RUNS))
        if more is not None:
            allowed = [torch.maximum(*pair) for pair in zip(allowed, more, strict=True)]
            difference = check(near="none", allowed=allowed)
    if difference.problem:
        return difference
    # Elements that rounding in float32 changes by a unit of the last place of 16 bits may all be off alike.
    sure = [
        torch.where(a <= torch.finfo(g.dtype).eps * w.abs(), w, torch.nan) if g.is_floating_point() else w
        for a, g, w in zip(allowed, got, wide, strict=True)
    ]
    return Difference(_describe_common_factors(got, own, sure, tolerance), difference.error)


def _describe_common_factors(
    got: Sequence[Tensor], own: Sequence[Tensor], wide: Sequence[Tensor], tolerance: float
) -> str:
    """Return a text that names the first result whose numbers have a common factor, as ``describe_common_factor`` finds
    it. Return an empty string if none has one.
    """
    texts = (describe_common_factor(g, o, w, tolerance) for g, o, w in zip(got, own, wide, strict=True))
    return next((f"result {at}: {text}" for at, text in enumerate(texts) if text), "")


def narrowest_dtype(results: Sequence[Tensor]) -> torch.dtype:
    """Return the floating-point or complex dtype with the largest machine epsilon among the results. Return float64 if
    no result has such a dtype.
    """
    floats = [t.dtype for t in results if t.is_floating_point() or t.is_complex()]
    return min(floats, key=lambda d: -torch.finfo(d).eps, default=torch.float64)


def _may_be_rounding(got: Sequence[Tensor], own: Sequence[Tensor]) -> bool:
    """Return whether rounding can explain a difference between the results ``got`` and ``own``. It cannot if their
    shapes or dtypes differ, or if no result is floating-point or complex.
    """
    alike = len(got) == len(own) and all(
        g.shape == o.shape and g.dtype == o.dtype for g, o in zip(got, own, strict=True)
    )
    return alike and any(g.is_floating_point() or g.is_complex() for g in got)


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
