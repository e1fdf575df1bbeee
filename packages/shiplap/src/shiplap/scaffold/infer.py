"""Infer what a schema leaves open, with the source of each inference: dims, dtypes, bounds, requirements and
samples.

The size of a result is found from calls: it is an expression of the dims, or has a bound, or the reference computes it.
Samples have the ranges of recorded calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import combinations, permutations, product
from typing import Any

import torch

from shiplap.declare.dim_expression import Expr
from shiplap.render.lines import count_phrase
from shiplap.scaffold.calls import DispatchedCall, SeenTensor, seen_tensors
from shiplap.scaffold.dims import NamedDims, calls_with_dims, is_plain_name, name_dims, value_range
from shiplap.scaffold.probe import ProbeResult
from shiplap.scaffold.schema import SchemaField, SchemaForm


@dataclass
class InferredDeclaration:
    """The inferred parts of a declaration.

    ``tensors`` maps arguments to annotations, and ``results`` lists the annotations of the results. ``bounds`` and
    ``requires`` are the keywords of these names. If ``reference`` is true, the op's reference gives the sizes of the
    results. ``where`` maps arguments, ``"return"`` and ``"samples"`` to words for what they were inferred from.
    ``sampler`` has the source lines of a builder of samples. ``open`` names the arguments whose dtype is not known.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    bounds: dict[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    reference: bool = False
    where: dict[str, str] = field(default_factory=dict)
    sampler: list[str] = field(default_factory=list)
    open: tuple[str, ...] = ()


def infer_nothing(form: SchemaForm, why: str) -> InferredDeclaration:
    """Return a declaration that adds nothing to the schema. Its tensors have any dtype and any sizes. ``why`` is the
    reason why nothing was inferred, which becomes the comment on the results.
    """
    shaped = {a.name: 'Shaped[Tensor, "..."]' for a in form.arguments if a.tensor}
    where = {"return": f"not inferred: {why}"} if form.results else {}
    results = ['Shaped[Tensor, "..."]'] * len(form.results)
    return InferredDeclaration(shaped, results, reference=_has_fresh_results(form), where=where, open=tuple(shaped))


def infer_declaration(
    form: SchemaForm,
    recorded: Sequence[DispatchedCall],
    probed: ProbeResult,
    following: Callable[[], bool] | None = None,
) -> InferredDeclaration:
    """Return the declaration that calls suggest for the schema ``form``. The calls were recorded, or the meta kernel
    accepts them. The declaration has dims, dtypes, bounds, requirements and a builder of samples.

    ``following`` is called if nothing was recorded. It returns whether the dtype of the results follows that of the
    arguments.
    """
    if not recorded and not probed.calls:
        return infer_nothing(form, probed.reason or "no call was recorded, and no meta kernel was asked")
    dims = name_dims(form, recorded, probed)
    sizes = find_result_sizes(form, dims, recorded, probed.calls)
    source = _source_of_inference(recorded, probed)
    known = InferredDeclaration(bounds=dict(sizes.bounds))
    spread = _any_rank_arguments(form, dims, [*recorded, *probed.calls])
    for a in form.arguments:
        if a.tensor:
            known.tensors[a.name] = _annotate_argument(a.name, dims, recorded, spread)
            known.where[a.name] = source
    calls = [*recorded, *probed.calls]
    _annotate_results(form, known, sizes, calls[: len(recorded)], calls, spread, source, following)
    known.open = tuple(n for n, t in known.tensors.items() if t.startswith("Shaped"))
    known.requires = _lower_limits(form, recorded)
    if recorded:
        known.sampler = write_sampler(form, dims, recorded)
        known.where["samples"] = f"ranges of values in {count_phrase(len(recorded), 'recorded call')}"
    return known


def _has_fresh_results(form: SchemaForm) -> bool:
    """Return whether the op returns a new tensor, which is not an alias of an argument. Its sizes have to be
    declared.
    """
    return any(not r.alias for r in form.results)


def _source_of_inference(recorded: Sequence[DispatchedCall], probed: ProbeResult) -> str:
    """Return the source of an inference in words, such as ``3 recorded calls and 5 calls of the meta kernel``."""
    parts = [count_phrase(len(recorded), "recorded call")] if recorded else []
    parts += [f"{count_phrase(len(probed.calls), 'call')} of the meta kernel"] if probed.calls else []
    return " and ".join(parts)


def _annotate_argument(
    name: str, dims: NamedDims, recorded: Sequence[DispatchedCall], spread: Mapping[str, str]
) -> str:
    """Return the jaxtyping annotation of an argument, such as ``Float[Tensor, "n c"]``, with the dtypes of the recorded
    calls.

    ``spread`` maps the names of arguments whose number of dims varies to the text of their dims, such as ``*s``.
    """
    seen = [s for c in recorded for s in seen_tensors(c.arguments.get(name))]
    kind = common_dtype_class({s.dtype for s in seen})
    shape = dims.shapes.get(name)
    if shape is not None:
        return f'{kind}[Tensor, "{" ".join(shape)}"]'
    ranks = {len(s.shape) for s in seen}
    if name not in dims.shapes and len(ranks) == 1:  # a list, whose members have sizes of their own
        return f'{kind}[Tensor, "{" ".join("_" * ranks.pop())}"]'
    return f'{kind}[Tensor, "{spread.get(name, "...")}"]'


def _any_rank_arguments(form: SchemaForm, dims: NamedDims, calls: Sequence[DispatchedCall]) -> dict[str, str]:
    """Return ``{name: "*s"}`` for the arguments whose number of dims varies, if they have the shape of one result in
    all calls. Otherwise return an empty dict.
    """
    free = [n for n, shape in dims.shapes.items() if shape is None]
    for name in free:
        shapes = [v.shape if isinstance(v := c.arguments.get(name), SeenTensor) else None for c in calls]
        if None not in shapes and any(_has_shape_of_argument(i, shapes, calls) for i in range(len(form.results))):
            others = [n for n in free if all(_shape_of_argument(c, n) == _shape_of_argument(c, name) for c in calls)]
            return dict.fromkeys(others, "*s")
    return {}


def _shape_of_argument(call: DispatchedCall, name: str) -> tuple[int, ...] | None:
    """Return the shape of the argument ``name`` in a recorded call, or None if it is not a single tensor."""
    value = call.arguments.get(name)
    return value.shape if isinstance(value, SeenTensor) else None


def _has_shape_of_argument(index: int, shapes: Sequence[Any], calls: Sequence[DispatchedCall]) -> bool:
    """Return whether the result at ``index`` had the shapes in ``shapes``, which holds one shape for each of
    ``calls``.
    """
    results = (c.results[index] for c in calls)
    return all(isinstance(r, SeenTensor) and r.shape == s for r, s in zip(results, shapes, strict=True))


def _annotate_results(
    form: SchemaForm,
    known: InferredDeclaration,
    sizes: ResultSizes,
    recorded: Sequence[DispatchedCall],
    calls: Sequence[DispatchedCall],
    spread: Mapping[str, str],
    source: str,
    following: Callable[[], bool] | None,
) -> None:
    """Add an annotation of each result of the schema ``form``, such as ``Float[Tensor, "n m"]``, to the declaration
    ``known``.

    ``sizes`` holds the inferred sizes of the results. If the sizes or the dtype of one result are unknown, all new
    results are left open, and the op's reference computes them. ``following`` returns whether results have the dtype of
    the arguments. ``source`` names the calls from which the annotations are inferred. ``calls`` are these calls, and
    ``recorded`` the recorded ones among them. ``spread`` maps arguments whose number of dims varies to ``"*s"``.
    """
    notes = [n for n in sizes.where if n]
    # A result that is an argument has the annotation of that argument.
    aliased = {r.alias: known.tensors[r.alias] for r in form.results if r.alias}
    for index, result in enumerate(form.results):
        if result.alias:
            known.results.append(aliased[result.alias])
            continue
        shape = sizes.shapes[index] if index < len(sizes.shapes) else None
        text = " ".join(shape) if shape is not None else "..."
        if shape is None and spread and _takes_shape_of_argument(index, spread, calls):
            text, notes = next(iter(spread.values())), []
        kind, told = _dtype_class_of_result(index, known, recorded, following)
        single = result.kind == "Tensor"
        known.reference = known.reference or (single and (text == "..." or not told))
        known.results.append(f'{kind}[Tensor, "{text}"]')
    # One result without known sizes makes the whole op traced.
    if known.reference:
        # The reference gives all sizes, so bounds of single dims would be redundant or wrong.
        known.bounds = {}
        known.results = [
            r if f.alias else 'Shaped[Tensor, "..."]' for f, r in zip(form.results, known.results, strict=True)
        ]
    if form.results:
        known.where["return"] = "; ".join([source, *notes])


def _takes_shape_of_argument(index: int, spread: Mapping[str, str], calls: Sequence[DispatchedCall]) -> bool:
    """Return whether the result at ``index`` has the shape of an argument in ``spread`` in all calls. ``spread`` holds
    the arguments whose number of dims varies.
    """
    shapes = [_shape_of_argument(c, next(iter(spread))) for c in calls]
    return None not in shapes and _has_shape_of_argument(index, shapes, calls)


def _dtype_class_of_result(
    index: int, known: InferredDeclaration, recorded: Sequence[DispatchedCall], following: Callable[[], bool] | None
) -> tuple[str, bool]:
    """Return ``(name, determined)``. ``name`` is the jaxtyping dtype class of the result at ``index``. ``determined``
    is true if the class has one dtype, or if an argument has this class and thereby determines the dtype.

    ``following`` is called if nothing was recorded. It returns whether results have the dtype of the arguments.
    """
    dtypes = {s.dtype for c in recorded for s in seen_tensors(c.results[index])}
    given = {t.partition("[")[0] for t in known.tensors.values()}
    if len(dtypes) == 1:
        return common_dtype_class(dtypes), True
    if not recorded:
        # A call of the meta kernel in another dtype, made only where the recorded calls cannot answer.
        follows = following is not None and following()
        return "Shaped", follows and bool(known.tensors)
    kind = common_dtype_class(dtypes)
    return kind, kind in given


def common_dtype_class(dtypes: set[str]) -> str:
    """Return the name of the jaxtyping class for the dtypes with these names. For one dtype, it is a class such as
    ``Float32``. For several, it is ``Float`` if all are floating-point dtypes, ``Integer`` if all are integer dtypes,
    and otherwise ``Shaped``. For none, it is ``Shaped``.
    """
    if len(dtypes) == 1:
        return _classes_by_dtype().get(next(iter(dtypes)), "Shaped")
    kinds = [getattr(torch, n) for n in dtypes]
    if kinds and all(k.is_floating_point for k in kinds):
        return "Float"
    signed = all(not k.is_floating_point and not k.is_complex and k is not torch.bool for k in kinds)
    return "Integer" if kinds and signed else "Shaped"


@cache
def _classes_by_dtype() -> dict[str, str]:
    """Return a mapping from torch's name of a dtype to the name of the jaxtyping class for that dtype alone."""
    import jaxtyping

    by_name: dict[str, str] = {}
    for name in dir(jaxtyping):
        dtypes = getattr(getattr(jaxtyping, name), "dtypes", None)
        listed = [dtypes] if isinstance(dtypes, str) else list(dtypes) if isinstance(dtypes, (list, tuple)) else []
        torchs = [d for d in listed if isinstance(d, str) and isinstance(getattr(torch, d, None), torch.dtype)]
        # Classes such as Float admit several dtypes, which one dtype does not justify.
        if len(torchs) == 1 and name[0].isupper():
            by_name.setdefault(torchs[0], name)
    return by_name


def _lower_limits(form: SchemaForm, recorded: Sequence[DispatchedCall]) -> tuple[str, ...]:
    """Return requirements, as strings, for int arguments that were never negative in recorded calls. They are ``k >=
    1`` for an argument ``k`` that was never 0, and otherwise ``k >= 0``.
    """
    limits = []
    for a in form.arguments:
        low, _ = value_range(recorded, a.name)
        if a.kind in ("int", "SymInt") and low is not None and low >= 0:
            # A larger recorded minimum is chance, while 0 and 1 are usual limits.
            limits.append(f"{a.name} >= {min(int(low), 1)}")
    return tuple(limits)


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


def write_sampler(form: SchemaForm, dims: NamedDims, recorded: Sequence[DispatchedCall]) -> list[str]:
    """Return the source lines of the body of a builder ``fn(rng, sizes, dtype, device)`` of samples for the schema
    ``form``. It draws arguments whose shapes consist of the named dims ``dims``, with values in the ranges of the
    recorded calls. Return an empty list if an argument cannot be built.
    """
    lines, made = [], []
    for a in form.arguments:
        if not a.tensor:
            made.append(f'sizes["{a.name}"]')
            continue
        values = _expression_of_argument(a, dims, recorded)
        if values is None:
            return []
        lines.append(f"{a.name} = {values}")
        made.append(a.name)
    # A builder returns a tuple, even for a single argument.
    return [*lines, f"return {', '.join(made)}{',' * (len(made) == 1)}"] if lines else []


def _expression_of_argument(a: SchemaField, dims: NamedDims, recorded: Sequence[DispatchedCall]) -> str | None:
    """Return the source of an expression that draws the tensor argument ``a``. Its shape is made of the named dims in
    ``dims``, and its values lie in the range of those in ``recorded``. Return None if it cannot be built.
    """
    seen = [s for c in recorded for s in seen_tensors(c.arguments.get(a.name))]
    shape = dims.shapes.get(a.name)
    if a.optional and not seen:
        return "None"
    if a.many or shape is None or not seen:
        return None
    if fields := _expression_of_columns(a.name, dims, recorded):
        return fields
    low, high = value_range(recorded, a.name)
    return _expression_of_draw(
        _source_of_shape(shape), seen[0].dtype, low, high, _limit_of_index(a.name, dims, recorded, _highest_value)
    )


def _source_of_shape(shape: Sequence[str]) -> str:
    """Return the source of a tuple of sizes. For a dim with a name, such as ``n``, it reads ``sizes["n"]``."""
    return f"({', '.join(map(_source_of_size, shape))}{',' * (len(shape) == 1)})"


def _expression_of_columns(name: str, dims: NamedDims, recorded: Sequence[DispatchedCall]) -> str:
    """Return the source of an expression that draws the matrix argument ``name`` column by column, in the ranges of the
    recorded calls.

    Return an empty string unless a column has only whole numbers, such as the column that holds the number of a box's
    image. Return it also if the ranges of the columns are not known.
    """
    shape, calls = (
        dims.shapes[name] or (),
        [s for c in recorded for s in seen_tensors(c.arguments.get(name)) if s.shape[0]],
    )
    count = int(shape[1]) if len(shape) == 2 and shape[1].isdigit() else 0
    if not count or not calls or any(len(s.columns) != count for s in calls):
        return ""
    columns = list(zip(*(s.columns for s in calls), strict=True))
    whole = [all(c.whole for c in column) for column in columns]
    if not any(whole):
        return ""
    drawn = []
    for at, column in enumerate(columns):
        low, high = min(c.low for c in column), max(c.high for c in column)
        dtype = "int64" if whole[at] else "float32"
        limit = _limit_of_index(name, dims, recorded, partial(_highest_in_column, at))
        drawn.append(
            # Stacked columns need one dtype, which is that of the matrix.
            _expression_of_draw(
                _source_of_shape(shape[:1]), dtype, low, high, limit, moved=f".to(torch.{calls[0].dtype})"
            )
        )
    return f"torch.stack([{', '.join(drawn)}], 1).to(device)"


def _source_of_size(text: str) -> str:
    """Return the source of one size. It is ``sizes["n"]`` for the name ``n``, and otherwise the text itself."""
    return f'sizes["{text}"]' if is_plain_name(text) else text


def _expression_of_draw(
    size: str, dtype: str, low: float | None, high: float | None, limit: str | None, moved: str | None = None
) -> str:
    """Return the source of an expression that draws a tensor of the dtype ``dtype``. ``size`` is the source of its
    shape. Floating-point values lie between ``low`` and ``high``. Integers lie from ``low`` up to ``limit``, which
    is excluded, or up to ``high`` if ``limit`` is None. Bools are True with probability 1/2.

    The expression ends with ``moved`` or, if that is None, with a move to the device.
    """
    to = moved if moved is not None else ".to(device)"
    if dtype == "bool":
        return f"(torch.rand({size}, generator=rng) < 0.5){to}"
    if dtype.startswith(("int", "uint")):
        # randint excludes its upper bound.
        top = limit or str(int(high or 0) + 1)
        return f"torch.randint({int(low or 0)}, {top}, {size}, generator=rng, dtype=torch.{dtype}){to}"
    to = moved if moved is not None else f".to(device, torch.{dtype})"
    if dtype.startswith(("float", "bfloat")) and low is not None and high is not None:
        # Rounded to be readable: a sample need not reach the exact bounds.
        spread, start = _round_to_3_digits(high - low) or 1.0, _round_to_3_digits(low)
        shift = f" + {start!r}" if start > 0 else f" - {-start!r}" if start < 0 else ""
        return f"(torch.rand({size}, generator=rng) * {spread!r}{shift}){to}"
    return f"torch.randn({size}, generator=rng){to}"


def _round_to_3_digits(value: float) -> float:
    """Return the value rounded to three significant digits."""
    return float(f"{value:.3g}")


def _highest_value(seen: SeenTensor) -> float | None:
    """Return the highest finite value of a recorded tensor, or None if it has none."""
    return seen.high


def _highest_in_column(column: int, seen: SeenTensor) -> float | None:
    """Return the highest value in one column of a recorded tensor, or None if its columns are not known."""
    return seen.columns[column].high if seen.columns else None


def _limit_of_index(
    name: str, dims: NamedDims, recorded: Sequence[DispatchedCall], highest: Callable[[SeenTensor], float | None]
) -> str | None:
    """Return the source of an upper limit for the values of the index argument ``name``. Return None if no dim was
    larger than its values in all calls.

    The limit is the smallest dim that was larger than the argument's maximum in all calls, but at most about four times
    as large. If there is none, the limit is one above the highest recorded value. It is then at most each of the larger
    dims, since the value may be an index into any of them.
    """
    tops: list[tuple[float, dict[str, Any]]] = []
    for call, env in calls_with_dims(dims, recorded):
        value = call.arguments.get(name)
        if isinstance(value, SeenTensor) and (high := highest(value)) is not None:
            tops.append((high, dict(env)))
    most = max((top for top, _ in tops), default=-1.0)
    if most < 0:
        return None
    # An index into its own dim is rare, unless there is no other.
    own = set(dims.shapes.get(name) or ())
    larger = [
        d for d in dims.slots if all(top < env[d] for top, env in tops) and (d not in own or len(dims.slots) == 1)
    ]
    # A maximum of at least a quarter of the dim counts as close to it.
    close = [d for d in larger if all(env[d] <= 4 * (top + 1) for top, env in tops)] if most >= 1 else []
    if close:
        return f'sizes["{min(close, key=lambda d: (sum(env[d] for _, env in tops), d))}"]'
    bounds = [str(int(most) + 1), *(f'sizes["{d}"]' for d in larger)]
    return f"min({', '.join(bounds)})" if larger else None
