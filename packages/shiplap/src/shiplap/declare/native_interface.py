"""The interface between an op and the native binding of its C ABI kernels.

The binding itself is ``shiplap.kernels.native.binding``: it builds, caches and attaches what is described here.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from shiplap.errors import ShiplapError


class NativeEntrance(ABC):
    """The functions that torch calls for an op that has had native code. They lead to that code or to Python."""

    @abstractmethod
    def refusal(self, cause: Exception) -> ShiplapError | None:
        """Return the catalogue error that native code meant by the exception ``cause``: the error that it recorded last
        on this thread. None if native code did not raise it.
        """


class NativeBinding(ABC):
    """The attached native code of an op, which torch calls in place of ``Op.execute``.

    Attributes:
        library: the file of the code.
    """

    library: Path

    @property
    def records(self) -> bool:
        """Whether native code also records calls for autograd, in place of Python. False by default."""
        return False

    @property
    @abstractmethod
    def devices(self) -> tuple[str, ...]:
        """The device types for which native code is attached."""

    @abstractmethod
    def release(self) -> None:
        """Let torch call Python instead of the native code, until native code is attached again."""

    @abstractmethod
    def update_choices(self) -> None:
        """Copy the tuned choices (kernel and compile-time values by size) that now apply into the table of the native
        code, after they have changed.
        """


@dataclass(eq=False)  # one kernel's state is no other's, whatever the values
class NativeForm:
    """The C function behind a kernel, and the state of its native binding. All configs share it.

    Attributes:
        library: path of its library, to be located. ``symbol``: the function's name there.
        strided: arguments that it takes with any strides. ``align``: bytes. What it asks of addresses.
        signature: the stamp of the prototype that the library must have been built with.
        without_signature: whether the author has said that the library has no stamp.
        calls: how many Python has served, less than 0 once nobody counts: attached, refused or held.
        why: why there is no native binding, if so. ``place``: the folder of the library that is built.
    """

    library: Path
    symbol: str
    strided: frozenset[str]
    align: int
    signature: str
    without_signature: bool = False
    calls: int = 0
    why: str = ""
    place: Path = Path()

    generated: ClassVar[bool] = False  # the function is part of the binding, which :meth:`source` has; no library

    def source(self, packed: bool = False) -> str:
        """Return the C++ source of a kernel function that is generated into the native binding, or an empty text if an
        opened library has it.

        With ``packed`` it contains all that this process has compiled.
        """
        return ""

    @property
    def wanted(self) -> bool:
        """Whether the function is included in a binding that this machine builds for other ops. True by default."""
        return True

    def missing(self) -> str:
        """Return, in words, the parts that a library of this function lacks for a program without Python. Empty if
        none.
        """
        return ""

    def holds(self, config: tuple[int, ...]) -> bool:
        """Whether a library of this function can run the compile-time values ``config`` in a program without Python.
        True by default.
        """
        return True

    def connect(self, binding: ctypes.CDLL) -> None:
        """Take from ``binding``, an opened library that contains the function, the pointers that this kernel needs. The
        default does nothing.
        """

    @property
    def counting(self) -> bool:
        """Whether calls are still counted, so that native code is attached once they are many."""
        return self.calls >= 0

    def settle(self, why: str = "") -> None:
        """Stop counting calls, because native code is attached, or cannot be for the reason ``why``."""
        self.calls, self.why = -1, why

    def resume(self) -> None:
        """Start counting calls from 0, so that later calls may attach native code."""
        self.calls = 0
