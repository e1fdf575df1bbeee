"""Comparison of an op with its reference, within a tolerance from dtypes, lengths of sums, and cancellation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shiplap.declare.values import Args
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase, plain_copies, tree_map, widen_tensor
from shiplap.sampling.compare import (
    Difference,
    Reduction,
    agrees_without_float64,
    compare_within_tolerance,
    derive_reduction,
)
from shiplap.sampling.rounding import compare_with_rounding, describe_kind_difference
from shiplap.sampling.run import reference_effects, reference_effects64, run_op, surrogate_results
from shiplap.sampling.unordered import match_unordered_rows, sort_unordered_rows


def against_reference(
    op: Op,
    case: SampleCase,
    got: Sequence[Tensor] | None = None,
    own: Sequence[Tensor] | None = None,
    *,
    measured: bool = True,
) -> Difference:
    """Return the difference between the effects of the op on ``case`` and those of its reference.

    The effects are the results and the arguments that the op mutates. ``got`` are those of the op and ``own`` those of
    the reference. Each is computed if it is None. An element outside the tolerance counts as wrong only if the
    estimated effect of rounding does not explain it. For a random op, only dtypes, shapes and finiteness are compared.
    If ``measured`` is false, the error of results that agree whatever float64 shows is not computed, and is 0.
    """
    own = reference_effects(op, case.args) if own is None else own
    got = run_op(op, case) if got is None else got
    if op.spec.random:  # the check `distribution` compares values
        return Difference(describe_kind_difference(got, own) or _lost_finite_results(got, own))
    sums = derive_reduction(op.spec, case.env)
    plain = not op.spec.unordered and not any(t.is_floating_point() and t.itemsize == 2 for t in own)
    if not measured and plain and agrees_without_float64(got, own, sums, wide_sums=True, near="none"):
        return Difference()
    wide = reference_effects64(op, case.args)
    if op.spec.unordered:
        got, wide = (
            match_unordered_rows(op.spec, sort_unordered_rows(op.spec, tuple(got)), own),
            match_unordered_rows(op.spec, wide, own),
        )
    args = tree_map(widen_tensor, case.args)
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
