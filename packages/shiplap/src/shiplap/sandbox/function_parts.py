"""The parts of a function that another function can replace: its code, its defaults, and the
functions in its closure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter, is_
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

from shiplap.sandbox.trusted_code import function_code
from shiplap.sandbox.trusted_objects import cell_content, is_trusted_replacement

_code, _defaults = attrgetter("__code__"), attrgetter("__defaults__")


class FunctionParts(NamedTuple):
    """The parts of one function at one time. All of them can be replaced while the function stays the same object.
    ``function`` is the object, ``code`` its code, and ``defaults`` and ``keywords`` its default values. ``held`` has
    each cell of its closure that holds a function, with that function.
    """

    function: Any  # typed Any, since mypy takes a function in a class for a method
    code: CodeType
    defaults: tuple[Any, ...] | None
    keywords: dict[str, Any] | None
    held: tuple[tuple[CellType, Callable[..., Any]], ...]

    @classmethod
    def of(cls, function: FunctionType) -> FunctionParts:
        """Return the record of the present code, defaults, keyword defaults and closure functions of ``function``."""
        keywords = function.__kwdefaults__
        cells = function.__closure__
        held = tuple((c, v) for c in cells if callable(v := cell_content(c))) if cells else ()
        return cls(function, function.__code__, function.__defaults__, dict(keywords) if keywords else None, held)

    def changed_part(self) -> str:
        """Return the name of the first part of the function that was replaced since the record was made, such as ``the
        code``. Return an empty string if there is none.

        A function in the closure that was replaced by another function of Python, torch or an installed package does
        not count.
        """
        now = self.function
        if now.__code__ is self.code and now.__defaults__ is self.defaults and not (self.keywords or self.held):
            return ""
        if function_code(now) is not self.code:
            return "the code"
        same = _same_objects(self.defaults or (), now.__defaults__ or ())
        if not same or (self.keywords is not None and not _same_items(self.keywords, now.__kwdefaults__ or {})):
            return "a default"
        lost = any(not is_trusted_replacement(value, cell_content(cell)) for cell, value in self.held)
        return "what is held" if lost else ""


class PlainFunctions(NamedTuple):
    """Functions without keyword defaults and without functions in their closures, with their codes and default values.
    Most functions are of this kind, and all of a class or module are compared by a few calls of C functions.
    """

    functions: tuple[FunctionType, ...]
    codes: tuple[CodeType, ...]
    defaults: tuple[tuple[Any, ...] | None, ...]

    @classmethod
    def of(cls, parts: Iterable[FunctionParts]) -> PlainFunctions:
        """Return the record of those functions of ``parts`` that have neither keyword defaults nor functions in their
        closures.
        """
        plain = [part for part in parts if not part.keywords and not part.held]
        return cls(
            tuple(part.function for part in plain),
            tuple(part.code for part in plain),
            tuple(part.defaults for part in plain),
        )

    @property
    def intact(self) -> bool:
        """Whether each function still has the same code object and the same tuple of default values."""
        return all(map(is_, map(_code, self.functions), self.codes)) and all(
            map(is_, map(_defaults, self.functions), self.defaults)
        )


def _same_objects(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Return whether two tuples hold the same objects (by ``is``) in the same order."""
    return len(before) == len(now) and all(map(is_, before, now))


def _same_items(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether two dictionaries hold the same objects (by ``is``) under the same keys."""
    return len(before) == len(now) and all(now.get(key, before) is value for key, value in before.items())
