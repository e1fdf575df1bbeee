"""``schema``: the op writes to the arguments that its schema declares, and to nothing else.

Inputs are compared before and after the call with all bytes of their storages, also those that a sliced input skips.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shiplap.audit.check import Check, Observation
from shiplap.declare import Arg
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase, tensors_among
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.pairwise import large_samples
from shiplap.sampling.run import call_op, can_carry_gradient, is_adopted, sum_to_real
from shiplap.sampling.samples import Samples


def schema_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``schema`` calls the op.

    They are samples with all kinds of values, all dtypes and all layouts, and large ones. An op may copy an input only
    to convert its dtype, and write to inputs of any other dtype. So all dtypes are tried.
    """
    yield from chain(samples.values(), samples.dtypes())  # what converts an input copies it in other dtypes alone
    yield from (c for c in samples.layouts() if "every" in dict(c.recipe.layouts))
    yield from large_samples(samples)


def observe_schema(op: Op, case: SampleCase) -> Observation:
    """Compare the bytes of all inputs' storages before and after a call. The returned observation has a problem if the
    op writes to bytes that the declaration does not let it write to. It also has one if the schema of an adopted op
    differs from its declaration.
    """
    if is_adopted(op) and (problem := _why_schema_differs(op)):
        return Observation(problem, fix="correct the schema of the op, or the declaration")
    args = case.fresh()
    # Whole storages, since an op may write beside the view that it gets.
    before = [_clone_storages(v) for v in args]
    call_op(op, args)
    for arg, value, saved in zip(op.spec.args, args, before, strict=True):
        for index, (t, bytes_before) in enumerate(zip(_tensors_in_value(value), saved, strict=True)):
            changed = _describe_change(t, bytes_before, arg)
            if changed:
                label = f"{arg.name}[{index}]" if arg.many else arg.name
                return Observation(f"{label} {changed}")
    plain = op.spec.mutated and case.recipe == Samples(op, case.seed, case.device).base
    return _observe_autograd_notice(op, case) if plain else Observation()


def _observe_autograd_notice(op: Op, case: SampleCase) -> Observation:
    """Call the op so that it writes to a tensor that autograd has saved for a backward pass, and return the
    observation. The observation has a problem if the backward pass uses the new values instead of raising an error.
    """
    args = case.fresh()
    for arg, value in zip(op.spec.args, args, strict=True):
        for t in _tensors_in_value(value) if arg.mutated else ():
            if not can_carry_gradient(t):
                continue
            before, factor = t.clone(), torch.ones_like(t, requires_grad=True)
            product = factor * t  # saves t
            call_op(op, args)
            try:
                sum_to_real(product).backward()
            except RuntimeError:
                continue  # noticed
            if bitwise_difference([t], [before], "before"):
                return Observation(
                    f"{arg.name} is written to unnoticed by autograd: what saved it for a backward uses the new values",
                    fix="write by torch's operators, or call torch.autograd.graph.increment_version",
                )
    return Observation()


def _tensors_in_value(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, an argument, including those in a list."""
    return tensors_among([value])


def _clone_storages(value: Any) -> list[Tensor]:
    """Return a copy of the whole storage of each tensor in ``value``, an argument, as bytes."""
    return [_storage_bytes(t).clone() for t in _tensors_in_value(value)]


def _storage_bytes(t: Tensor) -> Tensor:
    """Return all bytes of the storage of ``t``, as a uint8 tensor that shares the memory of ``t``."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def _describe_change(t: Tensor, before: Tensor, arg: Arg) -> str:
    """Return a message that says how the storage of the argument ``arg`` differs from ``before`` where the declaration
    forbids a change. Return an empty string if it does not. ``t`` is the argument's tensor after the call.
    """
    after = _storage_bytes(t)
    if after.shape != before.shape:
        return f"was given other memory, of {after.numel()} bytes in place of {before.numel()}"
    different = after != before
    if arg.mutated:
        # A mask of the bytes that the argument's view covers: those the op may write.
        mine = torch.zeros(before.numel() // t.itemsize, dtype=torch.bool, device=t.device)
        mine.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(True)
        different[: mine.numel() * t.itemsize] &= ~mine.repeat_interleave(t.itemsize)
        what = "was written outside of the view that was passed"
    else:
        what = "was changed, and the declaration does not say mutates=..."
    return f"{what}: {int(different.sum())} of {before.numel()} bytes" if different.any() else ""


def _why_schema_differs(op: Op) -> str:
    """Return a message that says how the schema of an adopted op differs from its declaration, or an empty string if
    they agree.

    An adopted op belongs to another library and is only declared here. Names of arguments, mutations, defaults and the
    number of results are compared.
    """
    real = op.overload._schema
    names = [a.name for a in real.arguments]
    declared = [a.name for a in op.spec.args]
    if names != declared:
        return f"arguments {', '.join(names)}, declared {', '.join(declared)}"
    for mine, theirs in zip(op.spec.args, real.arguments, strict=True):
        writes = theirs.alias_info is not None and theirs.alias_info.is_write
        if writes != mine.mutated:
            return f"{mine.name} is {'' if writes else 'not '}mutated in {real}, the declaration says otherwise"
        if theirs.has_default_value() and mine.has_default and _unequal(theirs.default_value, mine.default):
            return f"{mine.name} is {theirs.default_value!r} by default in {real}, declared {mine.default!r}"
    declared_results = len(op.spec.returns or op.spec.outputs)
    if len(real.returns) != declared_results:
        return f"{len(real.returns)} results in {real}, declared {declared_results}"
    return ""


def _unequal(theirs: Any, mine: Any) -> bool:
    """Return whether two defaults of an argument differ. ``theirs`` is that of another library's schema, and ``mine``
    that of the declaration.

    A list equals a tuple with the same members. Values other than None, numbers, strings and lists are not compared and
    count as equal.
    """
    theirs, mine = (list(v) if isinstance(v, (list, tuple)) else v for v in (theirs, mine))
    plain = (bool, int, float, str, list, type(None))
    return isinstance(theirs, plain) and isinstance(mine, plain) and theirs != mine


CHECK = Check(
    "schema",
    order=80,
    observes="the bytes under every input are as before the call, except where the schema says mutated",
    observe=observe_schema,
    cases=schema_cases,
    obligations=("mutation",),
    fix="work on a copy, or declare mutates=(...)",
)
