"""Samples in which two properties are unusual at once, since a kernel may have a path for just that pair.

One unusual property alone is covered by other samples. The pairs here are those on which code branches: two scalars,
dtype and layout, a size of one and layout, and many elements for checks of memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain, combinations, islice, product
from typing import Any

from shiplap.dtypes import integers_alone
from shiplap.sampling.builder import builder_takes_values
from shiplap.sampling.case import SampleCase
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.samples import Samples
from shiplap.sampling.sizes import free_dims, scalar_candidates
from shiplap.sampling.values import AROUND_PREFIX, DATA_KINDS

DTYPE_LAYOUTS = ("transposed", "padded", "strided", "offset")
ONES_LAYOUTS = ("strided", "column_major", "padded", "gaps")
DIMS, PAIRS = 3, 6  # the most dims, and the most pairs of scalars
COMBINATIONS = 24  # the most combinations of listed values of two scalars
UNUSUAL_FLOATS = ("zeros", "large", "saturating")  # kinds of values that are tried with other scalars
FAR_FLOAT = 0.25  # a value of a scalar, far from most defaults
THRESHOLDS = 8  # the most numbers near which values lie, with another value of a scalar
REMAINDERS = (1, 2, 3)  # growth of sizes that scalars divide
PADDED = 64  # a multiple of the usual padding of rows
POWERS = 256  # elements along one dim, enough for most powers of two of a dtype and their neighbours
AFFORDED_S = 2.0  # seconds of processor time for a series of samples with many elements


def pairs_of_scalars(samples: Samples) -> Iterator[SampleCase]:
    """Yield samples like the base sample with two scalars at values other than their defaults, for at most ``PAIRS``
    pairs of scalars. If there are more than two scalars, yield one with all of them at other values at last.

    Then yield the other combinations of two scalars of which at least one may only have values that the declaration
    lists, at most ``COMBINATIONS`` of them.
    """
    others = _other_scalar_values(samples)
    yield from _make_cases(
        samples, (samples.base.but(scalars={n: others[n] for n in names}) for names in _name_pairs(others))
    )
    usual, listed = dict(samples.base.scalars), {a.name: a.choices for a in samples.spec.scalars if a.choices}
    values = {n: [v for v in listed.get(n, (v,)) if v != usual.get(n)] for n, v in others.items()}
    rest = (
        dict(zip(pair, chosen, strict=True))
        for pair in combinations(others, 2)
        for chosen in product(*(values[n] for n in pair))
    )
    new = (scalars for scalars in rest if any(others[n] != v for n, v in scalars.items()))
    yield from _make_cases(samples, (samples.base.but(scalars=scalars) for scalars in islice(new, COMBINATIONS)))


def scalars_of_sizes(samples: Samples) -> Iterator[SampleCase]:
    """Yield samples that combine changed sizes with other values of one scalar, of two or of all scalars.

    First each dim of the first tensor is doubled, plus one. Then all dims are larger by 1, 2 and 3. A size divided by a
    window, a stride or a number of groups then leaves another remainder than in the base sample.
    """
    others, sizes = _other_scalar_values(samples), {n: v for n, v in samples.base.sizes if type(v) is int and v > 1}
    first = next((t.tensor for t in samples.spec.tensors if t.tensor), None)
    leading = {d.of or d.text for d in first.dims} if first else set()
    wanted = [{n: 2 * v + 1 if n in leading else v for n, v in sizes.items()}]
    wanted += [{n: v + more for n, v in sizes.items()} for more in REMAINDERS]
    groups = (*((n,) for n in others), *_name_pairs(others))
    recipes = (samples.base.but(scalars={n: others[n] for n in g}, sizes=w) for g in groups for w in wanted)
    yield from _make_cases(samples, recipes)


def scalars_of_ties(samples: Samples) -> Iterator[SampleCase]:
    """Yield samples that have many equal elements and one scalar at a value other than its default. A scalar often
    determines the order of equal elements.
    """
    others = _other_scalar_values(samples)
    yield from _make_cases(samples, (samples.base.but(scalars={n: v}, values="ties") for n, v in others.items()))


def scalars_of_values(samples: Samples) -> Iterator[SampleCase]:
    """Yield samples that have unusual values in the tensors and one scalar at a value other than its default. A divisor
    or a limit of 1 hides how a kernel treats numbers below zero. Yield nothing if the op's builder of samples ignores
    kinds of values.
    """
    if samples.op.sampler is not None and not builder_takes_values(samples.op):
        return
    whole = any(integers_alone(a.tensor.dtypes) for a in samples.spec.tensors if a.tensor)
    kinds = DATA_KINDS if whole else UNUSUAL_FLOATS
    others = _other_scalar_values(samples)
    recipes = (samples.base.but(scalars={n: v}, values=kind) for n, v in others.items() for kind in kinds)
    yield from _make_cases(samples, recipes)


def scalars_of_thresholds(samples: Samples) -> Iterator[SampleCase]:
    """Yield samples whose values lie at and near a number at which the op's code may branch, with one scalar at a value
    other than its default. A kernel may compare an element alone where it should compare the product of both.
    """
    kind = next((c.recipe.values for c in samples.thresholds()), "")
    # Each number alone: next to large numbers, the error of the reference is too large for small ones to show.
    kinds = [f"{AROUND_PREFIX}{n}" for n in kind.removeprefix(AROUND_PREFIX).split()[:THRESHOLDS]]
    others, sizes = (_other_scalar_values(samples), _size_for_all_values(samples)) if kinds else ({}, {})
    # A second number for a float, since the first one may be too near to the default for a difference to show.
    values = [(n, v) for n, first in others.items() for v in ((first, FAR_FLOAT) if type(first) is float else (first,))]
    recipes = (samples.base.but(scalars={n: v}, values=k, sizes=sizes) for n, v in values for k in kinds)
    yield from _make_cases(samples, recipes)


def padded_multiples(samples: Samples) -> Iterator[SampleCase]:
    """Yield the base sample with one dim changed to the size ``PADDED`` (64), once for each dim. This size is a
    multiple of the usual padding of rows.
    """
    for name in (n for n, kind in free_dims(samples.spec).items() if kind != "variadic"):
        yield from _make_cases(samples, [samples.base.but(sizes={name: PADDED})])


def _other_scalar_values(samples: Samples) -> dict[str, Any]:
    """Return, by name, one value other than the default for each scalar argument that is not the size of a dim.

    It is the first value that the declaration admits while all other scalars have their defaults. If there is none, it
    is the first value that was tried.
    """
    base, others = samples.base, dict[str, Any]()
    for number, arg in enumerate(a for a in samples.spec.scalars if a.name not in dict(base.sizes)):
        usual = dict(base.scalars).get(arg.name)
        tried = [v for v in (*_uneven_tuples(usual, number), *scalar_candidates(arg)) if v is not None and v != usual]
        alone = (v for v in tried if samples.make(base.but(scalars={arg.name: v})) is not None)
        for value in islice(chain(alone, tried), 1):
            others[arg.name] = value
    return others


def _uneven_tuples(usual: Any, number: int) -> list[Any]:
    """Return two tuples of unequal ints, each the reverse of the other, to try in place of ``usual``. If the ints were
    equal, a kernel could mix up the strides or dilations of two dims unnoticed.

    The list is empty unless ``usual`` is a tuple or list of several ints. ``number`` is the index of the argument. Two
    successive arguments get the tuples in opposite order, so that they differ from each other.
    """
    if not (isinstance(usual, (tuple, list)) and len(usual) > 1 and all(type(v) is int for v in usual)):
        return []
    more = [v + (i + number) % 2 for i, v in enumerate(usual)]
    return [tuple(more), tuple(reversed(more))]


def _name_pairs(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the first ``PAIRS`` (6) pairs of the names, as tuples in a list. A tuple of all names follows if there are
    more than two.
    """
    names = tuple(names)
    return [*islice(combinations(names, 2), PAIRS), *([names] if len(names) > 2 else [])]


