"""The printer of generated Python functions, which every fast path uses. A text is compiled once, and run by name.

Generated text names its values in a scope, so that no value has to be written as text. Each text gets an origin, such
as ``<bind ns::op>``, which tracebacks and profiles show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def define_function(name: str, lines: Iterable[str], origin: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """Return the function ``name`` that the Python source ``lines`` define. ``scope`` holds their globals, and
    ``origin`` is the file name in tracebacks.
    """
    exec(compile("\n".join(lines), f"<{origin}>", "exec"), scope)
    made: Callable[..., Any] = scope[name]
    return made


def tuple_source(parts: Iterable[str]) -> str:
    """Return the Python source of a tuple of the expressions ``parts``. ``parts`` may be empty."""
    return f"({''.join(f'{part}, ' for part in parts)})"


def either_source(conditions: Iterable[str]) -> str:
    """Return the Python source of the condition that at least one of ``conditions`` holds. If there are none, it is
    ``False``.
    """
    return " or ".join(conditions) or "False"
