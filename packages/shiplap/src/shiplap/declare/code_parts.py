"""The parts of an object that hold an author's code, for the walk over all that the code uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TypeAlias

AnyValue: TypeAlias = Any  # an author's code may hold a value of any type


class HasCode(ABC):
    """An object of Shiplap that holds an author's code: an op, a kernel, a template, a gradient."""

    @abstractmethod
    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield the parts of the object that decide its behaviour: a text, and a value that the walk follows (None
        where the text says everything).
        """
