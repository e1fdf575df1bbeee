"""The axes that the samples of one op can vary, as its declaration says, and the dtypes that no sample had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from shiplap.declare import OpSpec, Output
from shiplap.declare.binding import declared_output_shape
from shiplap.dtypes import floating, integers
from shiplap.sampling.builder import builder_takes_values
from shiplap.sampling.case import SampleCase, tensors_among
from shiplap.sampling.ledger import LARGE_ELEMENTS, is_large
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.samples import Samples
from shiplap.sampling.sizes import (
    EDGE_SIZES,
    dim_environment,
    free_dims,
    results_are_affordable,
    scalar_candidates,
    search_sizes,
    takes_any_text,
)

COMPLEX = ("complex64", "complex128")
BEYOND = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)  # additions to a size, some of which give a multiple of another one
STEPS, FEW_MORE = (0, 2, 4, 6, 8, 10), 3  # by how many powers of two a dim may be smaller than a tensor, and sizes each
SIZES, FEW = (*EDGE_SIZES, 2, 3, 4, 5, 8, 64), 2000  # sizes to try, and the most combinations with each


def absent_axes(samples: Samples) -> dict[str, str]:
    """Return the axes, such as size and layout, that no sample of the op can vary. Each is mapped to a text with the
    reason why the declaration admits no variation.
    """
    op, spec, base = samples.op, samples.spec, samples.base
    given = tensors_among(samples.build(base).args)
    free = free_dims(spec)
    scalars = [
        a
        for a in spec.scalars
        if a.name not in dict(base.sizes) and (len(scalar_candidates(a)) > 1 or takes_any_text(a))
    ]
    reasons = {
        "size": "" if _admits_sizes(spec, base, free) else "the declaration admits one size of each dim",
        "large size": "each sample is as large" if is_large(given) else "",
        "rank": "" if "variadic" in free.values() else "no dim is variadic",
        "layout": "" if _admits_layout(samples) else "no argument may have another layout",
        "offset": "" if given else "no argument is a tensor",
        "alignment": "" if given else "no argument is a tensor",
        "dtype": "" if any(len(t.dtypes) != 1 for t in spec.dtype_classes.values()) else "each argument has one dtype",
        "value": "" if given else "no argument is a tensor",
        "scalar": "" if scalars else "no scalar has another value",
        "absence": "" if any(a.optional for a in spec.tensors) else "no argument is an optional tensor",
        "seed": "" if spec.random else "the results are not random",
    }
    if op.sampler is not None and not builder_takes_values(op):
        reasons["value"] = "the builder of samples decides on the values"
    return {axis: reason for axis, reason in reasons.items() if reason}


def unseen_dtypes(spec: OpSpec, cases: Iterable[SampleCase]) -> list[str]:
    """Return the names of the dtypes that the declaration ``spec`` admits and in which no tensor of ``cases`` is.

    Each group of tensors that have one dtype, such as all that are annotated ``Float``, is looked at by itself. Dtypes
    in which no sample is generated, such as those of float8, are left out, and so is a group without any tensor.
    """
    seen: dict[str, set[str]] = {}
    for case in cases:
        for arg, value in zip(spec.args, case.args, strict=True):
            if arg.tensor is not None:
                names = {str(t.dtype).removeprefix("torch.") for t in tensors_among([value])}
                seen.setdefault(arg.tensor.dtype_class, set()).update(names)
    unseen = list[str]()
    for group, kind in spec.dtype_classes.items():
        wanted = [name for name in (*floating(), *integers(), "bool", *COMPLEX) if name in kind.dtypes]
        unseen += [name for name in wanted if seen.get(group) and name not in seen[group]]
    return list(dict.fromkeys(unseen))


def admits_beyond(samples: Samples, dim: str, size: int) -> bool:
    """Return whether the declaration admits a sample in which the dim named ``dim`` has more than ``size`` elements,
    and of which the results fit into memory. Only a few larger sizes are tried.
    """
    variadic = free_dims(samples.spec).get(dim) == "variadic"
    larger = ((size + more,) if variadic else size + more for more in BEYOND)
    return any(results_are_affordable(samples.spec, env) for env in _environments(samples, dim, larger))


def admits_large(samples: Samples, *, affordable: bool = True) -> bool:
    """Return whether the declaration admits a sample with a tensor of more than 65,536 elements, by one large dim. Only
    a few sizes are tried. If ``affordable`` is true, the results have to fit into memory, without which no sample is
    made.
    """
    spec, dims = samples.spec, [dim for dim, kind in free_dims(samples.spec).items() if kind != "variadic"]
    sizes = [(LARGE_ELEMENTS >> step) + more for step in STEPS for more in (BEYOND if not step else BEYOND[:FEW_MORE])]
    return any(
        _has_large_argument(spec, env) and (not affordable or results_are_affordable(spec, env))
        for dim in dims
        for env in _environments(samples, dim, sizes)
    )


def _environments(samples: Samples, dim: str, sizes: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the sizes of all dims and the scalars, by name, of the first call that the declaration admits for each of
    ``sizes`` of the dim named ``dim``.
    """
    spec, scalars = samples.spec, dict(samples.base.scalars)
    for size in sizes:
        found = search_sizes(spec, {dim: size}, scalars, FEW)
        env = None if found is None else dim_environment(spec, {**found[0], "...": (2,)}, found[1])
        if env is not None:
            yield env


def _has_large_argument(spec: OpSpec, env: Mapping[str, Any]) -> bool:
    """Return whether a tensor argument of a call with the dims and scalars ``env`` has more than 65,536 elements."""
    shapes = (declared_output_shape(Output(a.name, a.tensor), {**env}) for a in spec.tensors if a.tensor)
    return any(prod(shape) > LARGE_ELEMENTS for shape in shapes)


def _admits_sizes(spec: OpSpec, base: SampleRecipe, free: Mapping[str, str]) -> bool:
    """Return whether the declaration admits another size than that of the base sample, for at least one of the dims
    ``free``.

    ``free`` maps the dims whose size a sample may choose to their kinds. ``base`` is the recipe of the base sample,
    which has small sizes.
    """
    usual = dict(base.sizes)
    wanted = ((n, (3, 1) if kind == "variadic" else v) for n, kind in free.items() for v in SIZES)
    return any(v != usual.get(n) and search_sizes(spec, {n: v}, dict(base.scalars), FEW) is not None for n, v in wanted)


def _admits_layout(samples: Samples) -> bool:
    """Return whether the declaration admits a sample with a tensor that is not contiguous."""
    return any(not t.is_contiguous() for case in samples.layouts() for t in tensors_among(case.args))
