"""The parts of an object that hold an author's code, for the walk over all that the code uses."""

from __future__ import annotations

import hashlib
from abc import ABCMeta, abstractmethod
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, ClassVar, TypeAlias

import torch

AnyValue: TypeAlias = Any  # an author's code may hold a value of any type


class _ListsPublicNames(ABCMeta):
    """A metaclass for classes that have internal names. ``dir()`` of such a class lists only names that begin with an
    underscore and those in ``_public_names``. Completion in a shell therefore shows no internal name.

    Python's shell looks at the bases of a class one by one, so each of them needs this metaclass.
    """

    _public_names: frozenset[str]

    def __dir__(cls) -> list[str]:
        """Return the names with an underscore and those in ``_public_names``."""
        return sorted(n for n in super().__dir__() if n.startswith("_") or n in cls._public_names)


class HasCode(metaclass=_ListsPublicNames):
    """An object of Shiplap that holds an author's code, such as an op, a kernel, a template or a gradient."""

    _public_names: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield ``(text, value)`` for each property on which the behaviour of the object depends. ``text`` becomes a
        part of the object's digest. ``value`` is an object whose code becomes a part of it as well, or None.
        """


def applied_class(value: AnyValue) -> type[torch.autograd.Function] | None:
    """Return the subclass of ``torch.autograd.Function`` whose method ``apply`` is ``value``, or None for another
    value.
    """
    # Since torch 2.15 the method is a compiled function with the class as its object.
    if not isinstance(value, (MethodType, BuiltinFunctionType)) or value.__name__ != "apply":
        return None
    owner = value.__self__
    return owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else None


def defining_module(value: AnyValue) -> str:
    """Return the name of the module in which a function or class was written. For a function it is read from the
    function's globals, since a decorator may have changed ``__module__``. Return an empty string if there is no name.
    """
    if isinstance(value, FunctionType):
        name = value.__globals__.get("__name__")
    else:
        name = getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""


def closure_cell_value(cell: AnyValue) -> AnyValue:
    """Return the value of a closure's cell, or None if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def instance_dict(value: AnyValue) -> dict[str, AnyValue]:
    """Return a copy of an object's ``__dict__``. Return an empty dict if there is none."""
    try:
        return dict(vars(value))
    except Exception:  # an object that stands for another may raise any error where it has no attribute
        return {}


def shortened_text(text: str) -> str:
    """Return a text of fewer than 400 characters unchanged. For a longer text, return its SHA-256 digest in hexadecimal
    digits.
    """
    return text if len(text) < 400 else hashlib.sha256(text.encode()).hexdigest()
