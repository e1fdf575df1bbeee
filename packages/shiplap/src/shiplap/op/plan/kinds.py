"""What kind of value each argument is: torch's dispatcher asks, and this says it in the words of the declaration."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiplap.errors import ShiplapError, error
from shiplap.op.plan.rule import TRUE, Rule
from shiplap.op.plan.term import Term, Text
from shiplap.op.spec import Arg, OpSpec
from shiplap.op.values import Value


def is_int(value: object) -> bool:
    """Whatever is an index of 64 bits: NumPy's integers too, and real tensors without dims."""
    if isinstance(value, torch.SymInt):
        return True
    if not hasattr(value, "__index__") or (isinstance(value, Tensor) and (value.dim() or value.is_complex())):
        return False
    return _becomes(value, int if isinstance(value, Tensor) else operator.index)


def is_float(value: object) -> bool:
    """Whatever is a number: NumPy's, and real tensors of one element."""
    if isinstance(value, (float, torch.SymFloat, torch.SymInt)):
        return True
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return False
    return not (isinstance(value, Tensor) and value.is_complex()) and _becomes(value, float)


def _becomes(value: object, number: Callable[[Any], float]) -> bool:
    """Whether ``number`` takes ``value``: arrays and tensors have its method whatever they hold."""
    try:
        return not too_large(number(value))
    except (ArithmeticError, RuntimeError, TypeError, ValueError):
        return False


def is_text(value: object) -> bool:
    """What UTF-8 can encode: torch hands it over in that form."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_bool(value: object) -> bool:
    return isinstance(value, (bool, torch.SymBool))


def too_large(value: object) -> bool:
    return type(value) is int and not -(2**63) <= value < 2**63


def kind_of(value: object) -> str:
    """What an error calls the value."""
    if value is None:
        return "None"
    if too_large(value):
        return "int beyond 64 bits"
    if isinstance(value, str) and not (value.isascii() or is_text(value)):
        return "str that UTF-8 cannot encode"
    return type(value).__name__


# By the word for an element: the class that fits, if all its values do, and the question for other values.
_ELEMENTS: dict[str, tuple[type | None, Callable[[object], bool]]] = {
    "int": (int, is_int),
    "float": (float, is_float),
    "bool": (bool, is_bool),
    "str": (None, is_text),
    "complex": (complex, lambda value: isinstance(value, complex) or is_float(value)),
    "Scalar": (float, lambda value: isinstance(value, complex) or is_bool(value) or is_float(value)),
    "dtype": (torch.dtype, lambda value: isinstance(value, torch.dtype)),
    "device": (torch.device, lambda value: isinstance(value, (torch.device, str))),
    "layout": (torch.layout, lambda value: isinstance(value, torch.layout)),
    "memory_format": (torch.memory_format, lambda value: isinstance(value, torch.memory_format)),
    "Generator": (torch.Generator, lambda value: isinstance(value, torch.Generator)),
    "tensor": (Tensor, lambda value: isinstance(value, Tensor)),
}


def mismatch(arg: Arg, value: object) -> str:
    """Empty when ``value`` is what ``arg`` declares, else what it is."""
    if value is None:
        return "" if arg.optional else "None"
    scalar = arg.scalar or "tensor"
    listed = arg.many or scalar.startswith("list[")
    if arg.cls is not None:
        return "" if isinstance(value, arg.cls) else kind_of(value)
    plain, fits = _ELEMENTS[scalar[5:-1] if listed and arg.scalar else scalar]
    if not listed:
        elements: Sequence[object] = (value,)
    elif isinstance(value, (list, tuple)):
        elements = value
    else:
        return kind_of(value)
    if arg.length and len(elements) != arg.length:
        return f"{type(value).__name__} of {len(elements)}"
    for element in elements:
        if element is None and arg.absent:
            continue
        usual = type(element) is plain and (not isinstance(element, int) or -(2**63) <= element < 2**63)
        if not usual and not fits(element):
            return kind_of(element) + (f" in a {type(value).__name__}" if listed else "")
    return ""


@dataclass(frozen=True)
class IsKind(Rule):
    """An argument is a tensor, a number or a list, as its annotation says."""

    op: str
    arg: Arg

    id = "SL209"
    cpp_by = "the dispatcher, and tvm-ffi's Arguments, which convert each value or refuse it"

    def holds(self) -> Term:
        return Term("not mismatch(arg, value)", TRUE.cpp)

    def where(self) -> Text:
        return (f"{self.op}, argument '{self.arg.name}'",)

    def got(self) -> Text:
        return (Term("mismatch(arg, value)", ""),)

    def expected(self) -> Text:
        size = f"{self.arg.length} " if self.arg.length else ""
        member = str(self.arg.tensor) + " or None" * self.arg.absent
        kind = f"list of {size}{member}" if self.arg.many else str(self.arg.tensor or self.arg.kind)
        kind += f" of length {size}".rstrip() if size and not self.arg.many else ""
        return (kind + (" or None" if self.arg.optional else ""),)

    def broken(self, got: str) -> ShiplapError:
        """The error for a value that is a ``got``."""
        return error(self.id, where=f"{self.op}, argument {self.arg.name!r}", got=got, expected=str(self.expected()[0]))


def arranged(spec: OpSpec, schema: str, args: Sequence[Value], kwargs: Mapping[str, Value]) -> dict[str, Value]:
    """Each argument that was given, by name. SL209 in the words of Python for too many, too few or unknown ones."""
    values: dict[str, Value] = {}
    missing = ""
    for index, arg in enumerate(spec.args):
        name, by_name = arg.name, arg.name in kwargs
        if index < len(args) and not arg.keyword_only:
            values[name] = args[index]
            if by_name:
                raise _unlike(spec, schema, f"multiple values for argument {name!r}")
        elif by_name:
            values[name] = kwargs[name]
        elif arg.default is ... and not missing:
            missing = name
        if (index < len(args) and arg.keyword_only) or index + 1 == len(spec.args) < len(args):
            raise _unlike(spec, schema, "too many positional arguments")
    if missing:
        raise _unlike(spec, schema, f"missing a required argument: {missing!r}")
    for name in kwargs:
        if name not in values:
            raise _unlike(spec, schema, f"an unexpected keyword argument {name!r}")
    return values


def _unlike(spec: OpSpec, schema: str, got: str) -> ShiplapError:
    what, fix = "the arguments do not fit the signature", "pass the arguments that 'expected' lists, each once"
    return error("SL209", where=spec.name, what=what, got=got, expected=schema, fix=fix)
