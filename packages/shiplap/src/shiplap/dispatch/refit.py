"""Outputs that a function returns, where a call like this one has been checked before.

What ``check_outputs`` asks of a result depends on sizes, dtypes and scalars of the call, which equal calls share. So
the first of them leaves a list of what to expect, and a result that is as expected is taken as it is. Any other one
goes through ``check_outputs``, which makes it fit or says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from shiplap import dtypes
from shiplap.declare.binding import Binding
from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Args, Outputs, Result, Returned
from shiplap.dispatch.outputs import check_outputs, result_of_outputs, tensors_in_arguments

FitOutputs: TypeAlias = Callable[[Args, Returned], Result]


@dataclass(frozen=True)
class _ExpectedAxis:
    """A size that is known, or a data-dependent one with its bound."""

    size: int
    dim: str = ""


@dataclass(frozen=True)
class _ExpectedOutput:
    dtype: torch.dtype
    axes: tuple[_ExpectedAxis, ...]


def can_refit_outputs(spec: OpSpec) -> bool:
    """Whether equal calls of a function with these results can be held to one list.

    Not with floating-point arguments, for which gradients would have to be asked about in each call.
    """
    if spec.traced or spec.returned or not spec.outputs or any(a.many for a in spec.args):
        return False
    if any(row.floating for a in spec.tensors if a.tensor is not None for row in dtypes.rows(a.tensor.dtypes)):
        return False
    dims = [dim for out in spec.outputs for dim in out.tensor.dims]
    return not any(d.kind == "variadic" or (d.expr is not None and d.expr.names & {*spec.dynamic}) for d in dims)


def make_output_refit(spec: OpSpec, call: Binding, outs: Outputs) -> FitOutputs:
    """What makes outputs of the results of calls like ``call``, whose outputs were ``outs``. No tensor is kept."""
    bounds = {dim: int(bound(call.env)) for dim, bound in spec.dynamic.items()}
    expected = []
    for out, value in zip(spec.outputs, outs, strict=True):
        axes = [
            _ExpectedAxis(bounds[dim.text], dim.text) if dim.text in bounds else _ExpectedAxis(size)
            for dim, size in zip(out.tensor.dims, value.shape, strict=True)
        ]
        expected.append(_ExpectedOutput(value.dtype, tuple(axes)))
    alike, device = replace(call, args=()), call.device

    def fit(args: Args, result: Returned) -> Result:
        values = (result,) if isinstance(result, Tensor) else tuple(result or ())
        if outputs_as_expected(args, values, expected, device):
            return result_of_outputs(values)
        return result_of_outputs(check_outputs(spec, replace(alike, args=args), result))

    return fit


def outputs_as_expected(args: Args, values: Outputs, expected: list[_ExpectedOutput], device: torch.device) -> bool:
    """Whether the values are contiguous, of the expected types, and share no memory with anything."""
    if len(values) != len(expected):
        return False
    owned, sizes = {t.untyped_storage().data_ptr() for t in tensors_in_arguments(args)}, dict[str, int]()
    for value, want in zip(values, expected, strict=True):
        plain = type(value) is Tensor and value.dtype is want.dtype and value.device == device
        if not plain or value.dim() != len(want.axes) or not value.is_contiguous() or value.is_neg():
            return False
        for size, axis in zip(value.shape, want.axes, strict=True):
            same = sizes.setdefault(axis.dim, size) if axis.dim else axis.size
            if size != same or size > axis.size:
                return False
        storage = value.untyped_storage().data_ptr()
        if storage in owned:
            return False
        owned.add(storage)
    return True
