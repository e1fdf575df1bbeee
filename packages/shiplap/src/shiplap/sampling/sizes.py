"""Search for sizes and scalars that a declaration admits, by trial, without inverting the dim language."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from typing import Any

import torch

from shiplap.declare.binding import declared_output_shape
from shiplap.declare.dim_expression import Expr
from shiplap.declare.spec import Arg, OpSpec

EDGE_SIZES = (0, 1, 15, 16, 17, 31, 33)  # empty, single, and around usual widths of vectors and tiles
FIRST_SIZES = (5, 3, 2, 4, 6, 7)  # small and distinct, so that mixed-up dims never agree by accident
OTHER_SIZES = (4, 3, 2, 8, 16, 1, 32, 64, 128)
VARIADIC_SIZES = ((2,), (), (2, 3), (3, 1, 2))
KINDS = ("name", "any", "variadic")
MAX_RESULT_ELEMENTS = 1 << 28  # the most elements of one result of a sample
SEARCH_LIMIT = 60_000  # combinations before the search ends, about 0.4 s
# Errors of expressions, such as a division by a stride of 0.
REFUSAL_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError)


def free_dims(spec: OpSpec) -> dict[str, str]:
    """Return a dict from the names of the dims whose size a sample may choose to their kinds, in declared order. Dims
    that the declaration computes from others are left out.

    The kinds are ``"name"`` for a dim with a name, ``"any"`` for one without, and ``"variadic"`` for a name that stands
    for any number of dims.
    """
    repeated = spec.broadcasts
    computed = {name for name, _ in spec.dims} - {*repeated.values()}
    dims = [d for a in spec.tensors if a.tensor for d in a.tensor.dims if d.kind in KINDS and d.text != "..."]
    return {d.of or d.text: d.kind for d in dims if (d.of or d.text) not in computed}


def broadcast_ones(spec: OpSpec, env: Mapping[str, Any]) -> dict[str, int]:
    """Return ``{dim: 1}`` for each dim that a call with the sizes ``env`` broadcasts. The size of such a dim is 1
    although the dim to which it is broadcast is larger or 0.

    Recipes hold sizes for these dims only. Any other dim that may broadcast has the size of the dim to which it
    belongs.
    """
    return {own: 1 for own, of in spec.broadcasts.items() if env.get(own) == 1 != env.get(of)}


def name_groups(names: Iterable[str], *, every: bool = False) -> Iterator[tuple[str, ...]]:
    """Yield tuples of names. First each name alone is yielded, and at last all names together. If ``every`` is true and
    there are three names, their pairs are yielded in between. Otherwise no pairs are yielded, except that two names are
    a pair together.
    """
    names = tuple(names)
    among = range(2, len(names)) if every and len(names) < 4 else ()
    for count in dict.fromkeys([1, *among, len(names)] if names else ()):
        yield from combinations(names, count)


def dim_environment(spec: OpSpec, sizes: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a dict with the sizes of all dims, computed ones included, and the scalars, by name. Return None if the
    declaration does not admit the combination of ``sizes`` and ``scalars``.
    """
    env = {**scalars, **sizes}
    env = {own: env[of] for own, of in spec.broadcasts.items() if of in env} | env
    try:
        for name, expr in spec.dims:
            env[name] = expr(env)
        inputs = [d for a in spec.tensors if a.tensor for d in a.tensor.dims]
        results = [env[name] for name, _ in spec.dims] + [d.expr(env) for d in inputs if d.expr is not None]
        results += [bound(env) for _, bound in spec.bounds]
        # A dynamic size is only known after the call. Here 0 stands for it.
        known = {**env, **dict.fromkeys(spec.dynamic, 0)}
        results += [size for out in spec.outputs for size in declared_output_shape(out, known)]
        repeated = all(env[own] in (1, env[of]) for own, of in spec.broadcasts.items())
        admitted = all(size >= 0 for size in results) and repeated and all(expr(env) for expr in spec.requires)
    except REFUSAL_ERRORS:
        return None
    return env if admitted else None


def results_are_affordable(spec: OpSpec, env: Mapping[str, Any]) -> bool:
    """Return whether each result of a call with the dims and scalars ``env`` has at most 2^28 elements. A scalar as
    large as 2^40 may be a number of rows, so results may be huge.
    """
    known = {**env, **dict.fromkeys(spec.dynamic, 0)}
    return all(math.prod(declared_output_shape(out, known)) <= MAX_RESULT_ELEMENTS for out in spec.outputs)


