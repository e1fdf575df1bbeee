"""What stands in a draft where ``sl.op`` or ``sl.adopt`` will stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from shiplap.errors import error


def unfinished(name: str, **declaration: object) -> Callable[[Callable[..., Any]], Unfinished]:
    """Stands where ``sl.op`` or ``sl.adopt`` will stand: the decorated draft of ``name`` raises SL113 when called."""
    return lambda fn: Unfinished(name, fn)


class Unfinished:
    """A drafted declaration. Nothing is registered, so nothing can rely on what has not been filled in."""

    def __init__(self, name: str, draft: Callable[..., Any]) -> None:
        self.name, self.__doc__, self.__module__ = name, draft.__doc__, draft.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise error("SL113", where=self.name, got="lines marked FILL", expected="a finished declaration")

    def kernel(self, device: str, implementation: Any = None, **keywords: Any) -> Any:
        """As ``Op.kernel``, without binding anything."""
        return (lambda fn: fn) if implementation is None else implementation

    def backward(self, fn: Any = None, **keywords: Any) -> Any:
        """As ``Op.backward``, without declaring anything."""
        return (lambda f: f) if fn is None else fn

    def samples(self, fn: Any) -> Any:
        """As ``Op.samples``, without declaring anything."""
        return fn
