"""Arguments that have one of a few values, and results that are a tuple of one. Torch's schemas have neither.

``Literal["sum", "mean"]`` and classes derived from ``Enum`` are a ``str`` or an ``int`` in the schema of the op. A
caller passes members. Torch, graphs and C kernels pass their values, and the author's functions get members again.
Torch has no tuple of one result either. The op returns the tensor, and the call in Python makes a tuple of it.
"""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.values import Args, Value
from shiplap.errors import error


@dataclass(frozen=True)
class Choices:
    """The values to which an annotation restricts an argument.

    Attributes:
        scalar: the type of the values, ``"int"`` or ``"str"``.
        values: the values in order.
        members: the class derived from ``Enum``, or None for a ``Literal``.
        optional: whether the argument may also be None.
    """

    scalar: Literal["int", "str"]
    values: tuple[int | str, ...]
    members: type[enum.Enum] | None
    optional: bool


def read_choices(annotation: object) -> Choices | None:
    """Return the values to which an ``Enum`` or ``Literal`` annotation restricts an argument. Return None for any other
    annotation. Return None also if the values are neither all strings nor all ints, or if a string has a null
    character.
    """
    members, listed = None, _literals(annotation)
    # Members of a Flag can be combined, so that their values are no complete list.
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum) and not issubclass(annotation, enum.Flag):
        members, listed = annotation, [member.value for member in annotation]
    values = tuple(dict.fromkeys(v for v in listed if v is not None))
    for kind, scalar in ((str, "str"), (int, "int")):
        # Types are compared exactly, since a bool is an int to isinstance.
        if values and all(type(v) is kind for v in values) and not any("\0" in v for v in values if kind is str):
            return Choices(typing.cast("Literal['int', 'str']", scalar), values, members, None in listed)
    return None


def _literals(annotation: object) -> list[Any]:
    """Return the values of ``Literal[...]``, or of a union of several such annotations. The list is empty for any other
    annotation.
    """
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return list(parts)
    if origin in (typing.Union, types.UnionType) and all(typing.get_origin(p) is Literal for p in parts):
        return [value for part in parts for value in typing.get_args(part)]
    return []


def to_value(arg: Arg, given: Any) -> Any:
    """Return the value that the torch schema carries for ``given``. If the argument is declared with an ``Enum`` and
    ``given`` is a member of it, return the member's value. Otherwise return ``given`` unchanged.
    """
    return given.value if arg.members is not None and isinstance(given, arg.members) else given


def to_member(arg: Arg, value: Any) -> Any:
    """Return the ``Enum`` member that the author's functions receive for a schema value. If the argument is not
    declared with an ``Enum``, return the value unchanged.
    """
    if arg.members is None or value is None or isinstance(value, arg.members):
        return value
    return arg.members(value)


def to_values(spec: OpSpec, args: Sequence[Any]) -> Args:
    """Return ``args``, given in declared order, as a tuple in which each ``Enum`` member is replaced by its value. The
    torch schema of the op carries that value.
    """
    return tuple([to_value(arg, given) for arg, given in zip(spec.args, args, strict=False)])


def to_members(spec: OpSpec, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values``, sizes and scalars by name, as the author's functions receive them. Each value of an ``Enum``
    argument is replaced by the member with that value.
    """
    named = spec.enumerated
    return {name: to_member(named[name], v) if name in named else v for name, v in values.items()}


def convert_call(spec: OpSpec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Value], dict[str, Value]]:
    """Return ``(positional, keywords)`` of a call, a new list and a new dict, with each ``Enum`` member replaced by its
    value.
    """
    named = spec.enumerated
    keywords = {name: to_value(named[name], v) if name in named else v for name, v in kwargs.items()}
    return [*to_values(spec, args), *args[len(spec.args) :]], keywords


def takes_members(spec: OpSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the author's ``function`` with ``Enum`` members in place of their values. Arguments
    that are members already are passed unchanged. If the op has no ``Enum`` argument, return ``function`` itself.
    """
    if not spec.enumerated or not callable(function):
        return function
    names = list(inspect.signature(function).parameters)
    places = [(i, spec.enumerated[name]) for i, name in enumerate(names) if name in spec.enumerated]

    @wraps(function)  # digests and audits read the code of the author
    def called(*args: Any, **kwargs: Any) -> Any:
        """Return the result of the author's function, called with ``Enum`` members in place of their schema values."""
        values = list(args)
        for i, arg in places:
            if i < len(values):
                values[i] = to_member(arg, values[i])
            elif arg.name in kwargs:
                kwargs[arg.name] = to_member(arg, kwargs[arg.name])
        return function(*values, **kwargs)

    return called


def gives_result(spec: OpSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the author's ``function`` with ``Enum`` members in place of their values. If the
    result of the op is annotated ``tuple[T]``, the returned function unpacks the only element of the tuple.

    It returns None if ``function`` returns None, which means that ``function`` has filled its outputs. It raises
    ``SL301`` if ``function`` returns anything but None or a tuple of one element.
    """
    function = takes_members(spec, function)
    if not spec.single_tuple:
        return function

    @wraps(function)
    def returned(*args: Any, **kwargs: Any) -> Any:
        """Return the only element of the tuple that the author's function returns, or None if it returns None. Raise
        ``SL301`` for any other result.
        """
        result = function(*args, **kwargs)
        # An out-style function returns nothing, as it has filled its outputs.
        if result is None:
            return None
        if not isinstance(result, tuple) or len(result) != 1:
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
            fix = "return (result,), or annotate the result without tuple[...]"
            raise error("SL301", where=f"{spec.name}, return", got=got, expected="a tuple of one", fix=fix)
        return result[0]

    return returned