def scalar_candidates(arg: Arg) -> Sequence[Any]:
    """Return the values to try in samples for the scalar argument ``arg``. Its default, or None for an optional
    argument, comes first. Its declared choices follow, or else usual values of its type.
    """
    if arg.choices:
        first = [arg.default] if arg.has_default else [None] if arg.optional else []
        return [*first, *(c for c in arg.choices if c not in first)]
    kind = str(arg.scalar)
    usual: dict[str, Sequence[Any]] = {
        "int": (1, 2, 3, 4, 8, 32, 0),
        "float": (0.5, 1.0, 2.0, 0.25),  # two of them are probabilities
        "bool": (False, True),
        "str": (),
        "list[int]": [(v,) * n for n in (3, 2, 1, 4) for v in (3, 2, 1)],
        "list[float]": [(v,) * n for n in (3, 2, 1) for v in (0.5, 1.0)],
        "list[bool]": [(v,) * n for n in (3, 2, 1) for v in (False, True)],
        "complex": (0.5 + 1j, 1 + 0j),
        "Scalar": (0.5, 2, 1.0),
        "dtype": (torch.float32, torch.float64, torch.int64),
        "device": (torch.device("cpu"),),
        "layout": (torch.strided,),
        "memory_format": (torch.contiguous_format,),
        "object": (None,),  # an object is made by its class or by a builder
        "Generator": (torch.Generator().manual_seed(0),),
        "list[str]": [()],
        "list[Scalar]": [(v,) * n for n in (3, 2, 1) for v in (0.5, 2)],
    }
    tried = [arg.default] if arg.has_default else [None] if arg.optional else []
    first = [tuple(v) if isinstance(v, list) else v for v in tried]
    same_length = [v for v in usual[kind] if not (first and isinstance(first[0], tuple)) or len(v) == len(first[0])]
    return [*first, *(v for v in same_length if v not in first)]


def takes_any_text(arg: Arg) -> bool:
    """Return whether the scalar argument ``arg`` is a string for which the declaration lists no choices."""
    return str(arg.scalar) == "str" and not arg.choices


def search_sizes(
    spec: OpSpec,
    fixed_sizes: Mapping[str, Any] | None = None,
    fixed_scalars: Mapping[str, Any] | None = None,
    limit: int = SEARCH_LIMIT,
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the first ``(sizes, scalars)`` that the declaration admits, two dicts by name. They have the values in
    ``fixed_sizes`` and ``fixed_scalars``. By default nothing is fixed.

    Return None if none of the first ``limit`` combinations is admitted.
    """
    names, pools = _value_pools(spec, fixed_sizes or {}, fixed_scalars or {})
    dims, scalars = free_dims(spec), [a.name for a in spec.scalars]
    plain = [e for e in spec.requires if e.names <= set(names)]
    for values in islice(_product_outwards(pools), limit):
        chosen = dict(zip(names, values, strict=True))
        # Plain requirements are cheap to check, and refuse most combinations.
        if _requirement_refuses(plain, chosen):
            continue
        # A scalar with the name of a dim is that dim's size.
        solution = {d: chosen[d] for d in dims}, {name: chosen[name] for name in scalars}
        if dim_environment(spec, *solution) is not None:
            return solution
    return None


def _requirement_refuses(requirements: list[Expr], chosen: Mapping[str, Any]) -> bool:
    """Return whether one of the requirements is false for the values ``chosen`` or cannot be computed.

    That requirement is moved to the front of the list ``requirements``, since it is likely to refuse the next values.
    """
    for place, holds in enumerate(requirements):
        try:
            if holds(chosen):
                continue
        except REFUSAL_ERRORS:
            pass
        requirements.insert(0, requirements.pop(place))
        return True
    return False


def _value_pools(
    spec: OpSpec, fixed_sizes: Mapping[str, Any], fixed_scalars: Mapping[str, Any]
) -> tuple[list[str], list[Sequence[Any]]]:
    """Return the names of the free dims and scalars, and a list of the values to try for each name in the same order. A
    fixed dim or scalar has a single value.
    """
    pools: dict[str, Sequence[Any]] = {}
    asked = _sizes_in_requirements(spec)
    for index, (name, kind) in enumerate(free_dims(spec).items()):
        first = FIRST_SIZES[index % len(FIRST_SIZES)]
        usual: Sequence[Any] = (
            VARIADIC_SIZES if kind == "variadic" else (first, *(s for s in OTHER_SIZES if s != first), *asked)
        )
        pools[name] = (fixed_sizes[name],) if name in fixed_sizes else usual
    for arg in spec.scalars:
        if arg.name not in pools:
            values = scalar_candidates(arg)
            pools[arg.name] = (fixed_scalars[arg.name],) if arg.name in fixed_scalars else values
    return list(pools), list(pools.values())


def _sizes_in_requirements(spec: OpSpec) -> list[int]:
    """Return sizes that may satisfy requirements such as ``n % 256 == 0``, which no usual size does.

    They are the numbers in the expressions of the declaration, their successors, and small multiples of them. Sizes
    that are tried anyway are left out.
    """
    texts = [str(e) for e in spec.requires] + [str(e) for _, e in (*spec.dims, *spec.bounds)]
    texts += [d.text for a in spec.tensors if a.tensor for d in a.tensor.dims if d.kind == "expr"]
    numbers = sorted({int(v) for text in texts for v in re.findall(r"(?<![\w.])\d{1,6}(?![\w.])", text)})
    named = [m for v in numbers if 1 < v <= 1 << 16 for m in (v, 2 * v, v + 1, 3 * v)]
    return [v for v in dict.fromkeys(named) if v not in (*FIRST_SIZES, *OTHER_SIZES)]


def _product_outwards(pools: list[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield tuples of one value from each of ``pools``, in all combinations. Combinations of the first values of the
    pools come first. Tuples may repeat.
    """
    if not all(pools):
        return
    for few in (1, 2, 3):
        yield from product(*(p[:few] for p in pools))
    for at, pool in enumerate(pools):  # one rare value alone, before the whole product
        for value in pool[3:]:
            yield tuple(value if i == at else p[0] for i, p in enumerate(pools))
    for width in (8, None):
        yield from product(*(p[:width] for p in pools))
