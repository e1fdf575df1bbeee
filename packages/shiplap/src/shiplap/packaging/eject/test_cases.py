"""The cases on which the tests of ejected ops run: small arguments as data, or the builder that the op declares."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from shiplap.dispatch import Op
from shiplap.packaging.eject.copied_source import SourceCopy
from shiplap.packaging.eject.printed_op import literal
from shiplap.sampling.case import SampleCase
from shiplap.sampling.samples import Samples

# The number of cases of an op, and the seed by which they are drawn.
CASES, SEED = 6, 0
MOST_ELEMENTS = 4096  # of a case, since they are written as numbers


def describe_cases(op: Op, copy: SourceCopy, gradient: bool) -> dict[str, Any]:
    """Return the data that the tests of an ejected op read, as values for JSON. These are the names of its arguments,
    the names of its functions, such as the reference, and test cases.

    ``gradient`` states whether the tests compare gradients. Raise ``CannotCopy`` if the function that draws samples has
    no source to copy.
    """
    spec = op.spec
    named = [a.name for a in spec.args]
    surrogate = op.gradient.surrogate if op.gradient is not None else None
    row: dict[str, Any] = {
        "names": named,
        "positional": sum(not a.keyword_only for a in spec.args),
        "reference": f"{spec.stem}_reference",
        "surrogate": copy.function(surrogate, f"{spec.stem}_surrogate") if surrogate else f"{spec.stem}_reference",
        "gradient": gradient,
        # Random numbers, and results in any order, cannot be compared element by element.
        "compared": not spec.draws and not spec.unordered,
    }
    if op.sampler is None:
        return row | {
            "cases": [{"args": [_argument_as_json(v) for v in case.args]} for case in islice(_cases(op), CASES)]
        }
    row["samples"] = copy.function(inspect.unwrap(op.sampler), f"{spec.stem}_samples")
    row["defaults"] = [_argument_as_json(a.default) if a.has_default else None for a in spec.args]
    return row | {"cases": [_builder_sizes(op, case) for case in islice(_cases(op), 2)]}


def _cases(op: Op) -> Iterator[SampleCase]:
    """Yield small samples that the op's kernels accept. Usual sizes come first, followed by absent arguments, other
    scalars, and unusual sizes such as 0 and 1.
    """
    samples = Samples(op, SEED)
    taken = {d for kernels in op.kernels.values() for k in kernels for d in k.dtypes}
    for case in chain(samples.plain(), samples.grown(1), samples.optionals(), samples.scalars(), samples.edges()):
        dtypes = {str(t.dtype).removeprefix("torch.") for t in _tensors(case.args)}
        floats = {d for d in dtypes if getattr(torch, d).is_floating_point}
        # The kernels would refuse other dtypes, and the tests would compare the reference with itself.
        if case.numel <= MOST_ELEMENTS and (not taken or floats <= taken):
            yield case


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among ``values`` and in the lists among them, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _builder_sizes(op: Op, case: SampleCase) -> dict[str, Any]:
    """Return the sizes, the scalars and the dtype with which the op's sample builder makes ``case``, as values for
    JSON.
    """
    floats = [n for n in dict(case.recipe.dtypes).values() if getattr(torch, n).is_floating_point]
    recipe = {**{a.name: a.default for a in op.spec.scalars if a.has_default}, **dict(case.recipe.scalars)}
    sizes = {**recipe, **case.env, **dict(case.recipe.sizes), "absent": []}
    kept = {k: list(v) if isinstance(v, tuple) else v for k, v in sizes.items()}
    plain = {k: v for k, v in kept.items() if isinstance(v, (bool, int, float, str, list, type(None)))}
    return {"sizes": plain, "dtype": floats[0] if floats else "float32"}


def _argument_as_json(value: Any) -> Any:
    """Return an argument of a test case as a value for JSON. A tensor becomes a dict of its dtype, shape and data. A
    bool, an int, a str and None are returned unchanged. Any other value becomes a dict with its Python expression.
    Lists are converted item by item.
    """
    if isinstance(value, (list, tuple)):
        return [_argument_as_json(v) for v in value]
    if isinstance(value, Tensor):
        flat = value.detach().contiguous()
        # JSON has no complex numbers, and a double holds every narrower floating-point number.
        data = torch.view_as_real(flat) if flat.is_complex() else flat.double() if flat.is_floating_point() else flat
        kind = str(value.dtype).removeprefix("torch.")
        return {"dtype": kind, "shape": list(value.shape), "data": data.reshape(-1).tolist()}
    if isinstance(value, (bool, int, str, type(None))):
        return value
    return {"other": literal(value)}
