"""``special``: NaN, infinite, subnormal, huge, cancelling, saturating values in every dtype; odd scalars, lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.dispatch.outputs import flatten_op_results, fresh_results
from shiplap.errors import ArgumentError, error_line
from shiplap.sampling.builder import builder_takes_values
from shiplap.sampling.case import SampleCase, tensors_among, tree_map
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.pairwise import powers_of_two, scalars_of_thresholds, scalars_of_values
from shiplap.sampling.run import (
    all_finite,
    floating_args,
    needs_builder,
    op_effects,
    reference_effects,
    run_op,
    why_reference_missing,
)
from shiplap.sampling.samples import Samples
from shiplap.sampling.values import SOME_ZEROS
from shiplap.sampling.work_estimate import why_too_large

REFUSAL_FIX = "handle it in the kernel, or refuse it in the reference with the same error"
BUILDER_NOTE = (
    "of floats only what the builder of samples draws, some of them zero: it draws NaN, infinity and others only if it "
    'reads sizes.get("values")'
)
ZEROS_FIX = (
    "handle zeros as the reference does: a tenth of the builder's floats was set to zero. If the op relies on what no "
    'longer holds between them then, let the builder read sizes.get("values") and draw zeros itself'
)


def special_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``special`` calls the op.

    They have lists of unusual lengths, values near the numeric constants in the op's code, unusual scalars, special
    values such as NaN, or sizes that are powers of two.
    """
    yield from chain(
        samples.lists(), samples.thresholds(), samples.odd_scalars(), samples.special(), powers_of_two(samples)
    )
    yield from chain(scalars_of_values(samples), scalars_of_thresholds(samples))


def observe_special(op: Op, case: SampleCase) -> Observation:
    """Compare the op's results on one sample with the reference's. The returned observation has a problem if they
    differ. It is a ``skip`` if the reference refuses the sample or would take too long.
    """
    if reason := why_too_large(op, case):
        return Observation(skip=f"the reference would take too much: {reason}")
    try:
        if not case.device.startswith("cpu"):  # a row number out of range would end the process there
            reference_effects(op, tree_map(lambda t: t.cpu(), case.args))
        own = reference_effects(op, case.args)
    except Exception as e:
        if why_reference_missing(e):
            raise
        return Observation(skip=f"the reference refuses it: {error_line(e)}", limited=needs_builder(op))
    if op.sampler is not None and case.recipe.values == SOME_ZEROS and not all_finite(own):
        return Observation(skip="the reference takes no zeros in the place of a builder's numbers")
    if not tensors_among(case.args):
        return Observation(skip="a call without a tensor has no device")
    try:
        got = run_op(op, case)
    except ArgumentError as e:
        if case.recipe.scalars == Samples(op, case.seed, case.device).base.scalars:
            return Observation(
                f"the kernel refuses this input with {error_line(e)}, the reference does not", fix=REFUSAL_FIX
            )
        return Observation(skip=f"the declaration refuses it: {error_line(e)}")  # a scalar beyond a C type
    difference = against_reference(op, case, got, own)
    note = BUILDER_NOTE if op.sampler is not None and not builder_takes_values(op) and floating_args(op, case) else ""
    problem = difference.problem or _why_defaults_differ(op, case)
    changed = difference.problem and note and case.recipe.values == SOME_ZEROS
    return Observation(problem, error=difference.error, note=note, fix=ZEROS_FIX if changed else "")


def _why_defaults_differ(op: Op, case: SampleCase) -> str:
    """Return a message that says how a call with all defaults left out differs from the reference with the declared
    defaults. Return an empty string if they agree, or if arguments cannot be left out. Only samples with many equal
    values are compared.
    """
    if case.recipe.values != "ties" or not any(a.has_default for a in op.spec.args):
        return ""
    given = [a for a in op.spec.args if not a.has_default]
    args: Any = tuple(v if a in given else a.default for a, v in zip(op.spec.args, case.fresh(), strict=True))
    kept = tree_map(lambda t: t, args)
    positional, _ = op.spec.split(args)
    # Arguments can only be left out at the end.
    cut = next((i for i, a in enumerate(op.spec.args) if a.has_default), len(positional))
    if any(a not in given for a in op.spec.args[:cut]) or any(a in given for a in op.spec.args[cut:]):
        return ""
    try:
        expected = reference_effects(op, kept)
    except Exception:
        return ""
    full = replace(case, args=args, env=dict(op.bind(args).env))
    short = op.overload(*positional[:cut])
    outs = flatten_op_results(fresh_results(op.spec, args, short))
    difference = against_reference(op, full, op_effects(op, args, outs), expected)
    return f"with the defaults left out: {difference.problem}" if difference.problem else ""


CHECK = Check(
    "special",
    order=40,
    observes="equals the reference for NaN, inf, -0.0, subnormal, huge, cancelling, saturating and skewed values "
    "in every dtype, for odd scalars, and for lists of 0, 1, 3, 9 and 130",
    observe=observe_special,
    cases=special_cases,
    needs=("numerics",),
    fix="do what the reference does with such values: subtract the maximum before exp, propagate NaN, add in float32",
)
