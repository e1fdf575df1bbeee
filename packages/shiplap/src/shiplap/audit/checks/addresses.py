"""``addresses``: the same sizes at other addresses, aligned or not, while the first tensors are still alive.

Plans of vendor libraries keep pointers (a bias, scales, sparse metadata) that belong to one call, and promise an
alignment that the next tensor may not have. Both are right until two models, or two views, share a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

from torch import Tensor

from shiplap.audit.check import Check, Observation
from shiplap.audit.guarded_memory import copy_beside_guard
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase, tensors_among, tree_map
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.layouts import apply_layout, has_independent_values
from shiplap.sampling.run import reference_effects, run_on
from shiplap.sampling.samples import Samples, with_other_values

KEEP_FIX = "keep no pointer in a plan or descriptor: set it before each launch, or make it part of the plan's key"
ALIGN_FIX = "promise no more alignment than one element has, or test the pointer and take a path without the promise"


BESIDE_FIX = "load no element beyond the last one, nor before the first: mask the tail of the last vector"


def addresses_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``addresses`` calls the op. They are the base sample, one for every dtype,
    and one with larger sizes.
    """
    yield from chain(samples.plain(), samples.dtypes(), islice(samples.grown(1), 1))


def observe_addresses(op: Op, case: SampleCase) -> Observation:
    """Call the op with tensors at other addresses, each time followed by a call with the first tensors again. The
    returned observation has a problem if a result differs from the reference's.
    """
    first = case.fresh()
    kept = [first]  # everything stays alive: an address that is used again would hide the fault
    if problem := _difference_on(op, case, first):
        return Observation(problem)
    tried = 0
    for what, args, fix in _moved_arguments(op, case, first):
        kept.append(args)
        tried += 1
        if problem := _difference_on(op, case, args):
            return Observation(f"{what}: {problem}", fix=fix)
        if problem := _difference_on(op, case, first):
            return Observation(f"the first tensors again, after {what}: {problem}", fix=KEEP_FIX)
    for after in (True, False):
        # An access beside the tensor ends the process, which the parent reports as a failure of this check.
        beside = tree_map(partial(copy_beside_guard, after=after), case.args)
        if problem := _difference_on(op, case, beside):
            return Observation(f"tensors that end at the limit of the readable memory: {problem}", fix=BESIDE_FIX)
    if not tried:
        return Observation(skip="no tensor can be moved")
    return Observation(note=f"{tried} moves", axes=("alignment",))


def _difference_on(op: Op, case: SampleCase, args: tuple[Any, ...]) -> str:
    """Return a message that says how the op's results on ``args`` differ from the reference's, or an empty string if
    they agree. The op gets copies of the arguments that it mutates.
    """
    own = reference_effects(op, args)
    pairs = zip(op.spec.args, args, strict=True)
    given = tuple(tree_map(Tensor.clone, [v])[0] if a.mutated else v for a, v in pairs)
    return against_reference(op, case.with_args(args), run_on(op, given), own, measured=False).problem


def _moved_arguments(op: Op, case: SampleCase, first: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...], str]]:
    """Yield ``(description, arguments, fix)`` with arguments at other addresses than those of ``first``.

    First each tensor argument alone is moved, then all of them together. Each is moved to a new address with other
    values, and then to an address that is aligned to one element only. ``fix`` is the advice if the results are wrong.
    """
    changed = with_other_values(op, case).fresh()
    # A builder of samples may return other sizes, which would test nothing about addresses.
    if [t.shape for t in tensors_among(changed)] != [t.shape for t in tensors_among(first)]:
        changed = case.fresh()
    # One argument at a time shows which pointer the plan kept.
    for position, arg in enumerate(op.spec.args):
        new = changed[position]
        if not isinstance(new, Tensor) or arg.mutated or not new.numel() or not has_independent_values(new):
            continue  # it may have to fit the other arguments: those move all together
        for what, value, fix in (
            (f"another {arg.name}", new, KEEP_FIX),
            (f"{arg.name} at an address aligned to one element", _at_odd_address(new), ALIGN_FIX),
        ):
            yield f"{what}, same size", (*first[:position], value, *first[position + 1 :]), fix
    if tensors_among(first):
        yield "all tensors elsewhere", changed, KEEP_FIX
        yield "all tensors at addresses aligned to one element", tree_map(_at_odd_address, changed), ALIGN_FIX


def _at_odd_address(t: Tensor) -> Tensor:
    """Return a copy of ``t`` at an address that is a multiple of the element size, but has no larger alignment."""
    return apply_layout(t, "offset")


CHECK = Check(
    "addresses",
    order=120,
    observes="the same sizes with other values at other addresses, and at misaligned ones, equal the reference, "
    "also when the first tensors come again; nothing is read beside a tensor",
    observe=observe_addresses,
    cases=addresses_cases,
    varies=("order of calls",),
    needs=("numerics", "edges"),
    fix=KEEP_FIX,
)
