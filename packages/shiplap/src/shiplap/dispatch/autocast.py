"""The rule of an op for its floating-point inputs under ``torch.autocast``, from the declaration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Args, Result, Value
from shiplap.errors import ShiplapError, error
from shiplap.torch_private import dispatcher_calls

# Part of an explained error, by which it is recognised and not explained twice.
AUTOCAST = "in a torch.autocast region"
Cast: TypeAlias = Callable[[str, Args], Args]  # of a device type and the arguments of a call


def make_cast(spec: OpSpec) -> Cast:
    """Return ``cast(device_type, args)``, which implements the op's autocast rule. It converts the floating-point
    arguments of each dtype class to one dtype. A dtype class consists of the tensors whose annotations share a name
    such as ``Float``.

    The rule ``widest`` selects the widest dtype among them, ``autocast`` the dtype of the autocast context, and
    ``float32`` float32. Integer tensors and arguments of a fixed dtype are not converted. As in torch's own rules,
    float64 is never converted to a narrower dtype.
    """
    # The positions are found once, since the function that is returned runs in each call under autocast.
    groups: dict[str, list[int]] = {}  # of a dtype class, the numbers of its arguments
    written: dict[str, list[int]] = {}  # of these, those that are written to
    for number, arg in enumerate(spec.args):
        if arg.tensor is not None and not arg.tensor.concrete:
            groups.setdefault(arg.tensor.dtype_class, []).append(number)
            if arg.mutated:
                written.setdefault(arg.tensor.dtype_class, []).append(number)
    parts = [(numbers, written.get(name, [])) for name, numbers in groups.items()]

    def target(device_type: str, values: list[Tensor]) -> torch.dtype:
        """Return the dtype to which ``values``, the floating-point tensors of one dtype class, are converted. If the
        rule is ``widest`` or one of them is float64, it is the widest of their dtypes. Otherwise it is float32 or the
        autocast dtype of ``device_type``, as the rule states.
        """
        dtypes = {value.dtype for value in values}
        if spec.autocast == "widest" or torch.float64 in dtypes:
            return functools.reduce(torch.promote_types, dtypes)
        return torch.float32 if spec.autocast == "float32" else torch.get_autocast_dtype(device_type)

    def cast(device_type: str, args: Args) -> Args:
        """Return ``args`` with the floating-point tensors of each dtype class in one dtype. It is the dtype of an
        argument that is written to, or else that of the rule for ``device_type``.
        """
        converted = list(args)
        for numbers, mutated in parts:
            given = [number for number in numbers if number < len(args)]
            values = [value for number in given for value in _castable_tensors(args[number])]
            if not values:
                continue
            kept = [value.dtype for n in mutated if n < len(args) and isinstance(value := args[n], Tensor)]
            dtype = kept[-1] if kept else target(device_type, values)  # a converted copy would take the writes
            for number in given:
                converted[number] = _cast_argument(args[number], dtype)
        return tuple(converted)

    return cast


def _castable_tensors(value: Value) -> list[Tensor]:
    """Return the floating-point tensors of an argument, a tensor or a list of tensors. The list is empty for any other
    value.
    """
    if isinstance(value, Tensor):
        return [value] if value.dtype.is_floating_point else []
    values = value if isinstance(value, (list, tuple)) else []
    return [v for v in values if isinstance(v, Tensor) and v.dtype.is_floating_point]


def _cast_argument(value: Value, dtype: torch.dtype) -> Value:
    """Return an argument, a tensor or a list of tensors, with its floating-point tensors in ``dtype``. Any other value
    is returned unchanged.
    """
    if isinstance(value, Tensor):
        return _cast_tensor(value, dtype)
    if isinstance(value, (list, tuple)):
        return [_cast_tensor(v, dtype) if isinstance(v, Tensor) else v for v in value]
    return value


def _cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating-point tensor in ``dtype``. Any other tensor is returned unchanged."""
    return tensor.to(dtype) if tensor.dtype.is_floating_point and tensor.dtype is not dtype else tensor


def call_outside_region(call: Callable[..., Result], args: Sequence[Value], kwargs: Mapping[str, Value]) -> Result:
    """Return ``call(*args, **kwargs)``, called with autocast switched off. A dtype error of the call is raised again
    with a text that names autocast as its cause.
    """
    try:
        with dispatcher_calls.outside_autocast():
            return call(*args, **kwargs)
    except ShiplapError as e:
        raise (explain_autocast(args, kwargs, e) or e) from None


def explain_autocast(args: Sequence[Value], kwargs: Mapping[str, Value], cause: ShiplapError) -> ShiplapError | None:
    """Return an error like ``cause`` whose text names autocast and the fix, for a dtype error of a call in an autocast
    region. Return None for any other error, and outside of such a region.

    Autocast gives the results of matrix products a narrow dtype, which an argument with a fixed dtype does not accept.
    An op without a rule (``autocast=None``) gets its arguments unconverted.
    """
    # Only errors of dtypes can come from autocast, and an error that names it already is left alone.
    if cause.id not in ("SL204", "SL205") or AUTOCAST in cause.got:
        return None
    tensors = [value for given in (args, kwargs.values()) for value in given if isinstance(value, Tensor)]
    if not any(dispatcher_calls.is_in_autocast_region(tensor.device.type) for tensor in tensors):
        return None
    rule = 'declare the op with autocast="widest"'
    if cause.id == "SL204":
        rule = 'annotate the argument Float and declare the op with autocast="float32"'
    fix = f"{rule}, or convert the tensor with .to(dtype) before the call"
    got = f"{cause.got}, {AUTOCAST}"
    return error(cause.id, where=cause.where, got=got, expected=cause.expected, what=cause.what, fix=fix)
