"""Arguments that take one of a few values, and results that are a tuple of one: signatures that no schema has.

``Literal["sum", "mean"]`` and classes derived from ``Enum`` are a ``str`` or an ``int`` in the schema of the op. A
caller passes members, torch, graphs and C kernels pass their values, and the author's functions get members again.
Torch has no tuple of one result either: the op returns the tensor, and the call in Python makes a tuple of it.
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
    """The values of an annotation, in order; ``members`` is the class if it is an ``Enum``."""

    scalar: Literal["int", "str"]
    values: tuple[int | str, ...]
    members: type[enum.Enum] | None
    optional: bool


def read_choices(annotation: object) -> Choices | None:
    """Return the choices of an annotation, or None if it has none that a schema can carry."""
    members, listed = None, _literals(annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum) and not issubclass(annotation, enum.Flag):
        members, listed = annotation, [member.value for member in annotation]
    values = tuple(dict.fromkeys(v for v in listed if v is not None))
    for kind, scalar in ((str, "str"), (int, "int")):
        if values and all(type(v) is kind for v in values) and not any("\0" in v for v in values if kind is str):
            return Choices(typing.cast("Literal['int', 'str']", scalar), values, members, None in listed)
    return None


def _literals(annotation: object) -> list[Any]:
    """Return the values of ``Literal[...]``, or of a union of such."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return list(parts)
    if origin in (typing.Union, types.UnionType) and all(typing.get_origin(p) is Literal for p in parts):
        return [value for part in parts for value in typing.get_args(part)]
    return []


def to_value(arg: Arg, given: Any) -> Any:
    """Return the value in the schema of what a caller passes: that of a member of the class, all else as it is."""
    return given.value if arg.members is not None and isinstance(given, arg.members) else given


def to_member(arg: Arg, value: Any) -> Any:
    """Return what the author's functions get for a value of the schema."""
    if arg.members is None or value is None or isinstance(value, arg.members):
        return value
    return arg.members(value)


def to_values(spec: OpSpec, args: Sequence[Any]) -> Args:
    """Return arguments in declared order with the values of members."""
    return tuple([to_value(arg, given) for arg, given in zip(spec.args, args, strict=False)])


def to_members(spec: OpSpec, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes and scalars by name with members in place of their values."""
    named = spec.enumerated
    return {name: to_member(named[name], v) if name in named else v for name, v in values.items()}


def convert_call(spec: OpSpec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Value], dict[str, Value]]:
    """Return the arguments of a call with the values of members."""
    named = spec.enumerated
    keywords = {name: to_value(named[name], v) if name in named else v for name, v in kwargs.items()}
    return [*to_values(spec, args), *args[len(spec.args) :]], keywords


def takes_members(spec: OpSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an author's ``function`` of arguments of the op as a function that also takes the values of members."""
    if not spec.enumerated or not callable(function):
        return function
    names = list(inspect.signature(function).parameters)
    places = [(i, spec.enumerated[name]) for i, name in enumerate(names) if name in spec.enumerated]

    @wraps(function)  # digests and audits read the code of the author
    def called(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        for i, arg in places:
            if i < len(values):
                values[i] = to_member(arg, values[i])
            elif arg.name in kwargs:
                kwargs[arg.name] = to_member(arg, kwargs[arg.name])
        return function(*values, **kwargs)

    return called


def gives_result(spec: OpSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an author's ``function``, which returns a tuple of one, as a function that returns its element.

    SL301 is raised where ``function`` returns anything else but None, which stands for outputs that it has filled.
    """
    function = takes_members(spec, function)
    if not spec.single_tuple:
        return function

    @wraps(function)
    def returned(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if result is None:
            return None
        if not isinstance(result, tuple) or len(result) != 1:
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
            fix = "return (result,), or annotate the result without tuple[...]"
            raise error("SL301", where=f"{spec.name}, return", got=got, expected="a tuple of one", fix=fix)
        return result[0]

    return returned
