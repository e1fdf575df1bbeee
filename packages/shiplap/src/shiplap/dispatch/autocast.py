"""What ``torch.autocast`` means to an op: one rule for its floating inputs, from the declaration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Args, Value

Cast: TypeAlias = Callable[[str, Args], Args]  # of a device type and the arguments of a call


def make_cast(spec: OpSpec) -> Cast:
    """``cast(device_type, args)``: every argument of a dtype class gets one floating dtype.

    ``widest`` the widest among them, ``autocast`` the context's dtype, ``float32`` as it says. Integer tensors and
    concrete dtypes are left alone; float64 is never narrowed, as in torch's own rules.
    """
    groups: dict[str, list[int]] = {}  # of a dtype class, the numbers of its arguments
    written: dict[str, list[int]] = {}  # of these, those that are written to
    for number, arg in enumerate(spec.args):
        if arg.tensor is not None and not arg.tensor.concrete:
            groups.setdefault(arg.tensor.dtype_class, []).append(number)
            if arg.mutated:
                written.setdefault(arg.tensor.dtype_class, []).append(number)
    parts = [(numbers, written.get(name, [])) for name, numbers in groups.items()]

    def target(device_type: str, values: list[Tensor]) -> torch.dtype:
        dtypes = {value.dtype for value in values}
        if spec.autocast == "widest" or torch.float64 in dtypes:
            return functools.reduce(torch.promote_types, dtypes)
        return torch.float32 if spec.autocast == "float32" else torch.get_autocast_dtype(device_type)

    def cast(device_type: str, args: Args) -> Args:
        converted = list(args)
        for numbers, mutated in parts:
            given = [number for number in numbers if number < len(args)]
            values = [value for number in given for value in _floating(args[number])]
            if not values:
                continue
            kept = [value.dtype for n in mutated if n < len(args) and isinstance(value := args[n], Tensor)]
            dtype = kept[-1] if kept else target(device_type, values)  # a converted copy would take the writes
            for number in given:
                converted[number] = _convert(args[number], dtype)
        return tuple(converted)

    return cast


def _floating(value: Value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.dtype.is_floating_point else []
    values = value if isinstance(value, (list, tuple)) else []
    return [v for v in values if isinstance(v, Tensor) and v.dtype.is_floating_point]


def _convert(value: Value, dtype: torch.dtype) -> Value:
    """An argument of a dtype class, a tensor or a list of them, in its dtype; anything else as it is."""
    if isinstance(value, Tensor):
        return _converted(value, dtype)
    if isinstance(value, (list, tuple)):
        return [_converted(v, dtype) if isinstance(v, Tensor) else v for v in value]
    return value


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype.is_floating_point and tensor.dtype is not dtype else tensor
