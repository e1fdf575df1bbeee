"""``transforms``: vmap and forward-mode AD are right where the op supports them. It may refuse, but not be silently
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from shiplap.audit.check import Check, Observation, why_random
from shiplap.dispatch import Op
from shiplap.errors import short_error_line
from shiplap.sampling.case import SampleCase, arguments_by_name
from shiplap.sampling.compare import derive_reduction
from shiplap.sampling.compare_to_reference import against_run, reference_derivatives
from shiplap.sampling.rounding import compare_with_rounding
from shiplap.sampling.run import call_op, floating_args, is_adopted, random_gradient
from shiplap.sampling.samples import Samples, with_other_values
from shiplap.torch_private import silenced_vmap_fallback

BATCH_SIZES = range(2, 9)  # how many calls vmap may make of one; three where no size fits


def why_skip_transforms(op: Op) -> str:
    """Return why the check ``transforms`` does not apply to the op, or an empty string if it does. It does not apply if
    results are random, arguments are mutated or sizes depend on data.
    """
    if reason := why_random(op):
        return reason
    return "it mutates arguments" if op.spec.mutated else "data-dependent sizes" if op.spec.bounds else ""


def transforms_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``transforms`` calls the op. They are the base sample, samples with other
    scalars, and one with larger sizes.
    """
    yield from chain(samples.plain(), samples.scalars(), islice(samples.grown(1), 1))


def observe_transforms(op: Op, case: SampleCase) -> Observation:
    """Compare vmap with a loop over samples, and forward-mode AD with that of the reference. The returned observation
    has a problem if results differ. An error of vmap or of forward-mode AD is no problem.
    """
    names = [n for n, v in arguments_by_name(op, case.args).items() if isinstance(v, Tensor)]
    if not names:
        return Observation(skip="no plain tensor argument")
    notes = []
    for batched in [[n] for n in names] + ([names] if len(names) > 1 else []):
        problem, note = _compare_vmap(op, case, batched)
        if problem:
            return Observation(f"vmap over {', '.join(batched)}: {problem}", fix="correct the vmap rule, or remove it")
        notes += [note] if note and note not in notes else []
    # A batch of one broadcasts where a rule mixes up dims.
    problem, _ = _compare_vmap(op, case, names, 1)
    if problem:
        return Observation(f"vmap over a batch of one: {problem}", fix="correct the vmap rule, or remove it")
    problem, note = _compare_tangents(op, case)
    if problem:
        return Observation(f"forward-mode AD: {problem}", fix="give the op a jvp rule, or let it refuse")
    return Observation(note="; ".join(filter(None, [*notes[:1], note])))


def _compare_vmap(op: Op, case: SampleCase, batched: list[str], count: int = 0) -> tuple[str, str]:
    """Compare vmap over the arguments ``batched`` with a loop of calls. Return ``(problem, note)``.

    ``problem`` says how the results differ, and ``note`` why they were not compared. Both are empty if the results
    agree. ``count`` is the size of the batch. If it is 0, ``_batch_of_row_count`` chooses the size.
    """
    count = count or _batch_of_row_count(op, case, batched)
    members = [
        case,
        *(with_other_values(op, replace(case, seed=case.seed + k)) for k in range(count - 1)),
    ]
    rows = []
    for member in members:
        fresh = zip(op.spec.args, case.fresh(), member.fresh(), strict=True)
        rows.append(tuple(new if a.name in batched else old for a, old, new in fresh))
    # A rule that ignores in_dims is right for one of the two only.
    for dim in (0, -1):
        stacked = tuple(
            torch.stack([row[i] for row in rows], dim if rows[0][i].dim() else 0) if a.name in batched else rows[0][i]
            for i, a in enumerate(op.spec.args)
        )
        dims = tuple(
            (dim if rows[0][i].dim() else 0) if a.name in batched else None for i, a in enumerate(op.spec.args)
        )
        try:
            with silenced_vmap_fallback():
                got = torch.vmap(lambda *args: call_op(op, args), in_dims=dims)(*stacked)
        except Exception as e:
            return "", f"vmap is refused: {short_error_line(e)}"
        if problem := _difference_from_loop(op, case, rows, got):
            return f"in_dims={dim}, against a loop: {problem}", ""
    return "", ""


def _batch_of_row_count(op: Op, case: SampleCase, batched: list[str]) -> int:
    """Return a batch size that equals the size of the first dim of a batched tensor, or 3 if no such size is in
    ``BATCH_SIZES``. A rule that mistakes the first dim for the batch then gives wrong results instead of an error.
    """
    shapes = [v.shape for n, v in arguments_by_name(op, case.args).items() if n in batched]
    return next((n for shape in reversed(shapes) for n in shape[:1] if n in BATCH_SIZES), 3)


