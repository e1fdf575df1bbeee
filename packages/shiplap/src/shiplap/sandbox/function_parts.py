"""What a function consists of: its code, the values that it takes by default, and the functions that it holds."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

from shiplap.sandbox.trusted_code import code_of, is_theirs


class Parts(NamedTuple):
    """These parts at one time. Anybody may exchange them, and the function stays the same object."""

    function: Any  # mypy takes a function for a method
    code: CodeType
    defaults: tuple[Any, ...] | None
    keywords: dict[str, Any] | None
    held: tuple[tuple[CellType, Callable[..., Any]], ...]

    @classmethod
    def of(cls, function: FunctionType) -> Parts:
        keywords = function.__kwdefaults__
        cells = function.__closure__
        held = tuple((c, v) for c in cells if callable(v := _content(c))) if cells else ()
        return cls(function, function.__code__, function.__defaults__, dict(keywords) if keywords else None, held)

    def changed(self) -> str:
        """The part that is another one now, if any. What it holds may be replaced by functions of Python or torch."""
        now = self.function
        if now.__code__ is self.code and now.__defaults__ is self.defaults and not (self.keywords or self.held):
            return ""  # as most of them
        if code_of(now) is not self.code:
            return "the code"
        same = _alike(self.defaults or (), now.__defaults__ or ())
        if not same or (self.keywords is not None and not _same_items(self.keywords, now.__kwdefaults__ or {})):
            return "a default"
        lost = any(_content(cell) is not value and not is_theirs(_content(cell)) for cell, value in self.held)
        return "what is held" if lost else ""


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is assigned yet
        return None


def _alike(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))


def _same_items(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return len(before) == len(now) and all(now.get(key, before) is value for key, value in before.items())
