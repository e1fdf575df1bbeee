"""Sharding rules from a declaration: its named dims give the candidates, and its reference decides.

A dim that an output has is cut there, too. Over a dim that no output has, an output may be a sum, a maximum or a
minimum. Each such candidate is tried on samples with the reference in float64. A candidate that fails on one sample is
no rule. A candidate that no sample could have refuted is none either: the last part of a sum, or of a maximum, has to
change the result of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shiplap.declare.binding import declared_output_shape
from shiplap.declare.sharding_rule import ShardedPart, ShardingRule
from shiplap.declare.spec import Arg, Output, TensorType
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.run import reference_effects64
from shiplap.sampling.samples import Samples, with_other_values
from shiplap.sampling.sizes import dim_environment, search_sizes
from shiplap.sharding.simulate import NotAdmitted, chunk_sizes, cut_size, merge_shards, run_shards
from shiplap.torch_private.dispatcher_calls import outside_modes

SEED = 20_261
LARGEST = 1 << 20  # elements of a sample: a scalar of the call may be a size
KEPT = 4096  # calls whose rules are kept
# The numbers of ranks for which a rule is tried.
WORLDS = (2, 3)
LEFT_OUT: tuple[ShardedPart, ...] = (
    "sum",
    "max",
    "min",
)  # the possible parts of an output without the dim, in this order

_known: dict[tuple[object, ...], tuple[ShardingRule, ...]] = {}


def why_underivable(op: Op) -> str:
    """Return the reason why no sharding rule can be derived for any call of ``op``, such as that it draws random
    numbers. Return an empty string if rules can be derived. A sharding rule states how a call may be cut over several
    ranks.
    """
    spec = op.spec
    if spec.mutated:
        return "it writes to its arguments"
    if spec.dynamic:
        return "its sizes depend on data"
    if any(a.many for a in spec.args):
        return "it takes a list of tensors"
    if spec.random or any(a.scalar == "Generator" for a in spec.args):
        return "it draws random numbers"
    if spec.traced or spec.view:
        return "its results are not tensors of declared sizes"
    return "" if spec.outputs else "it returns nothing"


def known_rules(op: Op, args: Sequence[Any]) -> tuple[ShardingRule, ...]:
    """Return the sharding rules for a call of ``op`` with ``args``. A sharding rule states how a call may be cut over
    several ranks. The rules depend on the numbers of dims of the tensors, but not on their sizes.

    The rules are those that ``op.sharding`` declares. If it declares none, rules are derived from the declaration and
    the reference at the first such call.
    """
    if op.shardings is not None:
        return op.shardings
    if why_underivable(op):
        return ()
    # The identity is part of the key, so that an op that is declared again gets new rules.
    key = (op.identity, *(_rule_key_part(op, a, v) for a, v in zip(op.spec.args, args, strict=True)))
    rules = _known.get(key)
    if rules is None:
        with outside_modes():  # a trace may be the first to need them, and others take them from the cache
            rules = derive_rules(op, samples_like(op, args))
        if len(_known) >= KEPT:  # as of an op that gets another number in each call
            _known.clear()
        _known[key] = rules
    return rules


def _rule_key_part(op: Op, arg: Arg, value: Any) -> object:
    """Return the part of an argument's value on which sharding rules depend, for use in a cache key.

    For a tensor it is the number of dims. If the argument may broadcast, it also states which dims have size 1. For any
    other value it is its ``repr``, or None if the argument is a scalar that gives the size of a dim.
    """
    if hasattr(value, "shape"):
        repeated = arg.tensor is not None and bool(arg.broadcasts)
        return (len(value.shape), *(size == 1 for size in value.shape)) if repeated else len(value.shape)
    dims = {d.text for a in op.spec.tensors if a.tensor for d in a.tensor.dims if d.kind == "name"}
    return None if arg.name in dims else repr(value)  # NaN is no number to look up, and a list none to hash


def derive_rules(op: Op, cases: Sequence[SampleCase]) -> tuple[ShardingRule, ...]:
    """Return the sharding rules of ``op`` that the reference confirms on all of ``cases``, which are sample calls. The
    samples differ only in sizes and values. A sharding rule states how a call may be cut over several ranks.
    """
    if why_underivable(op) or not cases:
        return ()
    rules, wholes = [], [sample for case in cases if (sample := _WholeSample.of(op, case)) is not None]
    for candidate in _candidate_rules(op, cases[0]):
        settled = (_settle_rule(variant, wholes) for variant in _rule_variants(op, candidate, cases[0]))
        rule = next((rule for rule in settled if rule is not None), None)
        if rule is not None:
            rules.append(rule)
    return tuple(rules)


def samples_like(op: Op, args: Sequence[Any]) -> list[SampleCase]:
    """Return small sample calls that agree with the call ``args`` in scalars, in the tensors that are present and in
    their number of dims. Scalars that are sizes may differ.

    Return an empty list if the declaration admits none of the samples that were tried.
    """
    spec, samples = op.spec, Samples(op, SEED)
    pairs = list(zip(spec.args, args, strict=True))
    dims = {d.text for a in spec.tensors if a.tensor for d in a.tensor.dims if d.kind == "name"}
    scalars = {a.name: v for a, v in pairs if a.scalar is not None and a.name not in dims}
    sizes: dict[str, Any] = {}
    repeated: dict[str, int] = {}
    for arg, value in pairs:
        for d in arg.tensor.dims if arg.tensor is not None and value is not None else ():
            if d.kind == "variadic":
                ndim = len(value.shape) - len(arg.tensor.dims) + 1 if arg.tensor is not None else 0
                sizes[d.text] = (5, 4, 3, 2, 2, 2)[:ndim] if ndim <= 6 else (2,) * ndim
        repeated |= dict.fromkeys(_broadcast_ones(arg, value), 1)
    absent = tuple(a.name for a, v in pairs if a.tensor is not None and v is None)
    admitted = search_sizes(spec, sizes, scalars)
    if admitted is None:
        return []
    recipe = samples.base.but(sizes=admitted[0] | repeated, scalars=admitted[1] | scalars, absent=absent)
    small = {name: v for name, v in admitted[0].items() if type(v) is int and v}
    # Odd sizes, which two ranks cannot cut evenly.
    grown = [{n: v * 2 + 1 for n, v in small.items()}]
    if any("%" in str(e) for e in spec.requires):  # sizes that are still whole tiles when they are cut in two or three
        grown.append({n: 6 * v for n, v in small.items()})
    recipes = [
        r for r in (recipe, *(recipe.but(sizes=wanted) for wanted in grown)) if _total_elements(op, r) <= LARGEST
    ]
    made = [samples.make(r) for r in recipes]
    cases = [case for case in made if case is not None]
    return [*cases, *(with_other_values(op, case) for case in cases[:2])]


def _broadcast_ones(arg: Arg, value: Any) -> Iterator[str]:
    """Yield the names of those dims of the argument ``arg`` that may broadcast and whose size in ``value`` is 1."""
    if arg.tensor is not None and value is not None and arg.broadcasts:
        fixed = [d for d in arg.tensor.dims if d.kind != "variadic"]
        labels = [label for label in axes_of(arg.tensor, value.shape) if not label.startswith("*")]
        yield from (d.text for d, label in zip(fixed, labels, strict=True) if d.of and not label)


def _total_elements(op: Op, recipe: SampleRecipe) -> float:
    """Return the number of elements of all argument and result tensors of the sample that ``recipe`` describes. No
    tensor is allocated. Return infinity if the declaration does not admit the sizes.
    """
    spec = op.spec
    env = dim_environment(spec, dict(recipe.sizes), dict(recipe.scalars))
    if env is None:
        return math.inf
    # ``...`` stands for any number of leading axes. Here there are none.
    env.setdefault("...", ())
    given = [Output(a.name, a.tensor) for a in spec.tensors if a.tensor is not None and a.name not in recipe.absent]
    sizes: list[int] = [math.prod(map(int, declared_output_shape(each, env))) for each in (*given, *spec.outputs)]
    return sum(sizes)


def axes_of(tensor: TensorType, shape: Sequence[int]) -> list[str]:
    """Return a label for each dim of a tensor of the given declared type and shape. It is the name of the dim, or
    ``*s[0]`` for the first dim that a variadic dim ``s`` stands for.

    The label is empty for a dim without a name, and for a dim that may broadcast and has size 1.
    """
    labels: list[str] = []
    for d in tensor.dims:
        if d.kind == "variadic":
            labels += [f"*{d.text}[{i}]" for i in range(len(shape) - len(tensor.dims) + 1)]
        elif d.of:
            labels.append(d.of if shape[len(labels)] != 1 else "")
        else:
            labels.append(d.text if d.kind == "name" else "")
    return labels


def _candidate_rules(op: Op, case: SampleCase) -> Iterator[ShardingRule]:
    """Yield a sharding rule for each named dim along which a call of ``op`` could be cut. A dim is left out if one
    tensor has it twice. It is also left out if another size is computed from it, or if a scalar gives it.
    """
    spec, env = op.spec, case.env
    given = [(a, v) for a, v in zip(spec.args, case.args, strict=True) if a.tensor is not None and v is not None]
    labels = {a.name: axes_of(a.tensor, v.shape) for a, v in given if a.tensor is not None}
    related = [(name, e) for name, e in spec.dims if name not in spec.broadcasts.values()]
    bound = {name for name, _ in related} | {n for _, e in related for n in e.names} | {a.name for a in spec.scalars}
    outs = [axes_of(o.tensor, (0,) * _rank_of_tensor(o.tensor, env)) for o in spec.outputs]
    for label in dict.fromkeys(label for axes in labels.values() for label in axes if label and label not in bound):
        # A cut of a dim that stands twice in one tensor would have to cut two axes at once.
        if any(axes.count(label) > 1 for axes in (*labels.values(), *outs)):
            continue
        inputs: list[tuple[str, ShardedPart]] = [(n, _axis_of_label(axes, label)) for n, axes in labels.items()]
        yield ShardingRule(label, tuple(inputs), tuple(_axis_of_label(axes, label) for axes in outs))


def _rank_of_tensor(tensor: TensorType, env: dict[str, Any]) -> int:
    """Return the number of dims of a tensor of the declared type. ``env`` holds the sizes of variadic dims."""
    return sum(len(env.get(d.text, ())) if d.kind == "variadic" else 1 for d in tensor.dims)


def _axis_of_label(axes: Sequence[str], label: str) -> ShardedPart:
    """Return the position of the dim with the label ``label`` in ``axes``. Return ``"whole"`` if no dim has it, since
    the tensor is then not cut.
    """
    return axes.index(label) if label in axes else "whole"


def _rule_variants(op: Op, rule: ShardingRule, case: SampleCase) -> Iterable[ShardingRule]:
    """Yield copies of ``rule`` with every way to merge the outputs that lack the cut dim. Such an output is reduced
    over the ranks by a sum, a maximum or a minimum.

    If all outputs lack the cut dim, yield further copies in which all outputs are summed. In each, one argument that is
    not cut, such as a bias, is replaced by zeros on all ranks but the first.
    """
    free = [i for i, part in enumerate(rule.outputs) if part == "whole"]
    # The number of combinations grows with a power of the outputs, and each needs runs of the reference.
    for choice in product(LEFT_OUT, repeat=len(free)) if len(free) < 3 else ():
        outputs = list(rule.outputs)
        for i, part in zip(free, choice, strict=True):
            outputs[i] = part
        # Of integers that count from the beginning of a tensor the largest is no result, though it may look like one.
        if all(part == "sum" or _is_floating(op.spec.outputs[i].tensor) for i, part in zip(free, choice, strict=True)):
            yield replace(rule, outputs=tuple(outputs))
    if free and len(free) == len(rule.outputs):  # as a bias that is added once
        values = dict(zip((a.name for a in op.spec.args), case.args, strict=True))
        for name, part in rule.inputs:
            if part == "whole" and values[name].is_floating_point():
                inputs = tuple((n, "sum" if n == name else p) for n, p in rule.inputs)
                yield replace(rule, inputs=inputs, outputs=tuple(LEFT_OUT[0] for _ in free))


class _WholeSample:
    """A sample call of an op. ``args`` holds its arguments, and ``whole`` the results of the reference on the uncut
    arguments, computed in float64.
    """

    def __init__(self, op: Op, case: SampleCase) -> None:
        """Compute the results of the reference of ``op`` on the uncut arguments of ``case`` in float64."""
        self.op, self.args = op, case.args
        self.whole: Sequence[Tensor] = reference_effects64(op, case.args)

    @classmethod
    def of(cls, op: Op, case: SampleCase) -> _WholeSample | None:
        """Return the sample ``case`` with the reference's results. Return None if the reference raises an error on it,
        since the call would then fail on one rank, too.
        """
        try:
            return cls(op, case)
        except Exception:
            return None

    def agrees(self, rule: ShardingRule, sizes: Sequence[int]) -> tuple[bool, set[int]]:
        """Return a pair for shards of the sizes ``sizes``. It holds whether ``rule`` is right, and the indices of the
        outputs that change if the last shard is left out.

        The rule is right if the reference on the shards, merged by the rule, gives the results of the whole call. Raise
        ``NotAdmitted`` if the declaration does not admit a shard.
        """
        try:
            parts = run_shards(self.op, rule, partial(reference_effects64, self.op), self.args, sizes)
            got = merge_shards(rule.outputs, parts)
            same = all(_results_agree(g, w) for g, w in zip(got, self.whole, strict=True))
            least = merge_shards(rule.outputs, parts[:-1]) if len(parts) > 1 else got
        except NotAdmitted:
            raise
        except Exception:
            # Where the reference refuses shards, the rule does not hold.
            return False, set()
        return same, {i for i, (g, w) in enumerate(zip(least, self.whole, strict=True)) if not _results_agree(g, w)}


def _is_floating(tensor: TensorType) -> bool:
    """Return whether all dtypes that the declared type ``tensor`` lists are floating-point. Return True also for a type
    that lists none and thereby admits every dtype.
    """
    return all(getattr(torch, name).is_floating_point for name in tensor.dtypes)


def _settle_rule(rule: ShardingRule, samples: Sequence[_WholeSample]) -> ShardingRule | None:
    """Return ``rule`` if the reference, run on shards and merged by the rule, gives the results of the whole call on
    all samples. Its field ``empty`` is set to whether it does so for shards of size 0, too.

    Return None if the rule fails, or if no sample could have shown that it is wrong.
    """
    seen, empty, shown = 0, True, set[int]()
    for sample in samples:
        size = cut_size(sample.op, rule, sample.args)
        if size is None:
            return None
        # The last sizes have an empty shard, as ``torch.chunk`` leaves for ranks behind the last chunk.
        for sizes in [chunk_sizes(size, world) for world in WORLDS] + [[size, 0]]:
            try:
                same, changed = sample.agrees(rule, sizes)
            except NotAdmitted:
                continue
            if not same and 0 not in sizes:
                return None
            # A rule that fails only with empty shards is kept, without the mark.
            empty = empty and same
            seen += same and 0 not in sizes
            shown |= changed if same else set()
    return replace(rule, empty=empty) if seen and len(shown) == len(rule.outputs) else None


def _results_agree(got: Tensor, wanted: Tensor) -> bool:
    """Return whether two results agree. Their shapes must be equal. Integers and 8-bit floats must be equal, too. Other
    results may differ by a tolerance, since sums are taken in another order.
    """
    if got.shape != wanted.shape:
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()) or wanted.itemsize == 1:
        return torch.equal(got.to(torch.float64), wanted.to(torch.float64))
    # Shards are summed in another order than the whole, so the last bits of a result may differ.
    tolerance = 1e-9 if wanted.itemsize >= 8 else 1e-4 if wanted.itemsize == 4 else 2e-2
    return torch.allclose(got.to(wanted.dtype), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
