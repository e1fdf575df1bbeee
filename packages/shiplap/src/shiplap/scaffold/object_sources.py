"""Python expressions that make again the objects that a recorded call passes beside tensors and scalars."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from enum import Enum, Flag
from operator import attrgetter
from typing import Any

import torch

# The types of scalars that a call may pass, each of which Python's ``repr`` writes as an expression.
SCALARS = (
    *(bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
MOST_NUMBERS = 256  # of a NumPy array, a list or a dict that is written as text
_MOST_TEXT = 16_384  # characters of a list or a dict, including what is nested in it
_MOST_DEPTH = 3  # of objects in attributes of objects


def address_expression(address: str) -> str:
    """Return the Python expression for the object at the address ``module:qualified.name``."""
    module, _, name = address.partition(":")
    return f"import_module({module!r}).{name}"


def object_at(address: str) -> Any:
    """Import and return the object at the address ``module:qualified.name``."""
    module, _, name = address.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def is_scalar(value: Any) -> bool:
    """Return whether ``value`` is a scalar. An instance of a subclass, such as a member of an ``IntEnum``, is none,
    since its ``repr`` is no expression.
    """
    return type(value) in SCALARS


def source_of(value: Any, depth: int = _MOST_DEPTH) -> str | None:
    """Return a Python expression that makes an object equal to ``value``, or None if there is none.

    There is one for a scalar, for whatever lies at an address of a module, such as a function or a class, for a member
    of an ``Enum``, a small NumPy array, list or dict, and for an instance of a class at an address whose attributes
    have expressions, up to ``depth`` objects in each other. There is none for an object that holds a tensor, for a
    module of layers, for an object with a finalizer, and for what the recorded program itself defines. The expression
    reads the names ``torch``, ``inf``, ``nan``, ``import_module`` and ``with_attributes``.
    """
    if is_scalar(value):
        return f"torch.device({str(value)!r})" if isinstance(value, torch.device) else repr(value)
    if isinstance(value, (torch.Tensor, torch.nn.Module)) or depth < 0:
        return None
    try:
        return _object_source(value, depth)
    except Exception:  # an attribute of an object may raise anything
        return None


def _object_source(value: Any, depth: int) -> str | None:
    """Return the Python expression for an object that is neither a scalar nor a tensor, or None if there is none."""
    if type(value) in (list, tuple, set):
        parts = _sources_of_all(value, depth)
        return None if parts is None else f"{type(value).__name__}([{', '.join(parts)}])"
    if type(value) is dict:
        return _dict_source(value, depth)
    kind = _expression_of_address(type(value))
    if isinstance(value, Flag):  # a combination of members is at no name
        return kind and f"{kind}({value.value!r})"
    if isinstance(value, Enum):
        return kind and f"{kind}[{value.name!r}]" if value.name else None
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _array_source(value)
    return _expression_of_address(value) or (kind and _instance_source(value, kind, depth))


def _sources_of_all(values: Collection[Any], depth: int) -> list[str] | None:
    """Return the Python expressions of ``values``, which lie in an object of the depth ``depth``. Return None if there
    are too many values, if their expressions are too long, or if one of them has no expression.
    """
    if len(values) > MOST_NUMBERS:
        return None
    parts, length = list[str](), 0
    for value in values:
        part = source_of(value, depth - 1)
        length += len(part or "")
        if part is None or length > _MOST_TEXT:
            return None
        parts.append(part)
    return parts


def _dict_source(value: dict[Any, Any], depth: int) -> str | None:
    """Return the Python expression for a dict, or None if it is too large or one of its keys or values has none."""
    keys, values = _sources_of_all(value, depth), _sources_of_all(value.values(), depth)
    if keys is None or values is None:
        return None
    return f"{{{', '.join(f'{k}: {v}' for k, v in zip(keys, values, strict=True))}}}"


def _array_source(value: Any) -> str | None:
    """Return the Python expression for a small NumPy array or scalar of numbers, and None for any other one."""
    if value.dtype.kind not in "biuf" or value.size > MOST_NUMBERS:
        return None
    return f"import_module('numpy').array({value.tolist()!r}, {value.dtype.str!r}).reshape({value.shape})[()]"


def _expression_of_address(value: Any) -> str | None:
    """Return the Python expression for an object that can be imported, or None if ``value`` is at no address."""
    module = getattr(value, "__module__", None) or "torch"  # torch's functions in C++ name no module
    for name in (getattr(value, "__qualname__", None), getattr(value, "__name__", None)):
        if module == "__main__" or not isinstance(module, str) or not isinstance(name, str):
            continue
        try:
            if object_at(f"{module}:{name}") is value:
                return address_expression(f"{module}:{name}")
        except Exception:  # a module may raise anything
            continue
    return None


def _instance_source(value: Any, kind: str, depth: int) -> str | None:
    """Return the Python expression for an instance of the class with the expression ``kind``. Return None if there is
    more to the instance than its attributes, if one of them has no expression, or if the class has a finalizer, which
    could free what another object still uses.
    """
    cls = type(value)
    plain = all(getattr(cls, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__new__"))
    if not plain or hasattr(cls, "__del__") or not hasattr(value, "__dict__"):
        return None
    if any(c.__dict__.get("__slots__") for c in cls.__mro__):
        return None
    attributes = _dict_source(vars(value), depth)
    return attributes and f"with_attributes({kind}, {attributes})"
