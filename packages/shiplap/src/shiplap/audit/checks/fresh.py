"""``fresh``: every call returns memory of its own, which neither later calls nor writes to the inputs change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from shiplap.audit.check import Check, Observation, why_random
from shiplap.dispatch import Op
from shiplap.plan.values import has_own_memory
from shiplap.sampling.case import SampleCase, tensors_among, tree_map
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.layouts import has_independent_values
from shiplap.sampling.pairwise import large_samples
from shiplap.sampling.run import call_op, reference_accepts, run_op
from shiplap.sampling.samples import Samples, with_other_values


def fresh_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``fresh`` calls the op.

    They are the base sample, and larger and very large ones. Others have sizes of 1, layouts or scalars for which a
    kernel might return a view in place of a copy.
    """
    yield from chain(samples.plain(), samples.grown(1))
    ones = (c for c in samples.edges() if 1 in dict(c.recipe.sizes).values())
    yield from chain(samples.scalars(), ones, samples.layouts())  # where a view may do in place of a copy
    yield from large_samples(samples)


def observe_fresh(op: Op, case: SampleCase) -> Observation:
    """Call the op several times. The returned observation has a problem if an output shares memory with an input or
    another output, if it changes with later calls, or if a later call returns an old result.
    """
    args = case.fresh()
    first = call_op(op, args)
    if shared := _find_shared_memory(first, tensors_among(args)):
        return Observation(f"output {shared[0]} shares memory with {shared[1]}", fix="return a copy: .clone()")
    if case.recipe.layouts or 1 in dict(case.recipe.sizes).values():
        return Observation()  # what is kept between calls shows with ordinary samples
    kept = [o.detach().clone() for o in first]
    # Other values, because equal results could not show an overwritten output.
    second_case = with_other_values(op, case)
    second = call_op(op, second_case.fresh())
    if shared := _find_shared_memory(first, list(second), "the next call's output"):
        return Observation(f"output {shared[0]} shares memory with {shared[1]}")
    if problem := bitwise_difference(first, kept, "before the next call"):
        return Observation(f"an earlier output changed when the op was called with other values: {problem}")
    if problem := _why_reordered_call_wrong(op, case):
        return Observation(f"after a call with the same numbers in another order: {problem}")
    return replace(_observe_stale_result(op, case, second_case), axes=("order of calls",))


def _why_reordered_call_wrong(op: Op, case: SampleCase) -> str:
    """Call the op with the elements of its tensors in another order. If it returns the result of the call in the
    original order, return a message that describes the wrong result. Otherwise return an empty string.

    An op that caches its result by the sum of its input is wrong in this way. Any other wrong result is left to the
    check ``numerics``. On a GPU, values of the op's own sample builder keep their order, since they may be indices.
    """
    if op.sampler is not None and torch.device(case.device).type != "cpu":
        return ""  # an index that is out of range raises on the CPU, and ends the use of a GPU
    args = tree_map(lambda t: t.flatten().roll(1).reshape(t.shape) if has_independent_values(t) else t, case.fresh())
    if not reference_accepts(op, args):
        return ""
    before, turned = run_op(op, case), replace(case, args=args)
    problem = against_reference(op, turned, measured=False).problem
    return problem if problem and not bitwise_difference(run_op(op, turned), before) else ""


def _observe_stale_result(op: Op, case: SampleCase, changed: SampleCase) -> Observation:
    """Call the op, write new values into the same tensors and call it again. The returned observation has a problem if
    the second result is not that of the new values.
    """
    shapes = [[t.shape for t in tensors_among(c.args)] for c in (case, changed)]
    # The new contents must fit into the old tensors.
    if op.spec.mutated or case.graph_key != changed.graph_key or shapes[0] != shapes[1]:
        return Observation()
    args = case.fresh()
    if not all(map(has_own_memory, tensors_among(args))):
        return Observation()  # an expanded tensor, into which nothing can be written
    call_op(op, args)
    for t, new in zip(tensors_among(args), tensors_among(changed.args), strict=True):
        t.copy_(new)
    expected = run_op(op, changed)
    if any(bitwise_difference(run_op(op, changed), expected) for _ in range(3)):
        return Observation()  # varies by itself: see determinism
    problem = bitwise_difference(call_op(op, args), expected, "with the same values in new tensors")
    return Observation(f"an input overwritten in place gives a stale result: {problem}" if problem else "")


def _find_shared_memory(outs: tuple[Tensor, ...], others: list[Tensor], name: str = "input") -> tuple[int, str] | None:
    """Return ``(index, text)`` of the first of ``outs`` that shares memory with one of ``others`` or with an earlier
    output. The text names that tensor, such as ``input 0`` or ``output 1``. ``name`` is the word for a tensor of
    ``others``. Return None if there is none. Tensors without elements share nothing.
    """
    for i, out in enumerate(outs):
        pointer = out.untyped_storage().data_ptr()
        # A tensor without elements shares no memory, whatever its address is.
        if not pointer or not out.numel():
            continue
        rivals = [(f"{name} {j}", t) for j, t in enumerate(others)] + [
            (f"output {j}", t) for j, t in enumerate(outs) if j < i
        ]
        for label, t in rivals:
            if t.numel() and t.untyped_storage().data_ptr() == pointer:
                return i, label
    return None


def why_skip_fresh(op: Op) -> str:
    """Return why the check ``fresh`` does not apply to the op, or an empty string if it does. It does not apply if
    results are random or may be views.
    """
    return why_random(op) or ("its results may be views" if op.spec.view else "")


CHECK = Check(
    "fresh",
    order=110,
    observes="outputs own their memory; a second call leaves the first output alone and sees inputs changed in place",
    observe=observe_fresh,
    cases=fresh_cases,
    obligations=("alias",),
    skips=why_skip_fresh,
    fix="allocate the output in every call (torch.empty, or an out-style kernel); keep no buffer between calls",
)
