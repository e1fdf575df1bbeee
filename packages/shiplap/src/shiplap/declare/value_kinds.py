"""The kind of value that each argument takes, and the words of an error for a value of another kind."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiplap.declare.spec import Arg


def is_int_value(value: object) -> bool:
    """Return whether ``value`` can be passed as an int argument.

    Accepted are a Python int, a symbolic int, a NumPy integer, and a zero-dimensional tensor with a dtype that is not
    complex. A fake tensor, which has no value, is not accepted. Unless it is symbolic, the value must fit in a signed
    64-bit integer.
    """
    if isinstance(value, torch.SymInt):
        return True
    if not hasattr(value, "__index__") or (isinstance(value, Tensor) and (value.dim() or value.is_complex())):
        return False
    return _converts_to_number(value, int if isinstance(value, Tensor) else operator.index)


def is_float_value(value: object) -> bool:
    """Return whether ``value`` can be passed as a float argument. It may be a number of Python or NumPy, a symbolic
    number, or a tensor of one element whose dtype is not complex.
    """
    if isinstance(value, (float, torch.SymFloat, torch.SymInt)):
        return True
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return False
    return not (isinstance(value, Tensor) and value.is_complex()) and _converts_to_number(value, float)


def is_scalar_value(value: object) -> bool:
    """Return whether ``value`` can be passed as an argument that holds a number of any kind. It may be a number of
    Python or a symbolic number. Of the numbers of NumPy only those that Python has as well are accepted.
    """
    if isinstance(value, (float, complex)) and type(value) is not np.complex128:
        return True
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return False
    return is_bool_value(value) or is_float_value(value)


def _converts_to_number(value: object, number: Callable[[Any], float]) -> bool:
    """Return whether ``number(value)`` succeeds and fits in 64 bits. The conversion must be tried, since all arrays and
    tensors have the conversion methods.
    """
    if isinstance(value, np.ndarray) and value.ndim:  # torch takes none, and NumPy before 2.4 converts one element
        return False
    try:
        return not exceeds_int64(number(value))
    except (ArithmeticError, RuntimeError, TypeError, ValueError):
        return False


def is_text_value(value: object) -> bool:
    """Return whether ``value`` is a str that UTF-8 can encode. torch passes strings in UTF-8."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_bool_value(value: object) -> bool:
    """Return whether ``value`` is a bool, real or symbolic."""
    return isinstance(value, (bool, torch.SymBool))


def exceeds_int64(value: object) -> bool:
    """Return whether ``value`` is an int that does not fit in 64 bits."""
    return type(value) is int and not -(2**63) <= value < 2**63


def value_kind_name(value: object) -> str:
    """Return the kind of a value in words, for errors. It is the name of its type, or a remark such as ``int beyond 64
    bits``.
    """
    if value is None:
        return "None"
    if exceeds_int64(value):
        return "int beyond 64 bits"
    # ASCII needs no attempt to encode it.
    if isinstance(value, str) and not (value.isascii() or is_text_value(value)):
        return "str that UTF-8 cannot encode"
    return type(value).__name__


# By the word for an element: the class that fits, if all its values do, and the question for other values.
_ELEMENTS: dict[str, tuple[type | None, Callable[[object], bool]]] = {
    "int": (int, is_int_value),
    "float": (float, is_float_value),
    "bool": (bool, is_bool_value),
    "str": (None, is_text_value),
    "complex": (complex, lambda value: isinstance(value, complex) or is_float_value(value)),
    "Scalar": (float, is_scalar_value),
    "dtype": (torch.dtype, lambda value: isinstance(value, torch.dtype)),
    "device": (torch.device, lambda value: isinstance(value, (torch.device, str))),
    "layout": (torch.layout, lambda value: isinstance(value, torch.layout)),
    "memory_format": (torch.memory_format, lambda value: isinstance(value, torch.memory_format)),
    "Generator": (torch.Generator, lambda value: isinstance(value, torch.Generator)),
    "tensor": (Tensor, lambda value: isinstance(value, Tensor)),
}


def kind_mismatch(arg: Arg, value: object) -> str:
    """Return the kind of ``value``, in words, if it is not of the kind that ``arg`` declares. Return an empty string if
    it is.
    """
    if value is None:
        return "" if arg.optional else "None"
    scalar = arg.scalar or "tensor"
    listed = arg.many or scalar.startswith("list[")
    if arg.cls is not None:
        return "" if isinstance(value, arg.cls) else value_kind_name(value)
    plain, fits = _ELEMENTS[scalar[5:-1] if listed and arg.scalar else scalar]
    if not listed:
        elements: Sequence[object] = (value,)
    elif isinstance(value, (list, tuple)):
        elements = value
    else:
        return value_kind_name(value)
    if arg.length and len(elements) != arg.length:
        return f"{type(value).__name__} of {len(elements)}"
    for element in elements:
        if element is None and arg.absent:
            continue
        # The usual types are recognised without a call of the value's own methods.
        usual = type(element) is plain and (not isinstance(element, int) or -(2**63) <= element < 2**63)
        if not usual and not fits(element):
            return value_kind_name(element) + (f" in a {type(value).__name__}" if listed else "")
    return ""
