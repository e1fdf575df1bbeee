"""``functools.cached_property`` without its lock.

Up to Python 3.11 one lock of the class is held while a value is computed. A child that is forked meanwhile finds it
held by a thread that it does not have, and its first look at the property hangs for ever. Without a lock two threads
may compute the same value, and either one is kept: the properties here are functions of what does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")


class cached_property(Generic[_T]):
    """A property that is computed at the first read and stored as an attribute of the instance."""

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        """Store ``compute``, the decorated method, with its name and docstring."""
        self.compute, self.name = compute, compute.__name__
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        """Store the name under which ``owner`` defines the property. It is the key of the cached value in each
        instance's ``__dict__``.
        """
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> cached_property[_T]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> _T: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> cached_property[_T] | _T:
        """Return the property itself if it is read from the class. For an instance return the cached value, which is
        computed and stored in its ``__dict__`` at the first read.
        """
        if instance is None:
            return self
        # If two threads compute the value, both return the one that was stored first.
        value: _T = vars(instance).setdefault(self.name, self.compute(instance))
        return value
