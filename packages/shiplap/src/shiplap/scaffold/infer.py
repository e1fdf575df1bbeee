"""Infer what a schema leaves open, with the source of each inference: dims, dtypes, bounds, requirements and
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from shiplap.scaffold.calls import Call, Seen, each
from shiplap.scaffold.dims import Dims, dims_of, ranges
from shiplap.scaffold.probe import Probed
from shiplap.scaffold.results import Sizes, sizes_of
from shiplap.scaffold.sampler import sampler_of
from shiplap.scaffold.schema import Form


@dataclass
class Inferred:
    """The inferred parts of a declaration: annotations of single tensors by argument and by result, and keywords.

    ``where`` is the source of the inference for an argument, for ``"return"`` and for ``"samples"``. ``reference``: the
    sizes of the results are left to the reference. ``sampler`` has the lines of a builder of samples.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    bounds: dict[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    reference: bool = False
    where: dict[str, str] = field(default_factory=dict)
    sampler: list[str] = field(default_factory=list)
    open: tuple[str, ...] = ()


def unknown(form: Form, why: str) -> Inferred:
    """Return a declaration with nothing beyond the schema: any dtype, any sizes."""
    shaped = {a.name: 'Shaped[Tensor, "..."]' for a in form.arguments if a.tensor}
    where = {"return": f"not inferred: {why}"} if form.results else {}
    results = ['Shaped[Tensor, "..."]'] * len(form.results)
    return Inferred(shaped, results, reference=_fresh(form), where=where, open=tuple(shaped))


def infer(
    form: Form, recorded: Sequence[Call], probed: Probed, following: Callable[[], bool] | None = None
) -> Inferred:
    """Return dims, dtypes, bounds and samples of ``form`` from recorded calls, and from the calls that its meta kernel
    accepts.

    ``following`` is called where nothing was recorded. It returns whether the dtype of the results follows that of the
    arguments.
    """
    if not recorded and not probed.calls:
        return unknown(form, probed.reason or "no call was recorded, and no meta kernel was asked")
    dims = dims_of(form, recorded, probed)
    sizes = sizes_of(form, dims, recorded, probed.calls)
    source = _source(recorded, probed)
    known = Inferred(bounds=dict(sizes.bounds))
    spread = _spread(form, dims, [*recorded, *probed.calls])
    for a in form.arguments:
        if a.tensor:
            known.tensors[a.name] = _argument(a.name, dims, recorded, spread)
            known.where[a.name] = source
    calls = [*recorded, *probed.calls]
    _results(form, known, sizes, calls[: len(recorded)], calls, spread, source, following)
    known.open = tuple(n for n, t in known.tensors.items() if t.startswith("Shaped"))
    known.requires = _requires(form, recorded)
    if recorded:
        known.sampler = sampler_of(form, dims, recorded)
        known.where["samples"] = f"ranges of values in {_count(len(recorded), 'recorded call')}"
    return known


def _fresh(form: Form) -> bool:
    """Whether results exist whose sizes have to be declared."""
    return any(not r.alias for r in form.results)


def _count(number: int, what: str) -> str:
    """Return a number with its noun, in the plural where needed."""
    return f"{number} {what}{'s' * (number != 1)}"


def _source(recorded: Sequence[Call], probed: Probed) -> str:
    """Return the source of an inference in words."""
    parts = [_count(len(recorded), "recorded call")] if recorded else []
    parts += [f"{_count(len(probed.calls), 'call')} of the meta kernel"] if probed.calls else []
    return " and ".join(parts)


def _argument(name: str, dims: Dims, recorded: Sequence[Call], spread: Mapping[str, str]) -> str:
    """Return the annotation of an argument."""
    seen = [s for c in recorded for s in each(c.arguments.get(name))]
    kind = dtype_class({s.dtype for s in seen})
    shape = dims.shapes.get(name)
    if shape is not None:
        return f'{kind}[Tensor, "{" ".join(shape)}"]'
    ranks = {len(s.shape) for s in seen}
    if name not in dims.shapes and len(ranks) == 1:  # a list, whose members have sizes of their own
        return f'{kind}[Tensor, "{" ".join("_" * ranks.pop())}"]'
    return f'{kind}[Tensor, "{spread.get(name, "...")}"]'


def _spread(form: Form, dims: Dims, calls: Sequence[Call]) -> dict[str, str]:
    """Return ``*s`` for arguments of any rank whose shape a result has in all calls."""
    free = [n for n, shape in dims.shapes.items() if shape is None]
    for name in free:
        shapes = [v.shape if isinstance(v := c.arguments.get(name), Seen) else None for c in calls]
        if None not in shapes and any(_follows(i, shapes, calls) for i in range(len(form.results))):
            others = [n for n in free if all(_shape(c, n) == _shape(c, name) for c in calls)]
            return dict.fromkeys(others, "*s")
    return {}


def _shape(call: Call, name: str) -> tuple[int, ...] | None:
    """Return the shape of an argument in a call, or None if it is no single tensor."""
    value = call.arguments.get(name)
    return value.shape if isinstance(value, Seen) else None


def _follows(index: int, shapes: Sequence[Any], calls: Sequence[Call]) -> bool:
    """Whether a result has these shapes in all calls."""
    results = (c.results[index] for c in calls)
    return all(isinstance(r, Seen) and r.shape == s for r, s in zip(results, shapes, strict=True))


def _results(
    form: Form,
    known: Inferred,
    sizes: Sizes,
    recorded: Sequence[Call],
    calls: Sequence[Call],
    spread: Mapping[str, str],
    source: str,
    following: Callable[[], bool] | None,
) -> None:
    """Add the annotations of the results. Sizes without an expression are left to the reference."""
    notes = [n for n in sizes.where if n]
    # A result that is an argument has the annotation of that argument.
    aliased = {r.alias: known.tensors[r.alias] for r in form.results if r.alias}
    for index, result in enumerate(form.results):
        if result.alias:
            known.results.append(aliased[result.alias])
            continue
        shape = sizes.shapes[index] if index < len(sizes.shapes) else None
        text = " ".join(shape) if shape is not None else "..."
        if shape is None and spread and _takes_shape(index, spread, calls):
            text, notes = next(iter(spread.values())), []
        kind, told = _result_class(index, known, recorded, following)
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


def _takes_shape(index: int, spread: Mapping[str, str], calls: Sequence[Call]) -> bool:
    """Whether a result has the shape of the arguments of any rank in all calls."""
    shapes = [_shape(c, next(iter(spread))) for c in calls]
    return None not in shapes and _follows(index, shapes, calls)


def _result_class(
    index: int, known: Inferred, recorded: Sequence[Call], following: Callable[[], bool] | None
) -> tuple[str, bool]:
    """Return the dtype class of a result, and whether the arguments determine it."""
    dtypes = {s.dtype for c in recorded for s in each(c.results[index])}
    given = {t.partition("[")[0] for t in known.tensors.values()}
    if len(dtypes) == 1:
        return dtype_class(dtypes), True
    if not recorded:
        # A call of the meta kernel in another dtype, made only where the recorded calls cannot answer.
        follows = following is not None and following()
        return "Shaped", follows and bool(known.tensors)
    kind = dtype_class(dtypes)
    return kind, kind in given


def dtype_class(dtypes: set[str]) -> str:
    """Return the jaxtyping class of these dtypes: of one alone, of all floats, of all integers, or of any."""
    if len(dtypes) == 1:
        return _classes().get(next(iter(dtypes)), "Shaped")
    kinds = [getattr(torch, n) for n in dtypes]
    if kinds and all(k.is_floating_point for k in kinds):
        return "Float"
    signed = all(not k.is_floating_point and not k.is_complex and k is not torch.bool for k in kinds)
    return "Integer" if kinds and signed else "Shaped"


@cache
def _classes() -> dict[str, str]:
    """Return torch's name of a dtype → the jaxtyping class of that dtype alone."""
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


def _requires(form: Form, recorded: Sequence[Call]) -> tuple[str, ...]:
    """Return ``k >= 1`` for ints that were never less, ``k >= 0`` for those that were zero at least."""
    limits = []
    for a in form.arguments:
        low, _ = ranges(recorded, a.name)
        if a.kind in ("int", "SymInt") and low is not None and low >= 0:
            # A larger recorded minimum is chance, while 0 and 1 are usual limits.
            limits.append(f"{a.name} >= {min(int(low), 1)}")
    return tuple(limits)
