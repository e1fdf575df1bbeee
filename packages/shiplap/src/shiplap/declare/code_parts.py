"""The parts of an object that hold an author's code, for the walk over all that the code uses."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, TypeAlias

AnyValue: TypeAlias = Any  # an author's code may hold a value of any type


class _ListsPublicNames(ABCMeta):
    """The type of classes whose ``dir()``, and so completion in a shell, shows ``_public_names`` and no internal name.

    Python's shell looks at the bases of a class one by one, so that the list has to hold for each of them.
    """

    _public_names: frozenset[str]

    def __dir__(cls) -> list[str]:
        return sorted(n for n in super().__dir__() if n.startswith("_") or n in cls._public_names)


class HasCode(metaclass=_ListsPublicNames):
    """An object of Shiplap that holds an author's code: an op, a kernel, a template, a gradient."""

    _public_names: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield the parts of the object that decide its behaviour: a text, and a value that the walk follows (None
        where the text says everything).
        """
