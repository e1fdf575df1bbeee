"""The arguments of an op that no sample shows to change the results of the reference.

A kernel that ignores such an argument returns the right results for all samples, so that they prove nothing about it.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from shiplap.declare import Arg
from shiplap.dispatch import Op
from shiplap.sampling.builder import builder_takes_values
from shiplap.sampling.case import SampleCase, plain_copies, tensors_among, tree_map
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.run import (
    all_finite,
    floating_args,
    gradients_or_zeros,
    reference_accepts,
    reference_effects,
    require_gradients,
    surrogate_results,
)
from shiplap.sampling.samples import MAX_KEPT_ELEMENTS, Samples
from shiplap.sampling.sizes import scalar_candidates, search_sizes
from shiplap.sampling.values import PLAIN_KINDS, SHARED_NUMBERS, SOME_ZEROS, SPECIAL_KINDS
from shiplap.sampling.work_estimate import why_too_large

NUMBERS = ("int", "float", "bool", "str", "complex", "Scalar", "dtype", "list[int]", "list[float]", "list[bool]")
MOST_CASES, MOST_VALUES = 16, 4  # samples that are looked at for a tensor, and values of a scalar that are tried
MOST_FITS = 500  # combinations of sizes and scalars that are tried for a pair of scalars
LARGER = 3  # larger samples, in which more numbers may be equal
PROBED_CASES = 2  # samples in which zeros and ones take the place of a tensor
MOST_TRIED = 150  # samples that are tried for an argument, until one shows its effect


def arguments_without_effect(samples: Samples, cases: Iterable[SampleCase]) -> list[Arg]:
    """Return the arguments of the op of ``samples`` whose value changes neither results nor gradients of the reference
    for any of ``cases``.

    An argument that the reference does not read is left out, and so are a scalar for which the declaration admits one
    value, and a tensor of which the reference reads the sizes alone. The list is empty for an op of random results.
    """
    op = samples.op
    small = [_on_cpu(c) for c in cases if 0 < c.numel <= MAX_KEPT_ELEMENTS][::-1]  # of `revealing_samples` first
    if op.spec.random or not small:
        return []
    return [a for a in op.spec.args if _is_read(op, a.name) and not _has_effect(samples, small, a)]


def is_never_varied(samples: Samples, cases: Iterable[SampleCase], arg: Arg) -> bool:
    """Return whether the argument ``arg``, which changes the results of none of ``cases``, is a tensor, or a scalar
    that has its usual value in all of them although others were asked for. The builder of samples decides on both. Any
    other scalar may be a limit that the reference checks, and nothing tells it from one for which no sample was found.
    """
    index, usual = samples.spec.args.index(arg), _usual_value(samples, arg)
    return arg.scalar is None or all(_are_equal(c.args[index], usual) for c in cases)


def _usual_value(samples: Samples, arg: Arg) -> Any:
    """Return the value of the argument ``arg`` in the base sample of the op, on the CPU. A builder of samples may have
    made it.
    """
    return _on_cpu(samples.build(samples.base)).args[samples.spec.args.index(arg)]


def revealing_samples(samples: Samples, cases: Iterable[SampleCase]) -> Iterator[SampleCase]:
    """Yield a sample for each argument that none of ``cases`` shows to change results. The argument changes those of
    this sample. For a scalar, a sample with its usual value follows. Yield none if no such sample is found.
    """
    op = samples.op
    for arg in arguments_without_effect(samples, cases):
        usual = _usual_value(samples, arg)
        for recipe in islice(_recipes_to_try(samples, arg), MOST_TRIED):
            case = samples.make(recipe)
            if case is not None and _may_be_compared(op, case) and _changes(op, _on_cpu(case), arg, usual):
                yield case
                named = {arg.name: dict(samples.base.scalars)[arg.name]} if arg.scalar is not None else {}
                other = samples.make(recipe.but(scalars=named)) if named else None
                yield from [other] if other is not None and _may_be_compared(op, other) else []
                break


def _recipes_to_try(samples: Samples, arg: Arg) -> Iterator[SampleRecipe]:
    """Yield descriptions of samples for which the argument ``arg`` may matter.

    A tensor gets unusual numbers. Another value of a scalar comes with other values of each other scalar, with more
    elements, and with unusual numbers, equal ones first: these often decide on the effect of a scalar.
    """
    own, base = samples.op.sampler is not None and not builder_takes_values(samples.op), samples.base
    kinds = (SHARED_NUMBERS, SOME_ZEROS) if own else (SHARED_NUMBERS, *PLAIN_KINDS[1:], *SPECIAL_KINDS)
    if arg.scalar is None:
        yield from (base.but(values=kind) for kind in kinds)
        return
    values = {
        a.name: [v for v in scalar_candidates(a) if v is not None and v != dict(base.scalars)[a.name]][:MOST_VALUES]
        for a in samples.spec.scalars
        if a.name in dict(base.scalars)
    }
    tried = values.pop(arg.name)
    others = [{name: v} for name, given in values.items() for v in given]
    yield from (_fit_scalars(samples, {**other, arg.name: v}) for other in others for v in tried)
    wide = [c.recipe for c in samples.wide() if c.numel <= MAX_KEPT_ELEMENTS]
    yield from (r.but(scalars={arg.name: v}) for r in wide for v in tried)
    bases = [base, *(c.recipe for c in samples.grown(LARGER))]
    yield from (b.but(scalars={arg.name: v}, values=kind) for kind in kinds for b in bases for v in tried)


def _fit_scalars(samples: Samples, scalars: dict[str, Any]) -> SampleRecipe:
    """Return the description of the base sample with ``scalars``, values by name. If the declaration does not admit
    that, it has other sizes and scalars as well.
    """
    direct = samples.base.but(scalars=scalars)
    found = None if samples.make(direct) is not None else search_sizes(samples.spec, None, scalars, MOST_FITS)
    if found is None:
        return direct
    sizes, fitted = found
    return samples.base.but(sizes=sizes, scalars={name: v for name, v in fitted.items() if name not in sizes})


def _may_be_compared(op: Op, case: SampleCase) -> bool:
    """Return whether the reference takes the sample, does not take too much for it, and returns finite numbers."""
    try:
        return not why_too_large(op, case) and all_finite(reference_effects(op, _on_cpu(case).args))
    except Exception:  # a reference may refuse values by any exception
        return False


def _is_read(op: Op, name: str) -> bool:
    """Return whether the code of the op's reference reads its parameter ``name``. It is true as well if the reference
    has no such parameter, as a function around another one.
    """
    code = op.reference.__code__ if isinstance(op.reference, FunctionType) else None
    if code is None or name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return True
    loads = [i.argval for i in dis.get_instructions(code) if "LOAD_FAST" in i.opname]
    return name in code.co_cellvars or any(name in (v if isinstance(v, tuple) else (v,)) for v in loads)


def _has_effect(samples: Samples, cases: Sequence[SampleCase], arg: Arg) -> bool:
    """Return whether one of ``cases`` shows that the argument ``arg`` changes results, or whether none can be
    expected to.
    """
    if arg.tensor is not None:
        return _tensor_has_effect(samples, cases, arg)
    asked = any(dict(c.recipe.scalars).get(arg.name) != dict(samples.base.scalars).get(arg.name) for c in cases)
    if arg.scalar not in NUMBERS or arg.name in dict(samples.base.sizes) or not asked:
        return True
    usual = _usual_value(samples, arg)
    return any(_changes(samples.op, c, arg, usual) for c in cases)


def _tensor_has_effect(samples: Samples, cases: Iterable[SampleCase], arg: Arg) -> bool:
    """Return whether other numbers in the tensors of ``arg``, drawn from another seed, change the results for one of
    ``cases``. It is true as well if zeros and ones change none, as of a tensor of which the reference reads the sizes.
    """
    op, index, compared = samples.op, samples.spec.args.index(arg), list[SampleCase]()
    drawn = Samples(op, samples.seed + 1)
    for case in islice((c for c in cases if tensors_among([c.args[index]])), MOST_CASES):
        if (other := drawn.make(case.recipe)) is not None:
            if _changes(op, case, arg, other.args[index]):
                return True
            compared.append(case)
    tried = [c for c in compared[:PROBED_CASES] if reference_accepts(op, c.args)]
    return not any(_changes(op, c, arg, other, refused=False) for c in tried for other in _simple_values(c, index))


def _on_cpu(case: SampleCase) -> SampleCase:
    """Return the sample with its tensors on the CPU, where a number of a row out of range ends no process. Tensors of
    two samples together may have such numbers.
    """
    return case.with_args(tree_map(lambda t: t.cpu(), case.args))


def _simple_values(case: SampleCase, index: int) -> list[Any]:
    """Return two values for the tensors at ``index`` of the sample: zeros in place of all elements, and ones."""
    return [tree_map(fill, case.args[index : index + 1])[0] for fill in (torch.zeros_like, torch.ones_like)]


def _changes(op: Op, case: SampleCase, arg: Arg, value: Any, *, refused: bool = True) -> bool:
    """Return whether the reference has other results for the sample, on the CPU, if ``value`` takes the place of the
    argument ``arg``. If the op has a gradient, another gradient counts as well. Return ``refused`` if it raises an
    exception.
    """
    index = op.spec.args.index(arg)
    args = tuple(value if i == index else v for i, v in enumerate(case.args))
    if _are_equal(case.args[index], value):
        return False
    try:
        op.bind(args)  # sizes that do not fit are refused
        if bitwise_difference(reference_effects(op, args), reference_effects(op, case.args)):
            return True
        if op.gradient is None:
            return False
        return bool(bitwise_difference(_gradients(op, case.with_args(args)), _gradients(op, case)))
    except Exception:
        return refused


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two values of an argument are equal. Tensors are if they have the same sizes and bits."""
    first, second = tensors_among([one]), tensors_among([other])
    if not first and not second:
        return list(one) == list(other) if isinstance(one, (list, tuple)) and other is not None else bool(one == other)
    return len(first) == len(second) and not bitwise_difference(first, second)


def _gradients(op: Op, case: SampleCase) -> list[Tensor]:
    """Return the gradients of the reference on the sample, for its floating-point tensors in order."""
    args = require_gradients(op, plain_copies(case.args), floating_args(op, case))
    outs = [o for o in surrogate_results(op, args) if o.requires_grad]
    inputs = [t for t in tensors_among(args) if t.requires_grad]
    return gradients_or_zeros(outs, inputs, [torch.ones_like(o) for o in outs]) if outs and inputs else []
