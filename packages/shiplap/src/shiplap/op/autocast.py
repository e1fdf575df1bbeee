"""What ``torch.autocast`` means to an op: one rule for its floating inputs, from the declaration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from shiplap.op.spec import OpSpec
from shiplap.op.values import Args, Value

__all__ = ["Cast", "make_cast"]

Cast: TypeAlias = Callable[[str, Args], Args]  # of a device type and the arguments of a call


def make_cast(spec: OpSpec) -> Cast:
    """``cast(device_type, args)``: every argument of a dtype class gets one floating dtype.

    ``widest`` the widest among them, ``autocast`` the context's dtype, ``float32`` as it says. Integer tensors and
    concrete dtypes are left alone; float64 is never narrowed, as in torch's own rules.
    """
    classes = {a.name: a.tensor.dtype_class for a in spec.args if a.tensor is not None and not a.tensor.concrete}

    mutated = {a.name for a in spec.args if a.mutated}

    def target(device_type: str, values: list[Tensor]) -> torch.dtype:
        widest = max((v.dtype for v in values), key=lambda d: d.itemsize)
        if spec.autocast == "widest" or widest == torch.float64:
            for v in values:
                widest = torch.promote_types(widest, v.dtype)
            return widest
        return torch.float32 if spec.autocast == "float32" else torch.get_autocast_dtype(device_type)

    def cast(device_type: str, args: Args) -> Args:
        groups: dict[str, list[Tensor]] = {}
        fixed: dict[str, torch.dtype] = {}
        for arg, value in zip(spec.args, args, strict=False):
            if arg.name in classes:
                groups.setdefault(classes[arg.name], []).extend(_floating(value))
            if arg.name in mutated and arg.name in classes and isinstance(value, Tensor):
                fixed[classes[arg.name]] = value.dtype  # a converted copy would take the writes
        dtypes = {name: target(device_type, values) for name, values in groups.items() if values} | fixed
        return tuple(
            _convert(value, dtypes.get(classes.get(arg.name, ""))) for arg, value in zip(spec.args, args, strict=False)
        )

    return cast


def _floating(value: Value) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def _convert(value: Value, dtype: torch.dtype | None) -> Value:
    """An argument of a dtype class, a tensor or a list of them, in its dtype; anything else as it is."""
    if dtype is None:
        return value
    if isinstance(value, (list, tuple)):
        return [_converted(v, dtype) if isinstance(v, Tensor) else v for v in value]
    return _converted(value, dtype) if isinstance(value, Tensor) else value


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
