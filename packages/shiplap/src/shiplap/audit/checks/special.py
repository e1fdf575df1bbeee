"""``special``: NaN, infinite, subnormal, huge, cancelling, saturating values in every dtype; odd scalars, lists."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.dispatch.check_results import made_of
from shiplap.dispatch.outputs import tensors_of
from shiplap.errors import ArgumentError
from shiplap.sampling.case import Case, tree_map
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.pairwise import powers
from shiplap.sampling.run import last_line, outputs, reference, run, split, tensors, unwritten
from shiplap.sampling.samples import Samples
from shiplap.sampling.work_estimate import outsized


def cases(samples: Samples) -> Iterable[Case]:
    """Yield samples with special values, odd scalars, lists, and values at thresholds."""
    yield from chain(samples.lists(), samples.thresholds(), samples.odd_scalars(), samples.special(), powers(samples))


def observe(op: Op, case: Case) -> Observation:
    """Compare one sample with the reference."""
    if reason := outsized(op, case):
        return Observation(skip=f"the reference would take too much: {reason}")
    try:
        if not case.device.startswith("cpu"):  # a row number out of range would end the process there
            reference(op, tree_map(lambda t: t.cpu(), case.args))
        own = reference(op, case.args)
    except Exception as e:
        if unwritten(e):
            raise
        return Observation(skip=f"the reference refuses it: {last_line(e)}")
    if not tensors(case.args):
        return Observation(skip="a call without a tensor has no device")
    try:
        got = run(op, case)
    except ArgumentError as e:
        return Observation(skip=f"the declaration refuses it: {last_line(e)}")
    difference = against_reference(op, case, got, own)
    return Observation(difference.problem or _defaults(op, case), error=difference.error)


def _defaults(op: Op, case: Case) -> str:
    """Return the fault on plain values if arguments that are left out are not the declaration's defaults."""
    if case.recipe.values != "ties" or not any(a.has_default for a in op.spec.args):
        return ""
    given = [a for a in op.spec.args if not a.has_default]
    args: Any = tuple(v if a in given else a.default for a, v in zip(op.spec.args, case.fresh(), strict=True))
    kept = tree_map(lambda t: t, args)
    positional, _ = split(op.spec, args)
    cut = next((i for i, a in enumerate(op.spec.args) if a.has_default), len(positional))
    if any(a not in given for a in op.spec.args[:cut]) or any(a in given for a in op.spec.args[cut:]):
        return ""
    try:
        expected = reference(op, kept)
    except Exception:
        return ""
    full = Case(case.recipe, case.seed, args, dict(op.bind(args).env), case.device)
    short = op.overload(*positional[:cut])
    outs = outputs(made_of(op.spec, args, short))
    difference = against_reference(op, full, (*outs, *_mutated(op, args)), expected)
    return f"with the defaults left out: {difference.problem}" if difference.problem else ""


def _mutated(op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the tensors that the op writes to."""
    return tuple(tensors_of([v for a, v in zip(op.spec.args, args, strict=True) if a.mutated]))


CHECK = Check(
    "special",
    order=40,
    observes="equals the reference for NaN, inf, -0.0, subnormal, huge, cancelling, saturating and skewed values "
    "in every dtype, for odd scalars, and for lists of 0, 1 and 3",
    observe=observe,
    cases=cases,
    needs=("numerics",),
    fix="do what the reference does with such values: subtract the maximum before exp, propagate NaN, add in float32",
)