def _difference_from_loop(op: Op, case: SampleCase, rows: Sequence[tuple[Any, ...]], got: Sequence[Tensor]) -> str:
    """Return a message that says how vmap's results ``got`` differ, beyond rounding, from one call of the op for each
    tuple of arguments in ``rows``. Return an empty string if they agree.
    """
    looped = _stack_results(call_op(op, row) for row in rows)
    difference = against_run(
        op, got, looped, derive_reduction(op.spec, case.env), lambda body: _stack_results(body(op, row) for row in rows)
    )
    return difference.problem


def _stack_results(rows: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """Return one tensor for each result of the op. It holds the result of every call in ``rows``, stacked along a new
    first dim.
    """
    return [torch.stack(outs) for outs in zip(*rows, strict=True)]


def _compare_tangents(op: Op, case: SampleCase) -> tuple[str, str]:
    """Compare the op's forward-mode tangents with those of the reference, along all arguments together and along each
    alone. Return ``(problem, note)``.

    ``problem`` says how the tangents differ, and ``note`` why they were not compared. Both are empty if the tangents
    agree.
    """
    names, note = floating_args(op, case), ""
    for moving in [names, *([n] for n in names if len(names) > 1)] if names else ():
        problem, note = _compare_tangents_along(op, case, moving)
        if problem or note:
            return problem and (problem if moving is names else f"along {moving[0]} alone: {problem}"), note
    return "", note


def _compare_tangents_along(op: Op, case: SampleCase, names: Collection[str]) -> tuple[str, str]:
    """Compare the op's tangents (forward-mode derivatives) along the arguments ``names`` with the reference's. Return
    ``(problem, note)``.

    ``problem`` says how the tangents differ, and ``note`` why they could not be compared. Both are empty if the
    tangents agree.
    """
    rng = torch.Generator().manual_seed(case.seed)
    directions = {
        n: random_gradient(v, rng).to(v.device, v.dtype)
        for n, v in arguments_by_name(op, case.args).items()
        if n in names
    }
    derive = partial(_tangents_of_results, op, directions)
    try:
        own, wide, widened = reference_derivatives(op, case, derive)
    except Exception as e:
        return "", f"torch has no tangent of the reference: {short_error_line(e)}"
    try:
        got = derive(partial(call_op, op), case.fresh())
    except Exception as e:
        return "", f"forward-mode AD is refused: {short_error_line(e)}"
    for index, (g, o, w) in enumerate(zip(got, own, wide, strict=True)):
        if g is None and w is not None and bool((w != 0).any()):
            silent = f"result {index} has no tangent, silently; the reference has one"
            # torch.library gives an op no place for a rule of forward mode: not its author's fault
            return ("", f"forward-mode AD: {silent}") if is_adopted(op) else (silent, "")
        if g is not None and o is not None and w is not None:
            sums, repeated = derive_reduction(op.spec, case.env), partial(lambda i: [widened()[i]], index)
            difference = compare_with_rounding([g], [o], [w], sums, repeated, op.spec.tolerated)
            if difference.problem:
                return f"the tangent of {difference.problem}", ""
    return "", ""


def _tangents_of_results(
    op: Op, directions: dict[str, Tensor], run: Callable[..., Sequence[Tensor]], args: tuple[Any, ...]
) -> list[Tensor | None]:
    """Return the forward-mode tangent of each result of ``run(args)``, or None for a result that has none.
    ``directions`` maps names of arguments to their tangents.
    """
    with forward_ad.dual_level():
        duals = tuple(
            forward_ad.make_dual(v, directions[n].to(v.dtype)) if n in directions else v
            for n, v in arguments_by_name(op, args).items()
        )
        tangents = [
            forward_ad.unpack_dual(o).tangent if o.is_floating_point() or o.is_complex() else None for o in run(duals)
        ]
        return [None if t is None else t.clone() for t in tangents]


CHECK = Check(
    "transforms",
    order=210,
    observes="vmap equals a loop, and a tangent equals the reference's, or they are refused",
    observe=observe_transforms,
    cases=transforms_cases,
    varies=("mode",),
    skips=why_skip_transforms,
    needs=("determinism", "numerics", "gradient"),
    fix="give the op rules for vmap and forward-mode AD, or let it refuse",
    patience=60.0,
)
