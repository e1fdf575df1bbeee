"""Arguments of a recipe from the builder of an op (``@op.samples``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shiplap.dispatch import Op
from shiplap.dispatch.state import bind_sampler
from shiplap.errors import error, error_line
from shiplap.sampling.boundary_sizes import HUGE_INTEGERS
from shiplap.sampling.case import SampleCase, tensors_among
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.sizes import scalar_candidates
from shiplap.sampling.values import SHARED_NUMBERS

_OF_ANOTHER_DEVICE = "device type for generator"  # in torch's error for a tensor that is drawn on another device


def build_arguments(
    op: Op, recipe: SampleRecipe, env: Mapping[str, Any], rng: torch.Generator, device: torch.device
) -> tuple[Any, ...]:
    """Return the arguments of one sample in schema order, made by the op's own builder (``@op.samples``).

    The builder gets the sizes and scalars in ``env`` and the kind of values that ``recipe`` describes. Defaults replace
    the arguments that it leaves out. For a scalar beyond 32 bits, the builder gets a usual value, since it may count up
    to the scalar. The large value is put into the returned arguments.
    """
    assert op.sampler is not None
    huge = {
        a.name: env[a.name] for a in op.spec.scalars if type(env.get(a.name)) is int and env[a.name] in HUGE_INTEGERS
    }
    usual = {a.name: next(iter(scalar_candidates(a)), 1) for a in op.spec.scalars if a.name in huge}
    floats = [n for n in dict(recipe.dtypes).values() if getattr(torch, n).is_floating_point]
    wanted = {k: usual.get(k, v) for k, v in env.items() if k != "..."} | {"absent": recipe.absent}
    if recipe.values not in ("normal", SHARED_NUMBERS) and builder_takes_values(op):
        wanted["values"] = recipe.values
    build, dtype = bind_sampler(op.spec, op.sampler), getattr(torch, floats[0]) if floats else torch.float32
    try:
        made = build(rng, wanted, dtype, device)
    except (NameError, AttributeError, TypeError, LookupError, AssertionError, RuntimeError) as e:
        # Such as memory that there is not, which a check expects.
        if isinstance(e, RuntimeError) and _OF_ANOTHER_DEVICE not in str(e):
            raise
        raise error(
            "SL502",
            what="the sample builder raised an error",
            where=f"{op.spec.name}, samples",
            got=error_line(e),
            expected="the arguments of one call",
            fix=_fix_of_builder_error(e, wanted),
        ) from e
    _require_arguments(op, made)
    given: list[Any] = [list(v) if isinstance(v, tuple) else v for v in made]
    given += [a.default for a in op.spec.args[len(given) :]]
    return tuple(huge.get(a.name, v) for a, v in zip(op.spec.args, given, strict=True))


def _fix_of_builder_error(e: Exception, sizes: Mapping[str, object]) -> str:
    """Return the advice for a sample builder that has raised ``e``. ``sizes`` is what it was given under that name."""
    if _OF_ANOTHER_DEVICE in str(e):
        return "draw with generator=rng on the CPU, and move the tensor: torch.randn(n, generator=rng).to(device)"
    if isinstance(e, KeyError) and e.args and e.args[0] not in sizes:
        return f"read a dim or a scalar of the op from sizes, which has {', '.join(map(repr, sizes))}"
    return "correct the function that @op.samples decorates, so that it works for all sizes, 0 and 1 included"


def _require_arguments(op: Op, made: object) -> None:
    """Raise ``SL123`` unless ``made``, which the builder of the op has returned, is a tuple or list with a value for
    each argument. Values of arguments with defaults may be missing at its end.
    """
    args = op.spec.args
    if isinstance(made, (tuple, list)):
        if len(made) <= len(args) and all(a.has_default for a in args[len(made) :]):
            return
        got = f"{len(made)} values"
    else:
        got = type(made).__name__
    names = ", ".join(a.name for a in args)
    raise error(
        "SL123",
        what="the sample builder returns other values than the op takes",
        where=f"{op.spec.name}, samples",
        got=got,
        expected=f"a tuple of {names}",
        fix=f"return a tuple: return {names}{',' if len(args) == 1 else ''}",
    )


def builder_takes_values(op: Op) -> bool:
    """Return whether the op's builder of samples reads ``sizes["values"]``, the name of the kind of values to draw
    (such as ``nan``). The bytecode of such a builder has the string constant ``values``.
    """
    code = getattr(op.sampler, "__code__", None)
    return code is not None and "values" in code.co_consts


def why_values_repeat(op: Op, one: SampleCase, other: SampleCase) -> str:
    """Return why calls on ``one`` and ``other``, two samples of different seeds, cannot show a result that the op keeps
    from the call before. Return an empty string if they can.

    They cannot if the op's own builder (``@op.samples``) has made equal values for both.
    """
    first, second = tensors_among(one.args), tensors_among(other.args)
    if op.sampler is None or not first or len(first) != len(second) or bitwise_difference(first, second):
        return ""
    return "the builder of samples makes the same values for each seed: draw them from its generator"
