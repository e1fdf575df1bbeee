"""The decorator that stands in a draft in place of ``sl.op`` or ``sl.adopt``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from shiplap.errors import error


def unfinished(name: str, **declaration: object) -> Callable[[Callable[..., Any]], UnfinishedOp]:
    """Return a decorator for a draft, in place of ``sl.op`` or ``sl.adopt``. It returns an :class:`UnfinishedOp` called
    ``name``, which raises ``SL113`` when it is called. ``declaration`` is ignored.
    """
    return lambda fn: UnfinishedOp(name, fn)


class UnfinishedOp:
    """A drafted declaration that has lines to fill in. It is not registered in torch, and each call raises
    ``SL113``.
    """

    def __init__(self, name: str, draft: Callable[..., Any]) -> None:
        """Take the name of the op, and the docstring and module of the drafted function."""
        self.name, self.__doc__, self.__module__ = name, draft.__doc__, draft.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``SL113``, since the declaration has lines to fill in."""
        raise error("SL113", where=self.name, got="lines marked FILL", expected="a finished declaration")

    def kernel(self, device: str, implementation: Any = None, **keywords: Any) -> Any:
        """Accept the arguments of ``Op.kernel`` without binding a kernel. Return ``implementation``. If it is None,
        return a decorator that returns the function that it decorates.
        """
        return (lambda fn: fn) if implementation is None else implementation

    def backward(self, fn: Any = None, **keywords: Any) -> Any:
        """Accept the arguments of ``Op.backward`` without declaring a gradient. Return ``fn``. If it is None, return a
        decorator that returns the function that it decorates.
        """
        return (lambda f: f) if fn is None else fn

    def samples(self, fn: Any) -> Any:
        """Accept the argument of ``Op.samples`` without declaring samples, and return the function."""
        return fn
