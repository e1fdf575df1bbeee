"""Find the sizes and dtypes of results from calls: an expression of the dims, a bound, or the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, permutations, product
from typing import Any

from shiplap.declare.dim_expression import Expr
from shiplap.scaffold.calls import DispatchedCall, SeenTensor
from shiplap.scaffold.dims import NamedDims, calls_with_dims, is_plain_name
from shiplap.scaffold.schema import SchemaForm

MOST_NAMES = 10  # dims and ints that expressions of several are made of
# The size in a recorded call that only the data determine, since a fake tensor has no number for it.
DATA_DEPENDENT = -1
CallsWithDims = Sequence[tuple[DispatchedCall, Mapping[str, Any]]]


@dataclass
class ResultSizes:
    """The inferred sizes of an op's results.

    ``shapes`` holds a tuple of names, numbers and expressions for the dims of each result, or None if its sizes cannot
    be declared. ``bounds`` maps new dims, which depend on data, to their upper bounds. ``where`` holds a comment on
    each result, or an empty string.
    """

    shapes: list[tuple[str, ...] | None] = field(default_factory=list)
    bounds: dict[str, str] = field(default_factory=dict)
    where: list[str] = field(default_factory=list)


def find_result_sizes(
    form: SchemaForm, dims: NamedDims, recorded: Sequence[DispatchedCall], probed: Sequence[DispatchedCall]
) -> ResultSizes:
    """Return the inferred sizes of the results of the schema ``form``. They are expressions of the named dims that hold
    in all calls. Sizes that depend on data get bounds.

    The calls are ``recorded`` ones and, in ``probed``, those that the meta kernel accepted.
    """
    rows = calls_with_dims(dims, [*recorded, *probed])
    sizes_found = ResultSizes()
    names = list(dict.fromkeys((*dims.slots, *dims.scalars)))
    for index, result in enumerate(form.results):
        # An alias has the annotation of its argument.
        if result.alias or result.kind != "Tensor" or not rows:
            sizes_found.shapes.append(None)
            sizes_found.where.append("")
            continue
        shape, where = _find_result_shape(index, names, rows, sizes_found.bounds, dims, seen=bool(probed))
        sizes_found.shapes.append(shape)
        sizes_found.where.append(where)
    return sizes_found


def _find_result_shape(
    index: int, names: Sequence[str], rows: CallsWithDims, bounds: dict[str, str], dims: NamedDims, *, seen: bool
) -> tuple[tuple[str, ...] | None, str]:
    """Return ``(texts, comment)`` for the result at ``index``. ``texts`` are the names or expressions of its dims, or
    None if they cannot be found. ``comment`` states the reason for that, or the dims that depend on data.

    ``bounds`` gets an upper bound for each new dim that depends on data. If ``seen`` is true, ``rows`` include calls of
    the meta kernel, whose sizes do not depend on data. Otherwise ``rows`` are recorded calls only.
    """
    shapes = [c.results[index].shape for c, _ in rows if isinstance(c.results[index], SeenTensor)]
    if len(shapes) != len(rows) or len({len(s) for s in shapes}) != 1:
        return None, "a rank that varies" if shapes else "no tensor in a call"
    texts, notes = [], []
    for axis in range(len(shapes[0])):
        sizes = [s[axis] for s in shapes]
        text = _find_expression(sizes, names, rows) if DATA_DEPENDENT not in sizes else None
        if text is None:
            known = _list_few_sizes([s for s in sizes if s != DATA_DEPENDENT])
            if DATA_DEPENDENT in sizes or not seen:  # what a meta kernel knows does not depend on data
                text = _add_bounded_dim(sizes, names, rows, bounds, dims, data=DATA_DEPENDENT in sizes)
            if text is None:
                return None, f"no expression gives size {axis}: {known}"
            notes.append(f"{text} depends on data" + f": {known}" * bool(known))
        texts.append(text)
    return tuple(texts), "; ".join(notes)


def _list_few_sizes(sizes: Sequence[int]) -> str:
    """Return the least four of the different sizes in ``sizes`` as text, such as ``1, 2, 5, 8``. If there are more, ``,
    ...`` follows.
    """
    different = sorted(set(sizes))
    return ", ".join(map(str, different[:4])) + ", ..." * (len(different) > 4)


def _find_expression(sizes: Sequence[int], names: Sequence[str], rows: CallsWithDims) -> str | None:
    """Return the simplest expression of ``names`` whose value is the size in ``sizes`` in each call. ``sizes`` holds
    one size for each call of ``rows``. Return None if there is no such expression.
    """
    different = len(set(sizes)) > 1
    # If no dim varied in the calls, a constant size is no evidence for a constant.
    varied = any(len({env[n] for _, env in rows}) > 1 for n in names if "[" not in n)
    for text in _candidate_expressions(names, sizes[0] if varied or not names else None, deep=different):
        try:
            expr = _parse_expression(text)
            if all(expr(dict(env)) == size for size, (_, env) in zip(sizes, rows, strict=True)):
                return text
        except (ArithmeticError, LookupError, TypeError, ValueError):
            continue
    return None if different else str(sizes[0])


def _candidate_expressions(names: Sequence[str], constant: int | None, *, deep: bool) -> Iterator[str]:
    """Yield the texts of expressions of ``names`` to try for a size, the simplest first. They are the names, and
    ``constant`` unless it is None. If ``deep`` is true, sums, products, quotients and formulas of convolution sizes
    follow.
    """
    yield from names
    if constant is not None:
        yield str(constant)
    if not deep:
        return
    yield from _window_expressions(names)
    # Pairs and triples grow fast with the number of names.
    names = names[:MOST_NAMES]
    yield from (f"{a}*{b}" for a, b in combinations(names, 2))
    yield from (f"{a}+{b}" for a, b in combinations(names, 2))
    # The name times 1 was yielded above.
    yield from (f"{a}{op}{k}" for a in names for op in "*+-" for k in (1, 2, 3, 4) if op != "*" or k > 1)
    yield from (f"{a}//{k}" for a in names for k in (2, 3, 4, 8))
    yield from (f"cdiv({a},{k})" for a in names for k in (2, 3, 4, 8, 16, 32, 64, 128))
    for a, b in permutations(names, 2):
        yield from (f"{a}//{b}", f"cdiv({a},{b})", f"{a}-{b}", f"{a}-{b}+1", f"{a}+{b}-1")
    yield from (f"{a}*{b}*{c}" for a, b, c in combinations(names, 3))


@lru_cache(4096)
def _parse_expression(text: str) -> Expr:
    """Return the expression in ``text`` as an ``Expr``, which can be called with the values of its names."""
    return Expr.parse(text, "draft")


def _window_expressions(names: Sequence[str]) -> Iterator[str]:
    """Yield expressions for the size that a convolution or a pooling gives. They are made of those ``names`` that
    contain a usual word such as ``stride``, ``pad`` and ``dil``.
    """

    def called(*parts: str) -> list[str]:
        """Return those of ``names`` (argument of ``_window_expressions``) that contain one of ``parts``, such as
        ``stride``.
        """
        return [n for n in names if any(p in n for p in parts)]

    strides, pads, spreads = called("stride"), called("pad"), called("dil")
    taps = [*called("kernel", "ksize"), *(n for n in names if n not in (*strides, *pads, *spreads))]
    if not strides and not pads:
        return
    for size, tap in permutations(dict.fromkeys(taps), 2):
        for pad, spread, stride in product(pads or [""], spreads or [""], strides or [""]):
            # The size of a window's result: (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1.
            padded = f"{size}+2*{pad}" if pad else size
            left = f"{padded}-{spread}*({tap}-1)-1" if spread else f"{padded}-{tap}"
            yield f"({left})//{stride}+1" if stride else f"{left}+1"


def _add_bounded_dim(
    sizes: Sequence[int],
    names: Sequence[str],
    rows: CallsWithDims,
    bounds: dict[str, str],
    dims: NamedDims,
    *,
    data: bool,
) -> str | None:
    """Add to ``bounds`` a new dim for a size that no expression gives, and return the dim's name. ``sizes`` holds this
    size in each call. The bound of the dim is the expression of ``names`` that is closest above the size in all calls.

    ``data`` states whether the size depends on the values of tensors. If it does not, the size must be known in two
    calls. Return None if it is not, or if no expression is a bound.
    """
    known = [(size, env) for size, (_, env) in zip(sizes, rows, strict=True) if size != DATA_DEPENDENT]
    options = [*names, *(f"{a}*{b}" for a, b in combinations([n for n in names if n in dims.slots], 2))]
    holding = []
    for text in options:
        values = [_parse_expression(text)(dict(env)) for _, env in (known or [(0, env) for _, env in rows])]
        if all(type(v) is int for v in values) and all(s <= v for (s, _), v in zip(known, values, strict=False)):
            holding.append((sum(v for v in values if isinstance(v, int)), text))
    # A single size is no evidence that it depends on data.
    if not holding or not (data or len(known) > 1):
        return None
    taken = {*dims.slots, *dims.scalars, *bounds, *rows[0][0].arguments}
    name = next(c for c in ("m", "k", "kept", *(f"kept{i}" for i in range(100))) if c not in taken)
    assert is_plain_name(name)
    # The least sum over all calls is the tightest bound.
    bounds[name] = min(holding)[1]
    return name
