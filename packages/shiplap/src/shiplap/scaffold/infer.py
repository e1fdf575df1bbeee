"""Infer what a schema leaves open, with the source of each inference: dims, dtypes, bounds, requirements and
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from shiplap.scaffold.calls import DispatchedCall, SeenTensor, seen_tensors
from shiplap.scaffold.dims import NamedDims, name_dims, value_range
from shiplap.scaffold.probe import ProbeResult
from shiplap.scaffold.results import ResultSizes, find_result_sizes
from shiplap.scaffold.sampler import write_sampler
from shiplap.scaffold.schema import SchemaForm


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
        known.where["samples"] = f"ranges of values in {_count_phrase(len(recorded), 'recorded call')}"
    return known


def _has_fresh_results(form: SchemaForm) -> bool:
    """Return whether the op returns a new tensor, which is not an alias of an argument. Its sizes have to be
    declared.
    """
    return any(not r.alias for r in form.results)


def _count_phrase(number: int, what: str) -> str:
    """Return the count ``number`` with the noun ``what``, such as ``3 recorded calls``."""
    return f"{number} {what}{'s' * (number != 1)}"


def _source_of_inference(recorded: Sequence[DispatchedCall], probed: ProbeResult) -> str:
    """Return the source of an inference in words, such as ``3 recorded calls and 5 calls of the meta kernel``."""
    parts = [_count_phrase(len(recorded), "recorded call")] if recorded else []
    parts += [f"{_count_phrase(len(probed.calls), 'call')} of the meta kernel"] if probed.calls else []
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
