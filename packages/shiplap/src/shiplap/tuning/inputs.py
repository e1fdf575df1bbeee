"""The arguments on which candidates run: drawn from the declaration for the sizes of a call, and never all zeros."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.declare.binding import Binding
from shiplap.declare.bucket import Bucket, bucket_dtypes, bucket_layout
from shiplap.declare.spec import OpSpec
from shiplap.dispatch import Op
from shiplap.dispatch.state import OpState
from shiplap.errors import ShiplapError, error
from shiplap.sampling.builder import builder_takes_values
from shiplap.sampling.case import SampleCase
from shiplap.sampling.layouts import LAYOUTS, apply_layout
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.run import needs_builder
from shiplap.sampling.samples import Samples
from shiplap.sampling.sizes import broadcast_ones, dim_environment, free_dims, results_are_affordable, search_sizes
from shiplap.sampling.values import RANGE_KINDS
from shiplap.sampling.work_estimate import estimate_operations

SEED = 20261121  # any; the same everywhere, so that two processes verify on the same numbers
WORK = 1 << 31  # operations of the reference at an edge of a bucket
MOST_ODD_ELEMENTS = 1 << 16  # product of the sizes of calls with odd properties
MOST = 1024  # calls of which the facts are remembered
_facts: dict[tuple[Any, ...], tuple[Bucket, str, str]] = {}


@dataclass(frozen=True)
class Inputs:
    """The arguments of ``op`` on which candidates are called, as ``recipe`` describes them. They are drawn on
    ``device`` with ``seed`` when they are first used. A process that only plans the tuning draws none.
    """

    op: Op
    recipe: SampleRecipe
    device: str
    seed: int

    @cached_property
    def first(self) -> SampleCase:
        """The first draw of arguments with the sizes of the call."""
        return Samples(self.op, self.seed, self.device).build(self.recipe)

    @cached_property
    def real(self) -> tuple[SampleCase, SampleCase]:
        """Two draws of arguments with the sizes of the call and different values."""
        return self.first, Samples(self.op, self.seed + 1, self.device).build(self.recipe)

    @cached_property
    def small(self) -> SampleCase | None:
        """One draw of arguments with small, odd, distinct sizes if the declaration admits them, or else with other
        small sizes. It is None if no such arguments can be drawn.
        """
        return _small_case(Samples(self.op, self.seed, self.device), self.recipe)

    @cached_property
    def odd(self) -> tuple[SampleCase, ...]:
        """Samples with unaligned addresses or unusual values. A candidate must be right on them as well, because such
        calls use the same choice.

        In the first sample, tensors begin at unaligned addresses. The others have values near zero or far below it. The
        sizes are those of the call, halved until there are few enough elements. Samples that cannot be drawn are left
        out.
        """
        samples, sizes = Samples(self.op, self.seed, self.device), dict(self.recipe.sizes)
        while prod(v for v in sizes.values() if type(v) is int and v) > MOST_ODD_ELEMENTS:
            sizes = {n: max(1, v // 2) if type(v) is int else v for n, v in sizes.items()}
        recipe = self.recipe.but(sizes=sizes)
        named = [a.name for a in self.op.spec.tensors if not a.many and a.name not in self.recipe.absent]
        moved = recipe.but(layouts={n: "offset" for n in named if n not in dict(self.recipe.layouts)})
        values = RANGE_KINDS if self.op.sampler is None or builder_takes_values(self.op) else ()
        made = [samples.make(moved), *(samples.make(recipe.but(values=kind)) for kind in values)]
        return tuple(case for case in made if case is not None)

    @cached_property
    def edges(self) -> tuple[SampleCase, ...]:
        """Samples at the smallest sizes, just below the largest sizes, and at the largest sizes of the bucket. A bucket
        is the class of sizes for which one choice is made.

        The tuple is empty if no size can vary in the bucket. Sizes at which a run takes too long, or which the call
        itself has, are left out.
        """
        samples, made = Samples(self.op, self.seed, self.device), list[SampleCase]()
        for sizes in _bucket_edge_sizes(self.op, self.recipe):
            env = dim_environment(self.op.spec, sizes, dict(self.recipe.scalars) | sizes)
            if (
                env is None
                or not results_are_affordable(self.op.spec, env)
                or estimate_operations(self.op.spec, env) > WORK
            ):
                continue
            case = samples.make(self.recipe.but(sizes=sizes, layouts={}))
            if case is not None and case.label not in [c.label for c in (*self.real, *made)]:
                made.append(case)
        return tuple(made)

    @cached_property
    def call(self) -> Binding:
        """The call with its arguments checked and the values of its dims known.

        The tensors are on the meta device, without values. If the op has a builder of samples, they have values
        instead, since sizes may depend on values.
        """
        if self.op.sampler is None:
            return Samples(self.op, self.seed, "meta").blank(self.recipe)
        return self.op.bind(self.first.args)

    @cached_property
    def identity(self) -> str:
        """The digest of the op's declaration and of all its kernels. It is cached, because ``Op.identity`` computes it
        at every access.
        """
        return self.op.identity

    @cached_property
    def facts(self) -> tuple[Bucket, str, str]:
        """The bucket (class of sizes), the dtypes and the layout of the arguments, which are parts of the key of a
        choice.

        They are cached in this process, so equal inputs compute them once.
        """
        asked = self.identity, id(self.op.sampler), str(self.recipe), self.device, self.seed
        if (facts := _facts.get(asked)) is None:
            rule = self.op.rule
            facts = rule.bucket(self.call.env), bucket_dtypes(rule, self.call), bucket_layout(self.call.args)
            # The oldest entry is dropped first: dictionaries keep the order of insertion.
            while len(_facts) >= MOST:
                _facts.pop(next(iter(_facts)), None)
            _facts[asked] = facts
        return facts

    @property
    def bucket(self) -> Bucket:
        """The bucket of the call, which is the class of sizes for which one choice is made."""
        return self.facts[0]

    @property
    def dtypes(self) -> str:
        """The dtypes of the arguments as one string, which is a field of the key of a choice."""
        return self.facts[1]

    @property
    def layout(self) -> str:
        """The memory layout of the arguments as one string, which is a field of the key of a choice."""
        return self.facts[2]


def draw_inputs(op: Op, recipe: SampleRecipe, device: str, seed: int = SEED) -> Inputs:
    """Return the inputs for ``recipe``, from which the arguments of candidates are drawn with ``seed``. Raise ``SL606``
    if the op has integer tensors and no builder of samples. Raise ``SL502`` or ``SL610`` if the recipe does not fit the
    op or its builder.
    """
    # Random integers are rarely valid indices, and a kernel may read out of bounds with them.
    if needs_builder(op):
        names = ", ".join(a.name for a in op.spec.tensors if a.tensor and all("int" in n for n in a.tensor.dtypes))
        raise error(
            "SL606",
            where=op.spec.name,
            got=f"integer tensors {names} without a builder",
            expected="values that mean something",
        )
    sample = Inputs(op, recipe, device, seed)
    wanted = op.rule.bucket({**dict(recipe.scalars), **dict(recipe.sizes)})
    asked = {name: value for name, _, value in wanted.limits if name in dict(recipe.sizes)}
    drawn = {name: value for name, _, value in sample.bucket.limits if name in asked}
    if drawn != asked:
        raise error("SL610", where=op.spec.name, got=str(sample.bucket), expected=f"{wanted} ({recipe})")
    return sample


def _small_case(samples: Samples, recipe: SampleRecipe) -> SampleCase | None:
    """Return a sample with the dtypes and scalars of ``recipe`` and with small, odd, distinct sizes. If the declaration
    admits no such sizes, return one with other small sizes. Return None if none can be drawn.
    """
    same: dict[str, Any] = {"dtypes": dict(recipe.dtypes), "absent": recipe.absent}
    try:
        base = samples.base
    except ShiplapError:
        return None
    names = [n for n, kind in free_dims(samples.spec).items() if kind != "variadic"]
    # Odd sizes that all differ reveal kernels that confuse two dims, or that omit the masks of a last tile.
    odd = {n: 5 + 2 * i for i, n in enumerate(names) if n in dict(base.sizes)} | given_ones(samples.spec, recipe)
    scalars = dict(recipe.scalars)
    tried = [base.but(sizes=odd, scalars=scalars, **same), base.but(scalars=scalars, **same), base.but(**same)]
    if (sizes := search_sizes(samples.spec, fixed_scalars=scalars)) is not None:
        tried.insert(1, recipe.but(sizes=sizes[0], layouts={}))
    return next((case for r in tried if (case := samples.make(r)) is not None), None)


def _bucket_edge_sizes(op: Op, recipe: SampleRecipe) -> Iterator[dict[str, Any]]:
    """Yield dicts of sizes by name at the ends of the bucket of a recipe. They are the smallest sizes, those one below
    the largest, and the largest. Yield nothing if no dim of the recipe is rounded to a power of two.
    """
    sizes, kinds = dict(recipe.sizes), dict(op.rule.kinds)
    free = [n for n, v in sizes.items() if kinds.get(n) == "pow2" and type(v) is int and v > 2]
    top = {n: 1 << (sizes[n] - 1).bit_length() for n in free}
    if free:
        yield sizes | {n: top[n] // 2 + 1 for n in free}
        yield sizes | {n: top[n] - 1 for n in free}
        yield sizes | top


def given_ones(spec: OpSpec, recipe: SampleRecipe) -> dict[str, int]:
    """Return a dict from each dim that broadcasts to the size 1 that ``recipe`` gives it. These sizes must stay 1 when
    other sizes are changed.
    """
    return {n: v for n, v in recipe.sizes if n in spec.broadcasts}


def recipe_of(op: OpState, args: tuple[Any, ...]) -> SampleRecipe:
    """Return the recipe of a call of ``op`` on ``args``, from which similar arguments can be drawn. It holds sizes,
    scalars, dtypes, layouts and absent arguments, but no values of tensors.
    """
    call = op.bind(args)
    sizes = {n: call.env[n] for n in free_dims(op.spec) if n in call.env} | broadcast_ones(op.spec, call.env)
    scalars = {a.name: call.env[a.name] for a in op.spec.scalars if a.name not in sizes}
    dtypes = {c: str(d).removeprefix("torch.") for c, d in call.dtypes.items()}
    pairs = [(a, v) for a, v in zip(op.spec.args, call.args, strict=True) if a.tensor is not None]
    layouts = {a.name: name for a, v in pairs if isinstance(v, Tensor) and (name := layout_name(v))}
    absent = tuple(a.name for a, v in pairs if v is None)
    return SampleRecipe(absent=absent).but(sizes=sizes, scalars=scalars, dtypes=dtypes, layouts=layouts)


def layout_name(t: Tensor) -> str:
    """Return the name of the memory layout of ``t``, such as a key of ``LAYOUTS``. It is an empty string for a
    contiguous tensor and for a layout without a name.
    """
    if t.is_contiguous():
        return ""
    code = bucket_layout([t])
    # The name of a layout depends on the order of strides only, so small dims are enough to compare.
    shape = torch.zeros([min(s, 3) for s in t.shape])
    return next(
        (n for n in LAYOUTS if shape.dim() >= LAYOUTS[n][0] and bucket_layout([apply_layout(shape, n)]) == code), ""
    )
