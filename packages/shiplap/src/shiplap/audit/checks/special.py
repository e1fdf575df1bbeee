"""``special``: NaN, infinite, subnormal, huge, cancelling, saturating values in every dtype; odd scalars, lists."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.dispatch.outputs import fresh_results, tensors_in_arguments
from shiplap.errors import ArgumentError
from shiplap.sampling.case import SampleCase, tree_map
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.pairwise import powers_of_two
from shiplap.sampling.run import (
    error_line,
    output_tensors,
    reference_effects,
    run_op,
    split_arguments,
    tensors_among,
    why_reference_missing,
)
from shiplap.sampling.samples import Samples
from shiplap.sampling.values import SOME_ZEROS
from shiplap.sampling.work_estimate import why_too_large


def special_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield samples with special values, odd scalars, lists, and values at thresholds."""
    yield from chain(
        samples.lists(), samples.thresholds(), samples.odd_scalars(), samples.special(), powers_of_two(samples)
    )


def observe_special(op: Op, case: SampleCase) -> Observation:
    """Compare one sample with the reference."""
    if reason := why_too_large(op, case):
        return Observation(skip=f"the reference would take too much: {reason}")
    try:
        if not case.device.startswith("cpu"):  # a row number out of range would end the process there
            reference_effects(op, tree_map(lambda t: t.cpu(), case.args))
        own = reference_effects(op, case.args)
    except Exception as e:
        if why_reference_missing(e):
            raise
        return Observation(skip=f"the reference refuses it: {error_line(e)}")
    if op.sampler is not None and case.recipe.values == SOME_ZEROS and not _all_finite(own):
        return Observation(skip="the reference takes no zeros in the place of a builder's numbers")
    if not tensors_among(case.args):
        return Observation(skip="a call without a tensor has no device")
    try:
        got = run_op(op, case)
    except ArgumentError as e:
        return Observation(skip=f"the declaration refuses it: {error_line(e)}")
    difference = against_reference(op, case, got, own)
    return Observation(difference.problem or _why_defaults_differ(op, case), error=difference.error)


def _why_defaults_differ(op: Op, case: SampleCase) -> str:
    """Return the fault on plain values if arguments that are left out are not the declaration's defaults."""
    if case.recipe.values != "ties" or not any(a.has_default for a in op.spec.args):
        return ""
    given = [a for a in op.spec.args if not a.has_default]
    args: Any = tuple(v if a in given else a.default for a, v in zip(op.spec.args, case.fresh(), strict=True))
    kept = tree_map(lambda t: t, args)
    positional, _ = split_arguments(op.spec, args)
    cut = next((i for i, a in enumerate(op.spec.args) if a.has_default), len(positional))
    if any(a not in given for a in op.spec.args[:cut]) or any(a in given for a in op.spec.args[cut:]):
        return ""
    try:
        expected = reference_effects(op, kept)
    except Exception:
        return ""
    full = SampleCase(case.recipe, case.seed, args, dict(op.bind(args).env), case.device)
    short = op.overload(*positional[:cut])
    outs = output_tensors(fresh_results(op.spec, args, short))
    difference = against_reference(op, full, (*outs, *_mutated_tensors(op, args)), expected)
    return f"with the defaults left out: {difference.problem}" if difference.problem else ""


def _all_finite(results: Iterable[Tensor]) -> bool:
    """Whether no floating-point result is infinite or NaN."""
    return all(bool(torch.isfinite(t).all()) for t in results if t.is_floating_point() and t.itemsize > 1)


def _mutated_tensors(op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the tensors that the op writes to."""
    return tuple(tensors_in_arguments([v for a, v in zip(op.spec.args, args, strict=True) if a.mutated]))


CHECK = Check(
    "special",
    order=40,
    observes="equals the reference for NaN, inf, -0.0, subnormal, huge, cancelling, saturating and skewed values "
    "in every dtype, for odd scalars, and for lists of 0, 1 and 3",
    observe=observe_special,
    cases=special_cases,
    needs=("numerics",),
    fix="do what the reference does with such values: subtract the maximum before exp, propagate NaN, add in float32",
)
