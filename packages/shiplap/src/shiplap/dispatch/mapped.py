"""``torch.vmap`` over ops that torch's own fallback does not support. The op is called once for each sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shiplap.declare.spec import OpSpec
from shiplap.errors import ShiplapError, error
from shiplap.torch_private import dispatcher_transforms
from shiplap.torch_private.dispatcher_library import Overload


def needs_vmap_rule(spec: OpSpec) -> bool:
    """Return whether ``torch.vmap`` needs a rule of Shiplap for the op. torch's own fallback does not support lists,
    writes, data-dependent sizes and random numbers.
    """
    return spec.traced or spec.draws or bool(spec.mutated or spec.dynamic) or any(a.many for a in spec.args)


def make_vmap_rule(spec: OpSpec, overload: Callable[[], Overload]) -> Callable[..., Any]:
    """Return the function by which ``torch.vmap`` calls the op. It calls ``overload()`` for each sample and stacks the
    results.

    The function raises ``SL138`` if the results of different samples cannot be one tensor, or if samples would write to
    the same memory. It raises ``SL138`` also if the op draws random numbers and ``torch.vmap`` was not called with
    ``randomness="different"``.
    """

    def refuse_shared(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise ``SL138`` if the op writes to an argument that is not batched under ``torch.vmap``, because all samples
        would write to its memory.
        """
        given = spec.complete(args, kwargs)
        for arg, value in zip(spec.args, given, strict=True):
            if arg.mutated and value is not None and not dispatcher_transforms.is_mapped(value):
                raise _vmap_error(spec, f"{arg.name!r}, which all samples would write to")

    def run(sample: dispatcher_transforms.Sample, count: int) -> Any:
        """Return the stacked results of the op for the ``count`` samples of a vmapped batch. ``sample(index)`` returns
        the positional and keyword arguments of one sample.
        """
        if spec.dynamic:
            raise _vmap_error(spec, "results whose sizes depend on data")
        # Without a sample there is no result to take the shape from.
        if not count:
            raise _vmap_error(spec, "no sample")
        op, results = overload(), []
        for index in range(count):
            args, kwargs = sample(index)
            results.append(op(*args, **kwargs))
        return _stack_sample_results(spec, results)

    mapped = dispatcher_transforms.map_samples(run)

    def called(*args: Any, **kwargs: Any) -> Any:
        """Return the results of the op for all samples of a call under ``torch.vmap``. Raise ``SL138`` if the op draws
        random numbers that must not differ between samples, or writes to memory that samples share.
        """
        if spec.draws and (asked := dispatcher_transforms.vmap_randomness()) != "different":
            raise _vmap_error(
                spec, f"random numbers, and randomness={asked!r}", 'write torch.vmap(f, randomness="different")'
            )
        if spec.mutated:
            refuse_shared(args, kwargs)
        return mapped(*args, **kwargs)

    return called


def _stack_sample_results(spec: OpSpec, results: Sequence[Any]) -> Any:
    """Return the results of all samples as one result, with the samples along a new first dim of each tensor. Raise
    ``SL138`` if the samples' results differ in shape, in the length of a list or in a number.
    """
    first = results[0]
    if isinstance(first, Tensor):
        # A stack needs one shape, while a reference may make shapes depend on values.
        if any(not isinstance(r, Tensor) or r.shape != first.shape for r in results):
            raise _vmap_error(spec, "results of different shapes")
        return torch.stack(list(results))
    if isinstance(first, (list, tuple)):
        if any(len(r) != len(first) for r in results):
            raise _vmap_error(spec, "lists of different lengths")
        return type(first)(_stack_sample_results(spec, [r[i] for r in results]) for i in range(len(first)))
    if any(r != first for r in results):
        raise _vmap_error(spec, f"the numbers {', '.join(map(str, results[:3]))}")
    return first


def _vmap_error(spec: OpSpec, got: str, fix: str = "") -> ShiplapError:
    """Return the error ``SL138`` for a call of the op under ``torch.vmap`` that has no single result. ``got`` names the
    cause, and ``fix`` is the remedy, if there is one.
    """
    where, expected = f"torch.vmap of {spec.name}", "one result for all samples"
    return error("SL138", where=where, got=got, expected=expected, fix=fix)
