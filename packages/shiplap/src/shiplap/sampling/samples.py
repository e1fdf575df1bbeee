"""Samples of the arguments of an op: sizes that its declaration admits, values of its dtypes, and usual layouts.

A sample is a function of (op, label, seed), so a finding can be replayed. Arguments whose values have a meaning, such
as indices of rows or sorted keys, come from the builder declared with ``@op.samples``. Without one, integers lie in
``[0, smallest positive size)``, which makes them valid indices of rows of every argument.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice, product
from typing import Any

import torch
from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.declare import Arg, Output
from shiplap.declare.binding import Binding, declared_output_shape
from shiplap.declare.opaque import make_sample_object as sample_object
from shiplap.dispatch import Op
from shiplap.dtypes import floating, integers, preferred
from shiplap.errors import ShiplapError, error
from shiplap.sampling.boundary_sizes import (
    CROWDED_SIZE,
    GRAIN_ELEMENTS,
    LARGEST_COMMON_SIZE,
    LONG_SUM,
    MILLION_ELEMENTS,
    RARE_SIZES_S,
    USUAL_SIZES,
    VALUE_ORDERS,
    joint_sizes,
    odd_scalar_values,
    sizes_near_constants,
    variadic_sizes,
)
from shiplap.sampling.boundary_sizes import uneven_member_sizes as uneven_lists
from shiplap.sampling.builder import build_arguments, builder_takes_values
from shiplap.sampling.case import SampleCase, tensors_among, tree_map
from shiplap.sampling.changed_values import change_values
from shiplap.sampling.code_constants import CodeConstants, find_code_constants, threshold_value_kind
from shiplap.sampling.layouts import LAYOUTS, apply_layout, layout_is_possible
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.run import keeps_bool, reference_accepts
from shiplap.sampling.sample_times import SampleTimes, larger_dims
from shiplap.sampling.sizes import (
    EDGE_SIZES,
    SEARCH_LIMIT,
    dim_environment,
    free_dims,
    name_groups,
    results_are_affordable,
    scalar_candidates,
    search_sizes,
    takes_any_text,
)
from shiplap.sampling.values import (
    CROWDED_KINDS,
    PLAIN_KINDS,
    SHARED_NUMBERS,
    SOME_ZEROS,
    SPECIAL_KINDS,
    as_numbers,
    draw_values,
)

MAX_SAMPLE_ELEMENTS = 1 << 21  # the most elements of all arguments of a sample
MAX_KEPT_ELEMENTS = 1 << 14  # the most elements of a sample that is cached
MOST_TEXTS = 3  # other values of a string without choices
SEARCH_PATIENCE = 2  # failed searches in a row for one dim, after which the next searches are short
FLOATS, PREFERRED, COMPLEX = floating(), preferred(), {"complex64", "complex128"}
OTHERS = (*integers(), "bool", *sorted(COMPLEX))  # dtypes other than those of floats


def sample(op: Op, label: str, seed: int, device: str = "cpu") -> SampleCase:
    """Return the sample of ``op`` on ``device`` that has the recipe ``label``, a string that findings print. For the
    same ``seed`` its values, sizes, layouts and dtypes are the same on every machine.
    """
    return Samples(op, seed, device).build(SampleRecipe.parse(label))


def with_other_values(op: Op, case: SampleCase) -> SampleCase:
    """Return a sample with the recipe of ``case``, whose values are drawn from the seed of ``case`` plus 1. Sizes,
    dtypes and layouts stay the same.
    """
    return Samples(op, case.seed + 1, case.device).build(case.recipe)


class Samples:
    """The samples of one op for one seed. A sample is one set of arguments for a call. Most methods yield samples, the
    usual ones first.
    """

    def __init__(self, op: Op, seed: int, device: str = "cpu") -> None:
        """Make the source of samples for an op on ``device``. ``seed`` and the recipe of a sample together determine
        its values.
        """
        self.op, self.spec, self.seed, self.device = op, op.spec, seed, torch.device(device)
        self._known: dict[str, SampleCase | None] = {}
        self._sized: dict[str, SampleRecipe | None] = {}
        self._refused: dict[str, int] = {}
        self.times = SampleTimes()

    @cached_property
    def _keeps_values(self) -> bool:
        """Whether the op's own builder (``@op.samples``) makes the values of samples and ignores the kind of values,
        such as ``nan``, in a recipe.
        """
        return self.op.sampler is not None and not builder_takes_values(self.op)

    @cached_property
    def base(self) -> SampleRecipe:
        """The recipe of the base sample, with small distinct sizes, default scalars and float32.

        Raise ``SL502`` if the declaration admits none of the tried combinations.
        """
        base = search_sizes(self.spec)
        if base is None:
            wanted = "; ".join(map(str, self.spec.requires)) or "a value for every scalar without a default"
            raise error("SL502", where=self.spec.name, got="no combination of sizes and scalars", expected=wanted)
        recipe = self._recipe(*base)
        try:
            self.build(recipe)
        except ShiplapError as e:
            if e.id == "SL502":  # which says already what the sample builder has to do
                raise
            raise error("SL502", where=self.spec.name, got=f"{e.id} {e.what}: {e.got}", expected=e.expected) from e
        return recipe

    def _recipe(self, sizes: dict[str, Any], scalars: dict[str, Any]) -> SampleRecipe:
        """Return the recipe (the description of a sample) with ``sizes`` by dim name and ``scalars`` by argument name.
        Each dtype class of the declaration gets float32, or else the first preferred dtype that it admits.
        """
        classes = self.spec.dtype_classes
        dtypes = {c: next(n for n in PREFERRED if n in t.dtypes or not t.dtypes) for c, t in classes.items()}
        return SampleRecipe().but(
            sizes=sizes, scalars={k: v for k, v in scalars.items() if k not in sizes}, dtypes=dtypes
        )

    def _env(self, recipe: SampleRecipe) -> dict[str, Any]:
        """Return the values of all dims and scalars of ``recipe`` by name, computed dims included. Raise ``SL502`` if
        the declaration does not admit these values or if the results would not fit in memory.
        """
        sizes, scalars = dict(recipe.sizes), dict(recipe.scalars)
        scalars |= {a.name: sizes[a.name] for a in self.spec.scalars if a.name in sizes}
        env = dim_environment(self.spec, {**sizes, "...": (2,)}, scalars)
        if env is None or not results_are_affordable(self.spec, env):
            raise error("SL502", where=self.spec.name, got=str(recipe), expected="sizes that the declaration admits")
        return env

    def build(self, recipe: SampleRecipe) -> SampleCase:
        """Return the sample that ``recipe`` describes. Its values follow from the recipe and the seed. Raise the errors
        of the declaration's own checks if the recipe does not fit the declaration.
        """
        env = self._env(recipe)
        digest = hashlib.sha256(f"{self.seed}|{recipe.values_key}".encode()).digest()
        rng = torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
        own = self.op.sampler is not None
        drawn = build_arguments(self.op, recipe, env, rng, self.device) if own else self._drawn(recipe, env, rng)
        if self._keeps_values or recipe.values == SHARED_NUMBERS:
            drawn = change_values(drawn, recipe.values, rng)
        args = tuple(self._place(recipe, a, v) for a, v in zip(self.spec.args, drawn, strict=True))
        return SampleCase(recipe, self.seed, args, self.op.bind(args).env, str(self.device), bool(self.spec.random))

    def blank(self, recipe: SampleRecipe) -> Binding:
        """Return the arguments that ``recipe`` describes, bound to the parameters of the op. Their tensors are on the
        meta device and have no values. They are used to check sizes, dtypes and layouts.
        """
        drawn = self._drawn(recipe, self._env(recipe), None)
        return self.op.bind([self._place(recipe, a, v) for a, v in zip(self.spec.args, drawn, strict=True)])

    def make(self, recipe: SampleRecipe) -> SampleCase | None:
        """Return the sample that ``recipe`` describes, or None if the declaration or the op's builder refuses it. Small
        samples and refusals are cached.
        """
        key = str(recipe)
        if key in self._known:
            return self._known[key]
        began = time.process_time()
        try:
            case = self.build(recipe)
        except Exception:
            # A builder may refuse a recipe by any exception.
            case = None
        if case is not None:
            self.times.add(larger_dims(recipe, self.base), case.numel, time.process_time() - began, built=True)
        if case is None or case.numel < MAX_KEPT_ELEMENTS:
            self._known[key] = case
        return case

    def _cases(self, recipes: Iterable[SampleRecipe]) -> Iterator[SampleCase]:
        """Yield the samples of those ``recipes`` (descriptions of samples) that the op's declaration admits, in order.
        Equal recipes yield one sample.
        """
        seen: set[str] = set()
        for recipe in recipes:
            if str(recipe) not in seen and (case := self.make(recipe)) is not None:
                seen.add(str(recipe))
                yield case

    def _drawn(self, recipe: SampleRecipe, env: dict[str, Any], rng: torch.Generator | None) -> tuple[Any, ...]:
        """Return the arguments of a recipe in schema order for an op without a builder of samples. ``env`` has the
        values of dims and scalars by name. Tensors have random values from ``rng``. If ``rng`` is None, they are on the
        meta device and have no values.
        """
        positive = [v for v in env.values() if type(v) is int and v > 0]
        below = min([env[d] for d in free_dims(self.spec) if type(env[d]) is int and env[d] > 0] or positive or [1])

        def tensor(arg: Arg, member: int = 0) -> Tensor:
            """Return a contiguous tensor with drawn values for the argument ``arg``. For a list argument, it is the
            tensor at the index ``member``. If ``rng`` of the enclosing function is None, the tensor is on the meta
            device.
            """
            assert arg.tensor is not None
            kind = arg.tensor
            name = kind.dtypes[0] if kind.concrete else dict(recipe.dtypes)[kind.dtype_class]
            shape = tuple(
                int(n) for n in declared_output_shape(Output(arg.name, kind), env | recipe.member_sizes(arg, member))
            )
            if rng is None:
                return torch.empty(shape, dtype=getattr(torch, name), device="meta")
            return draw_values(shape, getattr(torch, name), recipe.values, below, rng)

        def value(arg: Arg) -> Any:
            """Return the value of the argument ``arg``, which is an object, a scalar, a tensor, or a list of tensors.
            An absent member of a list is None.
            """
            if arg.cls is not None:
                return sample_object(arg.cls, self.spec.name, arg.name, rng or torch.Generator(), env)
            if arg.scalar is not None:
                size = env[arg.name]
                return list(size) if isinstance(size, tuple) else size
            if not arg.many:
                return tensor(arg)
            return [tensor(arg, i) if there else None for i, there in enumerate(recipe.members(arg))]

        return tuple(value(a) for a in self.spec.args)

    def _place(self, recipe: SampleRecipe, arg: Arg, value: Any) -> Any:
        """Return ``value``, the value of the argument ``arg``, with each tensor on the device and in the layout and the
        integer dtype that the recipe names for the argument. Return None if the recipe leaves the argument out.
        """
        if arg.name in recipe.absent:
            return None
        layouts = dict(recipe.layouts)
        layout = layouts.get(arg.name, layouts.get("every", ""))
        wanted = dict(recipe.dtypes).get(arg.tensor.dtype_class, "") if arg.tensor else ""

        def place(t: Tensor) -> Tensor:
            """Return ``t`` on the device of these samples. If the declaration admits the layout that the recipe names
            for the argument, the result has this layout. Otherwise it has that of ``t``.
            """
            t = as_numbers(t.detach().to(self.device), wanted)
            if layout.startswith("expanded") and self.op.sampler is not None:
                return t  # a builder's values may be symmetric or sorted, and expanding would break that
            fits = layout and layout_is_possible(layout, t, contiguous=arg.contiguous, mutated=arg.mutated)
            return apply_layout(t, layout) if fits else t

        return tree_map(place, (value,))[0]

    def plain(self) -> Iterator[SampleCase]:
        """Yield the base sample, which has small distinct sizes, default scalars and float32. Yield no other."""
        yield from self._cases([self.base])

    def values(self) -> Iterator[SampleCase]:
        """Yield samples with each kind of values in ``PLAIN_KINDS``, such as ``ties`` or ``zeros``, at the base sizes
        and then at larger ones.
        """
        yield from self._cases(
            b.but(values=k) for b in (self.base, *(c.recipe for c in self.grown(1))) for k in PLAIN_KINDS
        )

    def dtypes(self) -> Iterator[SampleCase]:
        """Yield the base sample in every floating-point dtype that the declaration admits, then in complex64 and
        complex128 if it admits these alone. An argument that may have integer dtypes, or bool or complex ones beside
        others, follows in each of them that the reference accepts.
        """
        classes = self.spec.dtype_classes
        for dtype in FLOATS:
            names = {c: dtype for c, t in classes.items() if dtype in t.dtypes or not t.dtypes}
            if dtype == "float64":
                names |= {c: "complex128" for c, t in classes.items() if set(t.dtypes) == COMPLEX}
            if names:
                yield from self._cases([self.base.but(dtypes=names)])
        others = {c: t.dtypes or OTHERS for c, t in classes.items() if set(t.dtypes) not in (COMPLEX, {"bool"})}
        for dtype in OTHERS:  # some of torch's operators take no narrow integers, to index with
            if names := {c: dtype for c, taken in others.items() if dtype in taken}:
                accepted = (c for c in self._cases([self.base.but(dtypes=names)]) if reference_accepts(self.op, c.args))
                yield from (c for c in accepted if dtype != "bool" or keeps_bool(self.op, c.args))

    def scalars(self) -> Iterator[SampleCase]:
        """Yield samples with one scalar argument at a value other than its default. The sizes are those of the base
        sample, unless the value requires other sizes.
        """
        yield from self._scalars(
            {a.name: list(scalar_candidates(a)[: None if a.choices else 4]) for a in self.spec.scalars}
        )
        texts = {a.name: list(self.code_constants.strings) if takes_any_text(a) else [] for a in self.spec.scalars}
        yield from islice((c for c in self._scalars(texts) if reference_accepts(self.op, c.args)), MOST_TEXTS)

    def odd_scalars(self) -> Iterator[SampleCase]:
        """Yield samples with one scalar argument at an unusual value, which is negative, zero, large, or near a number
        in the op's code. Then yield samples with all combinations of up to three bool arguments.
        """
        yield from self._scalars({a.name: odd_scalar_values(a, self.code_constants) for a in self.spec.scalars})
        flags = [a.name for a in self.spec.scalars if a.scalar == "bool"][:3]
        chosen = product((False, True), repeat=len(flags)) if len(flags) > 1 else ()
        yield from self._cases(self.base.but(scalars=dict(zip(flags, values, strict=True))) for values in chosen)

    def _scalars(self, tried: dict[str, list[Any]]) -> Iterator[SampleCase]:
        """Yield samples with one scalar argument at each of the values that ``tried`` lists under its name. All other
        scalars have their defaults. If a value requires it, the sample has other sizes than the base sample.
        """
        for arg in self.spec.scalars:
            if arg.name in dict(self.base.sizes):
                continue
            usual = dict(self.base.scalars).get(arg.name)
            made = set[str]()
            doubled = [2 * usual] if type(usual) is int and usual > 1 and tried[arg.name] else []
            for value in (*tried[arg.name], *doubled):
                if value in doubled and made - {str(usual)}:
                    continue  # a multiple of the usual value is tried where nothing else was admitted
                direct = self.base.but(scalars={arg.name: value})
                if self.make(direct) is not None:
                    made.add(str(value))
                    yield from self._cases([direct])
                    continue
                scalars = search_sizes(self.spec, fixed_scalars={**dict(self.base.scalars), arg.name: value})
                if scalars is not None:
                    made.add(str(value))
                    yield from self._cases([self._recipe(*scalars)])

    @cached_property
    def code_constants(self) -> CodeConstants:
        """The integers, floats and strings in the code of the op. A kernel may branch at such a constant."""
        return find_code_constants(self.op)

    def thresholds(self) -> Iterator[SampleCase]:
        """Yield samples of every dtype whose values lie at and near the op's scalars, the numbers in its code, and the
        last positions in its dims, where the code may branch. Yield nothing if the op has a builder of samples.
        """
        last = [float(n - 1) for _, n in self.base.sizes if type(n) is int]  # a value may be a position in a row
        numbers = dict(self.base.scalars).values()
        if kind := "" if self.op.sampler else threshold_value_kind(self.code_constants, numbers, last):
            yield from self._cases(r.but(values=kind) for r in [c.recipe for c in self.dtypes()] or [self.base])

    def lists(self) -> Iterator[SampleCase]:
        """Yield samples in which one argument that is a list of tensors has another number of members, such as 1, 3, 0
        or 9. Then yield samples whose members differ in size.
        """
        for arg in self.spec.tensors:
            for length in self.code_constants.members if arg.many and not arg.length else ():
                yield from self._cases([self.base.but(lists={arg.name: length})])
        for lists in uneven_lists(self.spec) if self.op.sampler is None else ():
            yield from (c for c in self._cases([self.base.but(lists=lists)]) if reference_accepts(self.op, c.args))

    def special(self) -> Iterator[SampleCase]:
        """Yield samples of every kind of values in every dtype, first at the base sizes and then at larger ones.
        Special kinds such as NaN are included.
        """
        kinds = (SOME_ZEROS,) if self._keeps_values else (*PLAIN_KINDS[1:], *SPECIAL_KINDS)
        dtypes = [c.recipe for c in self.dtypes()] or [self.base]
        yield from self._cases(r.but(values=kind) for kind in kinds for r in dtypes)
        grown = next((c.recipe for c in self.grown(1)), self.base)
        wide = [r.but(sizes=dict(grown.sizes)) for r in dtypes]
        yield from self._cases(r.but(values=kind) for kind in ("normal", *kinds) for r in wide)

    def long(self) -> Iterator[SampleCase]:
        """Yield samples in every dtype with one dim of 4,096 elements. If a kernel adds up that many terms in a narrow
        dtype, it loses digits.
        """
        kinds = ("normal",) if self._keeps_values else ("positive", "normal")
        for name, kind in free_dims(self.spec).items():
            for case in self._resized({name: LONG_SUM if kind != "variadic" else (LONG_SUM,)}):
                for recipe in [c.recipe for c in self.dtypes()] or [self.base]:
                    sized = recipe.but(sizes=dict(case.recipe.sizes))
                    yield from self._cases(sized.but(values=kind) for kind in kinds)

    def crowded(self) -> Iterator[SampleCase]:
        """Yield samples with one dim of 8,193 elements whose values lie close together, are equal, or are masked."""
        for name, kind in free_dims(self.spec).items() if not self._keeps_values else ():
            for case in self._resized({name: CROWDED_SIZE if kind != "variadic" else (CROWDED_SIZE,)}):
                yield from self._afforded(self._cases(case.recipe.but(values=k) for k in CROWDED_KINDS))

    def tiles(self) -> Iterator[SampleCase]:
        """Yield samples with sizes around the tiles and thresholds of kernels and around powers of two up to 4,096.

        First several dims vary together, and the dim that takes least time is large. Then each dim varies alone, then
        several together again. Long dims and large tensors follow. A dim stops growing once the caller takes longer
        than ``SLOW_SIZE_S`` for each of two sizes in a row.
        """
        kinds = free_dims(self.spec)
        fixed = [name for name, kind in kinds.items() if kind != "variadic"]
        first: Iterator[dict[str, Any]] = chain(
            islice(joint_sizes(fixed), 2), variadic_sizes(n for n in kinds if n not in fixed)
        )
        for wanted in first:
            yield from self._afforded(self._resized(wanted))  # before the others, which may use up the time
        cheapest = sorted(fixed, key=lambda name: (self.times.pace((name,)), -fixed.index(name)))
        early = list(islice(self.grains(*cheapest), 1))
        yield from self._afforded(early)
        orders, turns, end = cycle(VALUE_ORDERS), cycle(range(max(2, len(kinds)))), time.process_time() + RARE_SIZES_S
        for size in sizes_near_constants(self.code_constants):
            next(turns)  # one extra step for each size, so that the dims take turns
            for name, kind in kinds.items():
                ordered = size not in USUAL_SIZES and (len(kinds) < 3 or next(turns) == 0) and time.process_time() < end
                if self.times.is_slow(name, size):
                    continue
                began = time.process_time()
                for case in self._resized({name: (size,) if kind == "variadic" else size}):
                    yield from self._afforded(chain([case], self._ordered(case, next(orders)) if ordered else ()))
                self.times.add_size(name, size, time.process_time() - began)
        for wanted in joint_sizes(fixed):
            for case in self._resized(wanted) if time.process_time() < end else ():
                turned = self._ordered(case, next(orders)) if min(wanted.values()) > 1 else ()
                yield from self._afforded(chain([case], turned))
        done = {case.label for case in early}
        yield from self._afforded(c for c in chain(self.grains(), self.millions()) if c.label not in done)

    def _ordered(self, case: SampleCase, order: str) -> Iterator[SampleCase]:
        """Yield samples with the recipe of ``case`` but other values. In the first, one element of each row is far
        larger or smaller than the others. The second has values of the kind ``order``, such as ``descending``. Yield
        nothing if the sample is large or if the op's builder ignores kinds of values.
        """
        if case.numel <= MAX_SAMPLE_ELEMENTS >> 1 and not self._keeps_values:
            yield from self._cases(case.recipe.but(values=kind) for kind in ("peaks", order))

    def _afforded(self, cases: Iterable[SampleCase]) -> Iterator[SampleCase]:
        """Yield those of ``cases`` that are small enough and are expected to take the caller at most ``AFFORDED_S``.

        The expectation follows from the time that the caller took for earlier cases, measured from a yield to the next
        request.
        """
        for case in cases:
            dims = larger_dims(case.recipe, self.base)
            if case.numel > MAX_SAMPLE_ELEMENTS or self.times.exceed(dims, case.numel):
                continue
            began = time.process_time()
            yield case
            self.times.add(dims, case.numel, time.process_time() - began)

    def millions(self) -> Iterator[SampleCase]:
        """Yield samples with more than 2^20 elements in one tensor, by a larger first or last dim. They exceed
        counters, grids and buffers of a fixed size.
        """
        names = [name for name, kind in free_dims(self.spec).items() if kind != "variadic"]
        for name in dict.fromkeys([*names[:1], *names[-1:]]):
            base, size = self.build(self.base), dict(self.base.sizes).get(name)
            if isinstance(size, int) and size > 0:
                others = max([1, *(t.numel() // size for t in tensors_among(base.args))])
                yield from self._resized({name: MILLION_ELEMENTS // others + 1})

    def wide(self) -> Iterator[SampleCase]:
        """Yield samples with one dim at a few sizes, such as 65 and 1,025, that are larger than one tile of a kernel.
        Checks that take long use these samples instead of those of ``tiles``.
        """
        sizes = [n + 1 for n in self.code_constants.ints if LARGEST_COMMON_SIZE < n < LONG_SUM // 4][:4]
        for size in dict.fromkeys((65, *sizes, 1025)):
            for name, kind in free_dims(self.spec).items():
                cases = self._resized({name: (size,) if kind == "variadic" else size})
                yield from (c for c in cases if c.numel <= MAX_SAMPLE_ELEMENTS >> 3)

    def grains(self, *names: str) -> Iterator[SampleCase]:
        """Yield samples with one dim so large that a tensor has more than 70,000 elements. From 32,768 elements on,
        torch splits loops over a tensor between threads. The dims are those of ``names``, or all dims in turn.
        """
        kinds, base = free_dims(self.spec), self.make(self.base)
        for name in names or kinds:
            size = dict(self.base.sizes).get(name)
            if kinds[name] == "variadic" or not isinstance(size, int) or base is None or not size:
                continue
            others = max(1, max((t.numel() // size for t in tensors_among(base.args)), default=1))
            wanted = GRAIN_ELEMENTS // others + 1
            yield from (
                (c for c in self._resized({name: wanted}) if c.numel <= MAX_SAMPLE_ELEMENTS)
                if wanted > LONG_SUM
                else ()
            )

    def optionals(self) -> Iterator[SampleCase]:
        """Yield samples with each optional tensor left out in turn, then one with all of them left out.

        Then yield samples with size 1 for each dim that the declaration lets broadcast in turn, then one with size 1
        for all of these dims.
        """
        absent = [a.name for a in self.spec.tensors if a.optional]
        yield from self._cases(self.base.but(absent=group) for group in name_groups(absent))
        yield from self._cases(
            self.base.but(sizes=dict.fromkeys(group, 1)) for group in name_groups(self.spec.broadcasts)
        )

    def edges(self) -> Iterator[SampleCase]:
        """Yield samples with one dim of size 0, of size 1, and of sizes around 16 and 32. Then yield one with all dims
        of size 0.
        """
        kinds = free_dims(self.spec)
        for name, kind in kinds.items():
            for size in ((), (0,), (1,), (2, 3)) if kind == "variadic" else EDGE_SIZES:
                yield from self._resized({name: size})
        yield from self._resized({n: 0 for n, kind in kinds.items() if kind != "variadic"})

    def ranks(self) -> Iterator[SampleCase]:
        """Yield samples with two dims, with none and with three in place of each variadic dim, which is one that stands
        for any number of dims.
        """
        for name in (n for n, kind in free_dims(self.spec).items() if kind == "variadic"):
            for size in ((2, 3), (), (3, 1, 2)):
                yield from self._resized({name: size})

    def grown(self, count: int) -> Iterator[SampleCase]:
        """Yield at most ``count`` samples that are larger than the base sample, with growing sizes.

        First all dims are enlarged at once. If the declaration does not admit that, one dim alone or multiples of the
        sizes are tried.
        """
        base, kinds = dict(self.base.sizes), free_dims(self.spec)
        for step in range(1, 4 * count + 1):
            if count == 0:
                return
            sizes = {n: _larger(v, step * (5 + i)) for i, (n, v) in enumerate(base.items())}
            times = {n: 8 * step * v if type(v) is int else v for n, v in base.items()}
            # The size of a dim without a name often follows from other sizes, and a builder does not read it.
            alone = [{n: v} for n, v in sizes.items() if kinds.get(n) != "any"]
            multiples = [{n: (step + 1) * v} for n, v in base.items() if type(v) is int and kinds.get(n) == "name"]
            for wanted in (sizes, *alone, times, *multiples, *({n: v} for n, v in sizes.items())):
                case = next(self._resized(wanted), None)
                if case is not None and case.recipe.total > self.base.total:
                    count -= 1
                    yield case
                    break

    def _resized(self, sizes: dict[str, Any]) -> Iterator[SampleCase]:
        """Yield the sample that has the given ``sizes`` by dim name, and is otherwise the base sample. If one size is
        given and the declaration requires it, other sizes and scalars change, too. Yield nothing if no such sample is
        admitted or if it would take too long.
        """
        direct = self.base.but(sizes=sizes)
        elements = self._elements(direct)
        if elements > MAX_SAMPLE_ELEMENTS or self.times.exceed(larger_dims(direct, self.base), elements):
            return
        if self.make(direct) is not None:
            yield from self._cases([direct])
        elif len(sizes) == 1 and (resized := self._fitted(sizes)) is not None:
            yield from self._cases([resized])

    def _elements(self, recipe: SampleRecipe) -> int:
        """Return the number of elements of all tensors that ``recipe`` describes, without allocating them. Return 0 if
        the declaration refuses the sizes.
        """
        try:
            return sum(t.numel() for t in tensors_among(Samples(self.op, self.seed, "meta").blank(recipe).args))
        except Exception:
            return 0

    def _fitted(self, sizes: dict[str, Any]) -> SampleRecipe | None:
        """Return a recipe in which the one dim in ``sizes`` has the size given there. Return None if the declaration
        admits no such recipe.

        All other sizes and scalars are chosen so that the declaration admits the recipe. Results are cached.
        """
        if (key := str(sizes)) not in self._sized:
            (name,) = sizes
            # After several refusals another one is likely, so the search is short.
            limit = SEARCH_LIMIT if self._refused.get(name, 0) < SEARCH_PATIENCE else SEARCH_LIMIT // 32
            solution = search_sizes(self.spec, sizes, dict(self.base.scalars), limit)
            self._refused[name] = 0 if solution else self._refused.get(name, 0) + 1
            self._sized[key] = solution and self._recipe(*solution).but(dtypes=dict(self.base.dtypes))
        return self._sized[key]

    def layouts(self, base: SampleRecipe | None = None) -> Iterator[SampleCase]:
        """Yield samples of the recipe ``base``, by default that of the base sample, in other memory layouts. Each is
        tried for each tensor argument alone, then for all together. Samples that stay contiguous are left out.
        """
        recipe = base or self.base
        for layout in LAYOUTS:
            for name in (*(a.name for a in self.spec.tensors), "every"):
                case = self.make(recipe.but(layouts={name: layout}))
                if case is not None and not _is_plain_case(case):
                    yield case


def _larger(size: Any, by: int) -> Any:
    """Return a size, or each size in the tuple of a variadic dim, plus ``by``. Sizes of 0 and 1 are unchanged, since
    they are special cases.
    """
    if isinstance(size, tuple):
        return tuple(_larger(n, by) for n in size)
    return size + by if type(size) is int and size > 1 else size


def _is_plain_case(case: SampleCase) -> bool:
    """Return whether all tensors of a sample are contiguous and at the start of their storage."""
    flags: list[bool] = []
    tree_map(lambda t: flags.append(t.is_contiguous() and t.storage_offset() == 0), case.args)
    return all(flags)
