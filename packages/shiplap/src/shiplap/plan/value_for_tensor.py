"""The advice of an error for a call that passes a number, a list or an array where an op takes a tensor."""

from __future__ import annotations

import cmath
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shiplap.declare.spec import Arg, Dim, OpSpec, TensorType
from shiplap.declare.values import Value
from shiplap.plan.argument_kinds import ABSENT_FIX, NUMPY, is_array

Others: TypeAlias = Sequence[tuple[Arg, Tensor]]  # the other tensors of a call, with their declarations

_USUAL = (torch.float32, torch.int64, torch.int32, torch.complex64)  # preferred among the dtypes that fit


def fix_of_value_for_tensor(spec: OpSpec, arg: Arg, values: Mapping[str, Value]) -> str:
    """Return the advice of the error for a call of the op ``spec`` that passes something else than a tensor for the
    tensor argument ``arg``. ``values`` holds the arguments of the call by name.

    The advice shows how a tensor of the declared rank and dtype is made of the value, if one can be made. It also says
    which annotation would take the value as it is.
    """
    name, value = arg.name, values[arg.name]
    if value is None or arg.tensor is None:
        return ABSENT_FIX
    others = [(a, v) for a in spec.tensors if a is not arg and isinstance(v := values.get(a.name), Tensor)]
    number = _number_of(value)
    if number is not None:
        such = _example(_filled_source(arg, number, others))
        return f"pass a tensor{such}. If {name} is to be a number, annotate it as {name}: {type(number).__name__}"
    if isinstance(value, (list, tuple)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as torch warns of a list of arrays, which is slow
            such = _example(_list_source(arg.tensor, value, others))
        return f"pass one tensor{such}. If {name} is to be a list of tensors, annotate it as {name}: list[{arg.tensor}]"
    if is_array(value):
        made = _array_source(arg.tensor, value, others)
        return f"pass a tensor{_example(made)}" + f" for the array a that is passed as {name}" * bool(made)
    return f"pass a tensor as {name}"


def _example(source: str) -> str:
    """Return the words that follow "pass a tensor" in the advice. ``source`` makes such a tensor, or is empty if none
    can be made of the value.
    """
    return f", such as {source}" if source else " of the type under 'expected'"


def _number_of(value: Any) -> bool | int | float | complex | None:
    """Return ``value`` as a number of Python if it is one, or one of NumPy, or a member of an ``IntEnum``. Return None
    for anything else.
    """
    if isinstance(value, NUMPY) and not is_array(value):
        value = value.item()
    for kind in (bool, int, float, complex):
        if isinstance(value, kind):
            plain: Any = value
            return kind(plain)
    return None


def _filled_source(arg: Arg, number: complex, others: Others) -> str:
    """Return the source of a tensor for ``arg`` that has the declared sizes, each element of which is ``number``.
    Return an empty text if no declared dtype holds the number. ``others`` holds the other tensors of the call.
    """
    kind = arg.tensor
    sizes = [_size_source(dim) for dim in kind.dims if dim.text != "..."] if kind is not None else []
    known = _dtypes_of_class(kind, others) if kind is not None else ()
    if kind is None or "" in sizes or (named := _dtype_keyword(kind, number, known)) is None:
        return ""
    shown = repr(number) if cmath.isfinite(number) else f"{type(number).__name__}('{number}')"
    # full_like keeps the strides of its argument, and these may not be contiguous.
    like = next((a.name for a, _ in others if a.tensor == kind and not arg.contiguous), "")
    if like:
        return f"torch.full_like({like}, {shown})"
    device = _device_keyword(others)
    if not sizes:
        return f"torch.tensor({shown}{named}{device})"
    return f"torch.full(({', '.join(sizes)}{',' * (len(sizes) == 1)}), {shown}{named}{device})"


def _device_keyword(others: Others) -> str:
    """Return the keyword ``", device=..."`` that makes a tensor on the device of the tensors ``others`` of the call.
    Return an empty text if they are on the CPU.
    """
    return next((f", device={str(v.device)!r}" for _, v in others if v.device.type != "cpu"), "")


def _size_source(dim: Dim) -> str:
    """Return the source of a size that the dim admits, with the names of the declaration. It is empty for an expression
    that calls a function of the language of dims, which Python does not have.
    """
    if dim.kind == "any" or dim.of:
        return "1"
    if dim.kind == "variadic":
        return f"*{dim.text}"
    if dim.kind == "fixed":
        return str(dim.size)
    return "" if "(" in dim.text else dim.text


def _list_source(kind: TensorType, value: Sequence[Any], others: Others) -> str:
    """Return the source of a tensor of the type ``kind`` that has the elements of the list ``value``, which the source
    calls ``values``. Return an empty text if the elements have another rank, or no declared dtype holds them.
    ``others`` holds the other tensors of the call.
    """
    if value and all(isinstance(each, Tensor) for each in value):
        joined = {1: "torch.stack(values)", 0: "torch.cat(values)"}.get(len(kind.axes) - value[0].dim(), "")
        return joined if len({(each.shape, each.dtype) for each in value}) == 1 and not kind.variadic else ""
    named = _dtype_keyword(kind, value, _dtypes_of_class(kind, others))
    if named is None or not _has_rank(kind, torch.tensor(value).dim()):
        return ""
    return f"torch.tensor(values{named}{_device_keyword(others)})"


def _array_source(kind: TensorType, value: Any, others: Others) -> str:
    """Return the source of a tensor of the type ``kind`` that has the elements of the array ``value`` of NumPy, which
    the source calls ``a``. Return an empty text if the array has another rank, or no declared dtype holds its elements.
    ``others`` holds the other tensors of the call.
    """
    # Torch shares no memory that is read backwards, and warns of memory that is read-only.
    copied = min(value.strides) < 0 or not value.flags.writeable
    named = _dtype_keyword(kind, value.copy() if copied else value, _dtypes_of_class(kind, others))
    if named is None or not _has_rank(kind, value.ndim):
        return ""
    to = ", ".join(word.partition("=")[2] for word in (_device_keyword(others), named) if word)
    return f"torch.from_numpy(a{'.copy()' * copied})" + f".to({to})" * bool(to)


def _has_rank(kind: TensorType, rank: int) -> bool:
    """Return whether a tensor of the type ``kind`` may have ``rank`` dims."""
    return rank >= len(kind.axes) if kind.variadic else rank == len(kind.axes)


def _dtypes_of_class(kind: TensorType, others: Others) -> list[torch.dtype]:
    """Return the dtypes of the tensors in ``others`` that must have the same dtype as a tensor of the type ``kind``."""
    return [v.dtype for a, v in others if a.tensor is not None and a.tensor.dtype_class == kind.dtype_class]


def _dtype_keyword(kind: TensorType, value: Any, known: Sequence[torch.dtype]) -> str | None:
    """Return the keyword ``", dtype=..."`` with which torch makes a tensor of the type ``kind`` from ``value``, a
    number, a list or an array. Return an empty text if torch chooses such a dtype by itself, and None if no declared
    dtype holds the value. ``known`` holds the dtype that other arguments decide, or nothing.
    """
    try:
        own = torch.as_tensor(value).dtype
    except (RuntimeError, TypeError, ValueError):
        return None
    declared = [getattr(torch, name) for name in kind.dtypes] or [own]
    order = [own, *_USUAL, *declared]
    for dtype in known or sorted(declared, key=order.index):
        try:
            # A conversion that cuts off a fraction or an imaginary part is not meant.
            if torch.can_cast(own, dtype) and torch.as_tensor(value, dtype=dtype) is not None:
                return "" if dtype == own else f", dtype={dtype}"
        except RuntimeError:  # of a number that the dtype is too narrow for
            continue
    return None