def layouts_of_dtypes(samples: Samples) -> Iterator[SampleCase]:
    """Yield samples of every dtype but that of the base sample, with all tensors in each of the memory layouts
    ``DTYPE_LAYOUTS``. They are tried together because kernels often have separate fast code for each dtype.
    """
    recipes = [c.recipe for c in samples.dtypes() if c.recipe.dtypes != samples.base.dtypes]
    yield from _make_cases(samples, (r.but(layouts={"every": layout}) for r in recipes for layout in DTYPE_LAYOUTS))


def layouts_of_ones(samples: Samples) -> Iterator[SampleCase]:
    """Yield samples with one dim of size 1, in each of the memory layouts ``ONES_LAYOUTS``. The stride of such a dim is
    arbitrary.
    """
    for name in islice((n for n, kind in free_dims(samples.spec).items() if kind != "variadic"), DIMS):
        sized = samples.base.but(sizes={name: 1})
        if sized.sizes != samples.base.sizes:
            yield from _make_cases(samples, (sized.but(layouts={"every": layout}) for layout in ONES_LAYOUTS))


def powers_of_two(samples: Samples) -> Iterator[SampleCase]:
    """Yield samples in every dtype with one dim of 256 elements, which is the first dim that the declaration lets have
    this size. Their values are powers of two and the numbers next to these.
    """
    if sizes := _size_for_all_values(samples):
        recipes = [c.recipe for c in samples.dtypes()] or [samples.base]
        yield from _make_cases(samples, (r.but(sizes=sizes, values="powers") for r in recipes))


def _size_for_all_values(samples: Samples) -> dict[str, int]:
    """Return the name of the first dim that the declaration lets have ``POWERS`` (256) elements, with this size, as a
    dict. It is empty if there is none. In so many elements, each value of a kind of many values usually occurs.
    """
    names = (n for n, kind in free_dims(samples.spec).items() if kind != "variadic")
    return next(({n: POWERS} for n in names if samples.make(samples.base.but(sizes={n: POWERS})) is not None), {})


def large_samples(samples: Samples) -> Iterator[SampleCase]:
    """Yield samples larger than one tile of a kernel, then one so large that torch splits loops over it between
    threads. End when the time for them (``AFFORDED_S``) is used up.
    """
    yield from within_time(chain(samples.wide(), islice(samples.grains(), 1)))


def within_time(cases: Iterable[SampleCase]) -> Iterator[SampleCase]:
    """Yield ``cases`` in order while the caller's processor time for them stays within ``AFFORDED_S`` seconds. A case
    that is expected to exceed that time is left out. The time of a case is estimated from the time that the caller took
    for earlier ones. The cases should grow in size.
    """
    spent, pace = 0.0, 0.0
    for case in cases:
        if spent + pace * case.numel > AFFORDED_S:
            continue
        began = time.process_time()
        yield case
        took = time.process_time() - began
        spent, pace = spent + took, max(pace, took / max(1, case.numel)) if case.numel > POWERS else pace


def _make_cases(samples: Samples, recipes: Iterable[SampleRecipe]) -> Iterator[SampleCase]:
    """Yield, in order, the samples of those ``recipes`` (descriptions of samples) that the op's declaration admits."""
    yield from filter(None, map(samples.make, recipes))
