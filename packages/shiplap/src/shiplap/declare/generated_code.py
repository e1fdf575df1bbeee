"""The printer of generated Python functions, which every fast path uses. A text is compiled once, and run by name.

Generated text names its values in a scope, so that no value has to be written as text. Each text gets an origin, such
as ``<bind ns::op>``, which tracebacks and profiles show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from types import CodeType
from typing import Any

MOST_COMPILED_TEXTS = 1024  # kept: an op has a few, and calls of new sizes often need one of them again


def define_function(name: str, lines: Iterable[str], origin: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """Return the function ``name`` that the Python source ``lines`` define. ``scope`` holds their globals, and
    ``origin`` is the file name in tracebacks.
    """
    exec(_compiled_text("\n".join(lines), f"<{origin}>", "exec"), scope)
    made: Callable[..., Any] = scope[name]
    return made


def define_lambda(text: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that the Python source ``text``, a lambda expression, defines. ``scope`` holds its globals.
    Equal texts are compiled once.
    """
    made: Callable[..., Any] = eval(_compiled_text(text, "<lambda>", "eval"), scope)
    return made


@lru_cache(MOST_COMPILED_TEXTS)
def _compiled_text(text: str, file: str, mode: str) -> CodeType:
    """Return the code of the Python source ``text`` for ``exec`` or ``eval``, as ``mode`` states. ``file`` is its file
    name in tracebacks.
    """
    # To compile a text takes longer than the launch of a kernel, and calls of other sizes often have the same text.
    made: CodeType = compile(text, file, mode)
    return made


def tuple_source(parts: Iterable[str]) -> str:
    """Return the Python source of a tuple of the expressions ``parts``. ``parts`` may be empty."""
    return f"({''.join(f'{part}, ' for part in parts)})"


def either_source(conditions: Iterable[str]) -> str:
    """Return the Python source of the condition that at least one of ``conditions`` holds. If there are none, it is
    ``False``.
    """
    return " or ".join(conditions) or "False"
