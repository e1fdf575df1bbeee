"""The arrangement of a call's arguments by name, and the check for tensors in place of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.value_kinds import exceeds_int64, is_int_value, value_kind_name
from shiplap.declare.values import Value
from shiplap.errors import ShiplapError, error
from shiplap.torch_private.dispatcher_calls import is_dynamo_compiling
from shiplap.torch_private.dispatcher_transforms import is_differentiated

ABSENT_FIX = "pass a tensor. If the argument may be absent, add | None to its annotation"
NUMPY = (np.ndarray, np.generic)  # arrays and scalars
_PLAIN = frozenset((int, float, bool, complex, type(None)))  # types of values that need no check
# By the kind of a number: the function of Python that makes one.
_NUMBERS: dict[str | None, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "complex": complex,
    "Scalar": complex,  # holds each of them
}


def number_check(
    spec: OpSpec, *, recorded: bool = False
) -> Callable[[Sequence[Value], Mapping[str, Value]], None] | None:
    """Return ``check(args, kwargs)``, which refuses values that torch would turn into numbers with a loss and without a
    warning. It raises ``SL220`` if an argument declared as a number is a tensor with a gradient, and ``SL209`` if an
    argument declared as an int is a tensor or a NumPy value of floating-point numbers. In a graph, ``SL209`` also
    refuses NumPy values for arguments that are other numbers. Return None if no argument is a number.

    If ``recorded`` is true, the check runs inside the forward of an ``autograd.Function``, where gradients are off. It
    then reads only the tensor's ``requires_grad``. Otherwise it finds a gradient only while gradients are on.
    """
    # A number in a list, ``list[float]``, may be a tensor with a gradient as well.
    numbers = [(i, a) for i, a in enumerate(spec.args) if a.scalar and a.scalar.removeprefix("list[")[:-1] in _NUMBERS]
    numbers += [(i, a) for i, a in enumerate(spec.args) if a.scalar in _NUMBERS]
    if not numbers:
        return None

    def check(args: Sequence[Value], kwargs: Mapping[str, Value]) -> None:
        """Raise ``SL220`` if a number argument of the op, or a number in a list, is a tensor that carries a gradient.
        Raise ``SL209`` if it is an int, and the tensor or the NumPy value is not of integers, and in a graph if it is
        another number, and the value is one of NumPy. The argument may be positional or a keyword.
        """
        traced = is_dynamo_compiling()
        for i, arg in numbers:
            value = args[i] if i < len(args) else kwargs.get(arg.name)
            # Most calls pass plain numbers. To check each of these alone takes as long as the launch of a small kernel.
            if not traced and (type(value) in _PLAIN or (type(value) is list and _PLAIN.issuperset(map(type, value)))):
                continue
            for each in value if isinstance(value, (list, tuple)) else (value,):
                whole = arg.scalar in ("int", "list[int]")
                if not isinstance(each, Tensor):
                    # Dynamo makes a tensor of a value of NumPy, which torch takes for an int alone.
                    if traced and isinstance(each, NUMPY) and (not whole or torch.as_tensor(each).is_floating_point()):
                        raise _traced_numpy_error(spec, arg)
                    if not traced and whole and isinstance(each, NUMPY) and not is_int_value(each):
                        fix = fix_of_value_for_number(arg, each)
                        raise _number_error(spec, arg, "SL209", value_kind_name(each), fix)
                    continue
                if each.requires_grad if recorded else is_differentiated(each):
                    raise _number_error(spec, arg, "SL220", "a tensor that requires a gradient", "")
                if whole and (each.is_floating_point() or each.is_complex()):
                    fix = "pass an int, such as int(t) of the tensor t to cut off its fraction, or round(t.item())"
                    if each is value and arg.scalar != "int":
                        fix = fix_of_value_for_number(arg, each)
                    raise _number_error(spec, arg, "SL209", f"a tensor of {each.dtype}", fix)

    return check


def _number_error(spec: OpSpec, arg: Arg, id: str, got: str, fix: str) -> ShiplapError:
    """Return the error ``id`` of a call of the op ``spec`` with the tensor ``got`` for ``arg``, a declared number."""
    return error(id, where=f"{spec.name}, argument {arg.name!r}", got=got, expected=arg.kind, fix=fix)


def _traced_numpy_error(spec: OpSpec, arg: Arg) -> ShiplapError:
    """Return the error ``SL209`` of a traced call that passes a value of NumPy for ``arg``, a number. In eager calls
    torch takes such a value, but in a graph it is a tensor.
    """
    made = _conversion(kind_of_number(arg))
    fix = f"pass a number of Python: call {made} of the value v outside of the compiled function"
    return _number_error(spec, arg, "SL209", "a value of NumPy, which is a tensor in a graph", fix)


def _conversion(kind: str) -> str:
    """Return the source of a number of Python of the declared ``kind`` that is made from ``v``, a value of NumPy."""
    return "v.item()" if kind == "Scalar" else f"{_NUMBERS[kind].__name__}(v)"


def is_array(value: object) -> bool:
    """Return whether ``value`` is an array of NumPy with at least one dim."""
    return isinstance(value, np.ndarray) and value.ndim > 0


def kind_of_number(arg: Arg) -> str:
    """Return the kind of a scalar argument, or that of the members of a list, such as ``"int"`` for ``list[int]``.
    Return an empty string for a tensor.
    """
    return arg.scalar.removeprefix("list[").removesuffix("]") if arg.scalar else ""


def fix_of_value_for_number(arg: Arg, value: Any) -> str:
    """Return the advice of the error for a call that passes ``value``, which is no number of the declared kind, for the
    argument ``arg``. Return an empty string if ``arg`` is no number, or if nothing is known about such values.
    """
    kind = kind_of_number(arg)
    if kind not in _NUMBERS:
        return ""
    several = f"If {arg.name} is to be several numbers, annotate it as a tensor"
    if kind != arg.scalar and (isinstance(value, Tensor) or is_array(value)):
        made = "v" if value.ndim == 1 else "v.reshape(-1)"
        if kind == "int" and isinstance(value, Tensor):
            made += ".long()" * (value.is_floating_point() or value.is_complex())
        elif kind == "int":
            made += ".astype(int)" * (value.dtype.kind not in "iu")
        return f"pass a list of numbers, such as {made}.tolist() of the {type(value).__name__} v"
    if isinstance(value, Tensor):
        return f"pass a number, such as t.item() of a tensor t with one element. {several}"
    if is_array(value):
        return f"pass a number, such as a.item() of an array a with one element. {several}"
    if isinstance(value, (float, *NUMPY)) and not _converts(value, kind):
        return ""
    if kind == "int" and isinstance(value, (float, *NUMPY)):
        return "pass an int: write // in place of / where a division makes the number, or int(v) of the number v"
    if isinstance(value, NUMPY):
        return f"pass a number of Python, such as {_conversion(kind)} of the value v"
    return ""


def _converts(value: Any, kind: str) -> bool:
    """Return whether ``value``, a number of Python or of NumPy, can become a number of the declared ``kind`` that loses
    at most a fraction. NaN is no int, and a complex number no float.
    """
    # Not by ``np.iscomplexobj``, which enters three functions of NumPy.
    is_complex = value.dtype.kind == "c" if isinstance(value, np.ndarray | np.generic) else isinstance(value, complex)
    if is_complex and kind not in ("complex", "Scalar"):
        return False
    try:
        return not exceeds_int64(_NUMBERS[kind](value))
    except (ArithmeticError, TypeError, ValueError):
        return False


def arrange_arguments(
    spec: OpSpec, schema: str, args: Sequence[Value], kwargs: Mapping[str, Value]
) -> dict[str, Value]:
    """Return the values of a call as a dict from argument name to value. Arguments that are absent are not in the dict.

    Raise ``SL209``, worded as Python's ``TypeError``, if ``args`` and ``kwargs`` do not fit the signature. ``schema``
    is the signature as the error prints it.
    """
    values: dict[str, Value] = {}
    missing = ""
    for index, arg in enumerate(spec.args):
        name, by_name = arg.name, arg.name in kwargs
        if index < len(args) and not arg.keyword_only:
            values[name] = args[index]
            if by_name:
                fix = f"pass {name} once, by position or as {name}="
                raise _signature_mismatch(spec, schema, f"multiple values for argument {name!r}", fix)
        elif by_name:
            values[name] = kwargs[name]
        # Only noted: an argument that is given twice further on is reported first.
        elif arg.default is ... and not missing:
            missing = name
        # A positional value beyond the last positional argument has no parameter to go to.
        if (index < len(args) and arg.keyword_only) or index + 1 == len(spec.args) < len(args):
            fix = f"pass {name} by its name, as in {name}=..." if arg.keyword_only and not by_name else ""
            raise _signature_mismatch(spec, schema, "too many positional arguments", fix)
    if missing:
        fix = f"pass {missing} as well"
        if len(args) == 1 and isinstance(args[0], (list, tuple)) and not kwargs and not spec.args[0].many:
            fix = f"to pass the items of one {type(args[0]).__name__} as arguments, write {spec.opname}(*values)"
        raise _signature_mismatch(spec, schema, f"missing a required argument: {missing!r}", fix)
    for name in kwargs:
        if name not in values:
            near = get_close_matches(name, [a.name for a in spec.args if a.name not in values])
            fix = f"write {near[0]}= in place of {name}=" if near else ""
            fix = fix or f"remove {name}=, or write the name that 'expected' gives the argument"
            raise _signature_mismatch(spec, schema, f"an unexpected keyword argument {name!r}", fix)
    return values


def _signature_mismatch(spec: OpSpec, schema: str, got: str, fix: str = "") -> ShiplapError:
    """Return the error ``SL209`` of a call whose arguments do not fit the signature. ``got`` is the reason, ``schema``
    the expected signature, and ``fix`` the repair, which the schema shows if it is empty.
    """
    what, fix = "the arguments do not fit the signature", fix or "pass the arguments that 'expected' lists, each once"
    return error("SL209", where=spec.name, what=what, got=got, expected=schema, fix=fix)
