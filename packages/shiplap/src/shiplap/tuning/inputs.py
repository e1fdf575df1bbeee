"""The arguments on which candidates run: drawn from the declaration for the sizes of a call, and never all zeros."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.declare.binding import Binding
from shiplap.declare.bucket import Bucket, dtypes_of, layout_of
from shiplap.declare.spec import OpSpec
from shiplap.dispatch import Op
from shiplap.dispatch.state import OpState
from shiplap.errors import ShiplapError, error
from shiplap.sampling.case import Case
from shiplap.sampling.layouts import LAYOUTS, apply_layout
from shiplap.sampling.recipe import Recipe
from shiplap.sampling.run import needs_builder
from shiplap.sampling.samples import Samples
from shiplap.sampling.sizes import affordable, environment, free_dims, ones, search
from shiplap.sampling.work_estimate import operations

SEED = 20261121  # any; the same everywhere, so that two processes verify on the same numbers
WORK = 1 << 31  # operations of the reference at an edge of a bucket
MOST = 1024  # calls of which the facts are remembered
_facts: dict[tuple[Any, ...], tuple[Bucket, str, str]] = {}


@dataclass(frozen=True)
class Inputs:
    """The arguments for ``recipe``, drawn at the first use: the process that plans the tuning may run no candidate
    itself.
    """

    op: Op
    recipe: Recipe
    device: str
    seed: int

    @cached_property
    def first(self) -> Case:
        """Arguments with the sizes of the call."""
        return Samples(self.op, self.seed, self.device).build(self.recipe)

    @cached_property
    def real(self) -> tuple[Case, Case]:
        """Two draws of arguments with the sizes of the call."""
        return self.first, Samples(self.op, self.seed + 1, self.device).build(self.recipe)

    @cached_property
    def small(self) -> Case | None:
        """One draw of arguments with small odd sizes, or None if the declaration admits none."""
        return _small(Samples(self.op, self.seed, self.device), self.recipe)

    @cached_property
    def edges(self) -> tuple[Case, ...]:
        """Draws at the smallest and at odd large sizes of the bucket, all of whose calls a choice is for.

        A bucket whose calls all have the sizes of this one has none, nor has one whose large sizes take too long.
        """
        samples, made = Samples(self.op, self.seed, self.device), list[Case]()
        for sizes in _edges(self.op, self.recipe):
            env = environment(self.op.spec, sizes, dict(self.recipe.scalars) | sizes)
            if env is None or not affordable(self.op.spec, env) or operations(self.op.spec, env) > WORK:
                continue
            case = samples.make(self.recipe.but(sizes=sizes, layouts={}))
            if case is not None and case.label not in [c.label for c in (*self.real, *made)]:
                made.append(case)
        return tuple(made)

    @cached_property
    def call(self) -> Binding:
        """The call on the meta device if values do not affect its sizes, else the first draw."""
        if self.op.sampler is None:
            return Samples(self.op, self.seed, "meta").blank(self.recipe)
        return self.op.bind(self.first.args)

    @cached_property
    def identity(self) -> str:
        """The digest of the op with all of its kernels, which is computed each time that it is asked for."""
        return self.op.identity

    @cached_property
    def facts(self) -> tuple[Bucket, str, str]:
        """What a key says of the arguments. Equal calls have equal ones, so nothing is drawn for the second of them."""
        asked = self.identity, id(self.op.sampler), str(self.recipe), self.device, self.seed
        if (facts := _facts.get(asked)) is None:
            rule = self.op.rule
            facts = rule.bucket(self.call.env), dtypes_of(rule, self.call), layout_of(self.call.args)
            while len(_facts) >= MOST:
                _facts.pop(next(iter(_facts)), None)
            _facts[asked] = facts
        return facts

    @property
    def bucket(self) -> Bucket:
        return self.facts[0]

    @property
    def dtypes(self) -> str:
        return self.facts[1]

    @property
    def layout(self) -> str:
        return self.facts[2]


def inputs(op: Op, recipe: Recipe, device: str, seed: int = SEED) -> Inputs:
    """Arguments for ``recipe``. SL606 for integer tensors without a builder, SL502 or SL610 for a bad recipe."""
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


def _small(samples: Samples, recipe: Recipe) -> Case | None:
    """Small distinct odd sizes with the dtypes and scalars of the call."""
    same: dict[str, Any] = {"dtypes": dict(recipe.dtypes), "absent": recipe.absent}
    try:
        base = samples.base
    except ShiplapError:
        return None
    names = [n for n, kind in free_dims(samples.spec).items() if kind != "variadic"]
    odd = {n: 5 + 2 * i for i, n in enumerate(names) if n in dict(base.sizes)} | given_ones(samples.spec, recipe)
    scalars = dict(recipe.scalars)
    tried = [base.but(sizes=odd, scalars=scalars, **same), base.but(scalars=scalars, **same), base.but(**same)]
    if (sizes := search(samples.spec, fixed_scalars=scalars)) is not None:
        tried.insert(1, recipe.but(sizes=sizes[0], layouts={}))
    return next((case for r in tried if (case := samples.make(r)) is not None), None)


def _edges(op: Op, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The ends of the bucket of a recipe: its smallest sizes, and some just below the largest ones."""
    sizes, kinds = dict(recipe.sizes), dict(op.rule.kinds)
    free = [n for n, v in sizes.items() if kinds.get(n) == "pow2" and type(v) is int and v > 2]
    top = {n: 1 << (sizes[n] - 1).bit_length() for n in free}
    if free:
        yield sizes | {n: top[n] // 2 + 1 for n in free}
        yield sizes | {n: top[n] - 1 for n in free}
        yield sizes | top


def given_ones(spec: OpSpec, recipe: Recipe) -> dict[str, int]:
    """The sizes of a recipe that are 1 and broadcast, which other sizes of the same call leave alone."""
    return {n: v for n, v in recipe.sizes if n in spec.broadcasts}


def recipe_of(op: OpState, args: tuple[Any, ...]) -> Recipe:
    """The recipe of a call: sizes, scalars, dtypes, layouts and absent arguments, without values."""
    call = op.bind(args)
    sizes = {n: call.env[n] for n in free_dims(op.spec) if n in call.env} | ones(op.spec, call.env)
    scalars = {a.name: call.env[a.name] for a in op.spec.scalars if a.name not in sizes}
    dtypes = {c: str(d).removeprefix("torch.") for c, d in call.dtypes.items()}
    pairs = [(a, v) for a, v in zip(op.spec.args, call.args, strict=True) if a.tensor is not None]
    layouts = {a.name: name for a, v in pairs if isinstance(v, Tensor) and (name := layout_name(v))}
    absent = tuple(a.name for a, v in pairs if v is None)
    return Recipe(absent=absent).but(sizes=sizes, scalars=scalars, dtypes=dtypes, layouts=layouts)


def layout_name(t: Tensor) -> str:
    """The name of the layout of ``t``. Empty for a contiguous tensor and for a layout without a name."""
    if t.is_contiguous():
        return ""
    code = layout_of([t])
    shape = torch.zeros([min(s, 3) for s in t.shape])
    return next(
        (n for n in LAYOUTS if shape.dim() >= LAYOUTS[n][0] and layout_of([apply_layout(shape, n)]) == code), ""
    )
