"""The types of keyword values of declarations and kernels, compared with their annotations before any value is used."""

from __future__ import annotations

import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache, wraps
from types import NoneType, UnionType
from typing import ParamSpec, SupportsIndex, TypeVar

from shiplap.errors import ShiplapError, error

P = ParamSpec("P")
R = TypeVar("R")
AnyMapping = Mapping[str, object]
# What errors call a value of an annotation, and how its fix writes one.
_FORMS: dict[object, tuple[str, str]] = {
    str: ("a text", '"..."'),
    bool: ("True or False", "True"),
    int: ("a whole number", "1"),
    os.PathLike[str]: ("a path", '"..."'),
    Iterable[str]: ("a text or a list of texts", '("...",)'),
    Iterable[str | os.PathLike[str]]: ("a list of paths", '("...",)'),
    Mapping[str, str]: ("a dict from texts to texts", '{"...": "..."}'),
    AnyMapping: ("a dict", '{"...": ...}'),
}
# Values of keywords that say more than those of their types.
_EXAMPLES = {
    "bounds": '{"m": "n"}',
    "dims": '{"m": "2 * n"}',
    "dtypes": '("float32",)',
    "fake": '"reference"',
    "files": '"kernel.cpp"',
    "requires": '"n > 0"',
    "workspace": '"4 * n"',
}


def unknown_keyword_error(where: str, keyword: str, known: Iterable[str]) -> ShiplapError:
    """Return the error ``SL140`` for ``keyword``, which is none of the keywords ``known``. If one of them is spelt
    alike, the fix names it.
    """
    names = list(known)
    close = get_close_matches(keyword, names)
    fix = f"write {close[0]}=" if close else ""
    return error("SL140", where=where, got=f"{keyword}=", expected=", ".join(names), fix=fix)


def check_value(where: str, keyword: str, value: object, annotation: object) -> None:
    """Raise ``SL140`` if ``value``, given for ``keyword``, is not of the type ``annotation``. Only texts, paths, bools,
    ints, lists of texts or paths, dicts, and unions of these and None are compared. For any other annotation nothing
    is raised.
    """
    united = typing.get_origin(annotation) in (typing.Union, UnionType)
    kinds = typing.get_args(annotation) if united else (annotation,)
    kinds = tuple(AnyMapping if typing.get_origin(k) is Mapping and k not in _FORMS else k for k in kinds)
    if any(kind not in _FORMS and kind is not NoneType for kind in kinds) or any(_fits(value, k) for k in kinds):
        return
    forms = [_FORMS[kind] for kind in kinds if kind in _FORMS]
    # A list of texts may be one text, too, which is said once.
    forms = [form for form in forms if not any(form[0] in other[0] for other in forms if other is not form)]
    raise error(
        "SL140",
        what="a keyword has a value of another type",
        where=where,
        got=f"{keyword}={value!r}"[:120],
        expected=" or ".join([name for name, _ in forms]),
        fix=f"write {keyword}={_EXAMPLES.get(keyword, forms[0][1])}, in this form",
    )


def _fits(value: object, kind: object) -> bool:
    """Return whether ``value`` is of the type ``kind``, a key of ``_FORMS`` or the type of None. The elements of an
    iterator are not looked at, since that would use them up.
    """
    if kind in (str, bool, NoneType):
        return isinstance(value, typing.cast(type, kind))
    if kind is int:
        return isinstance(value, SupportsIndex) and not isinstance(value, bool)
    if kind == os.PathLike[str]:
        return isinstance(value, os.PathLike)
    if kind == AnyMapping:
        return isinstance(value, Mapping)
    if kind == Mapping[str, str]:
        return isinstance(value, Mapping) and all(isinstance(x, str) for pair in value.items() for x in pair)
    if isinstance(value, Iterator):
        return True
    element = str if kind == Iterable[str] else (str, os.PathLike)
    try:
        return isinstance(value, Iterable) and all(isinstance(x, element) for x in value)
    except TypeError:  # of a tensor without dims, which says that it is iterable
        return False


@cache
def annotations_of(described: type | Callable[..., object]) -> Mapping[str, object]:
    """Return the evaluated annotations of a typed dict or of a function, by name. Annotations of a function with names
    that only a type checker imports are left out.
    """
    try:
        return typing.get_type_hints(described)
    except NameError:
        found = {}
        for name, text in inspect.get_annotations(described).items():
            with suppress(NameError):
                found[name] = eval(text, vars(sys.modules[described.__module__])) if isinstance(text, str) else text
        return found


def require_callable(where: str, value: object) -> None:
    """Raise ``SL501`` unless ``value``, which ``where`` calls itself, is a function, a module or another callable."""
    if not callable(value):
        call = f"{where.removesuffix('()')}(f, x)"
        raise error(
            "SL501",
            where=where,
            what="the first argument cannot be called",
            got=f"a {type(value).__name__}",
            expected="a function or a module, and its arguments after it",
            fix=f"pass the function f and its arguments, not the result f(x): {call}",
        )


def with_checked_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which users call as ``sl.<name>``, behind a check of its arguments. The check raises
    ``SL140`` for arguments that do not fit the signature, and for keywords with a value of another type.
    """
    signature, where = inspect.signature(function), f"sl.{function.__name__}(...)"

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        """Check the arguments of ``function``, and call it."""
        for keyword in kwargs:
            if keyword not in signature.parameters:
                raise unknown_keyword_error(where, keyword, signature.parameters)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as e:
            what = "the arguments do not fit the signature"
            absent = re.search(r"missing a required argument: '(\w+)'", str(e))
            fix = f"pass {absent[1]} as well" if absent else "pass the arguments that 'expected' lists, each once"
            expected = f"{function.__name__}({', '.join(map(str, signature.parameters))})"
            raise error("SL140", what=what, where=where, got=str(e), expected=expected, fix=fix) from None
        hints = annotations_of(function)
        for name, value in given.items():
            check_value(where, name, value, hints.get(name))
        return function(*args, **kwargs)

    return checked
