"""Comparison of an op with its reference, within a tolerance from dtypes, lengths of sums, and cancellation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shiplap.declare.values import Args
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase, plain_copies, tree_map
from shiplap.sampling.compare import Difference, Reduction, compare_within_tolerance, derive_reduction
from shiplap.sampling.rounding import rounding_allowance, rounding_unit
from shiplap.sampling.run import reference_effects, reference_effects64, run_op, surrogate_results, widen_tensor
from shiplap.sampling.unordered import match_unordered_rows, sort_unordered_rows


def against_reference(
    op: Op, case: SampleCase, got: Sequence[Tensor] | None = None, own: Sequence[Tensor] | None = None
) -> Difference:
    """Return the difference between the effects of the op on ``case`` and those of its reference.

    The effects are the results and the arguments that the op mutates. ``got`` are those of the op and ``own`` those of
    the reference. Each is computed if it is None. An element outside the tolerance counts as wrong only if the
    estimated effect of rounding does not explain it. For a random op, only dtypes, shapes and finiteness are compared.
    """
    own = reference_effects(op, case.args) if own is None else own
    got = run_op(op, case) if got is None else got
    if op.spec.random:  # the check `distribution` compares values
        return Difference(describe_kind_difference(got, own) or _lost_finite_results(got, own))
    wide = reference_effects64(op, case.args)
    if op.spec.unordered:
        got, wide = (
            match_unordered_rows(op.spec, sort_unordered_rows(op.spec, tuple(got)), own),
            match_unordered_rows(op.spec, wide, own),
        )
    args = tree_map(widen_tensor, case.args)
    sums = derive_reduction(op.spec, case.env)
    return compare_with_rounding(got, own, wide, sums, lambda: reference_effects(op, args), op.spec.tolerated)


def against_run(
    op: Op,
    got: Sequence[Tensor],
    own: Sequence[Tensor],
    sums: Reduction,
    repeated: Callable[[Callable[[Op, Args], tuple[Tensor, ...]]], Sequence[Tensor]],
) -> Difference:
    """Return the difference of the results ``got`` of a run from ``own``, beyond the estimated effect of rounding.

    ``own`` are the results of the same run with the reference in place of the op. ``repeated(f)`` makes the run again,
    with ``f(op, args)`` in place of each call of the op. In these runs ``f`` is the reference in float64. ``sums`` are
    the length and precision of the op's sums.
    """
    difference = compare_within_tolerance(got, own, [widen_tensor(t) for t in own], sums, tolerance=op.spec.tolerated)
    if not difference.problem or op.spec.random:
        return difference
    return compare_with_rounding(
        got,
        own,
        repeated(reference_effects64),
        sums,
        lambda: repeated(lambda op, args: reference_effects(op, tree_map(widen_tensor, args))),
        op.spec.tolerated,
    )


def reference_derivatives(
    op: Op, case: SampleCase, derive: Callable[..., list[Any]]
) -> tuple[list[Any], list[Any], Callable[[], list[Any]]]:
    """Return derivatives of the op's reference at the case's arguments, as a tuple of two lists and a function.

    The first list is in the reference's own precision and the second in float64. The function returns the list in
    float64, newly computed. ``derive(forward, args)`` returns the derivatives of ``forward`` at ``args``, and may
    change ``args``.
    """
    reference = partial(surrogate_results, op)

    def widened() -> list[Any]:
        """Return the derivatives of the op's reference in float64, at copies of the case's arguments. ``derive``,
        ``reference`` and ``case`` are those of the enclosing function.
        """
        return derive(reference, tree_map(widen_tensor, plain_copies(case.args)))

    return derive(reference, plain_copies(case.args)), widened(), widened


def describe_kind_difference(got: Sequence[Tensor], own: Sequence[Tensor]) -> str:
    """Return a text that says how the dtypes or shapes of ``got`` differ from those of ``own``, the results of the
    reference. Return an empty string if they agree.
    """
    mine, theirs = ([(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in ts] for ts in (got, own))
    return "" if mine == theirs else f"results {mine}, those of the reference are {theirs}"


def _lost_finite_results(got: Sequence[Tensor], own: Sequence[Tensor]) -> str:
    """Return a text that names the first result of a random op with a NaN or infinite element where the reference's
    result has none. Return an empty string if there is no such result.

    ``got`` are the op's results and ``own`` the reference's. Random numbers are seldom not finite by chance, so such a
    difference is a fault.
    """
    for index, (g, o) in enumerate(zip(got, own, strict=True)):
        if (g.is_floating_point() or g.is_complex()) and bool(torch.isfinite(o).all()):
            lost = int((~torch.isfinite(g)).sum())
            if lost:
                return f"result {index}: {lost} of {g.numel()} are NaN or infinite, none of the reference's is"
    return ""


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
    if not difference.problem or not _may_be_rounding(got, own):
        return difference
    allowed = rounding_allowance(recompute, wide, rounding_unit(narrowest_dtype(got)))
    # If the reference cannot run in that mode, the size of the row stands for its rounding errors.
    return check(near="row") if allowed is None else check(near="none", allowed=allowed)


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
