"""The interface between an op and the native binding of its C ABI kernels.

The binding itself is ``shiplap.kernels.native.binding``. It builds, caches and attaches what is described here.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from shiplap.errors import ShiplapError


class NativeEntrance(ABC):
    """The functions that torch calls for an op that has native code now or had it before. They call that code or
    Python.
    """

    @abstractmethod
    def refusal(self, cause: Exception) -> ShiplapError | None:
        """Return the catalogue error behind the exception ``cause``. It is the error that native code recorded last on
        this thread. Return None if native code did not raise it.
        """


class NativeBinding(ABC):
    """The attached native code of an op, which torch calls in place of ``Op.execute``.

    Attributes:
        library: the file of the code.
    """

    library: Path

    @property
    def records(self) -> bool:
        """Whether native code also records calls for autograd, in place of Python. It is false by default."""
        return False

    @property
    @abstractmethod
    def devices(self) -> tuple[str, ...]:
        """The device types for which native code is attached."""

    @abstractmethod
    def release(self) -> None:
        """Make torch call Python instead of the native code, until native code is attached again."""

    @abstractmethod
    def update_choices(self) -> None:
        """Copy the tuned choices that apply now into the table of the native code, after they have changed. A choice is
        a kernel and compile-time values for given sizes.
        """


@dataclass(eq=False)  # one kernel's state is no other's, whatever the values
class NativeForm:
    """The C function behind a kernel, and the state of its native binding. It is one object for all configs of the
    kernel.

    Attributes:
        library: the declared path of its library. The library itself may lie in another folder.
        symbol: the name of the function in the library.
        strided: the arguments that it takes with any strides.
        align: the alignment in bytes that it needs of tensor addresses.
        signature: the digest of the C prototype for which the library must have been built.
        without_signature: whether the author has declared that the library contains no such digest.
        calls: the number of calls that Python has run. It is negative if calls are no longer counted.
        why: the reason why there is no native binding, or an empty string.
        place: the folder in which the native binding is built.
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
        """Return the C++ source of a kernel function that is generated into the native binding. Return an empty string
        if an opened library has the function.

        If ``packed`` is true, the source contains all compiled kernels of this process. Otherwise it contains none.
        """
        return ""

    @property
    def wanted(self) -> bool:
        """Whether the function is included when this machine builds native code (a binding) for other ops as well. It
        is true by default.
        """
        return True

    def missing(self) -> str:
        """Return, in words, the parts that a library of this function lacks for a program without Python. Return an
        empty string if there are none.
        """
        return ""

    def holds(self, config: tuple[int, ...]) -> bool:
        """Return whether a library of this function can run the compile-time values ``config`` in a program without
        Python. The default is True.
        """
        return True

    def connect(self, binding: ctypes.CDLL) -> None:
        """Take from ``binding``, an opened library that contains the function, the pointers that this kernel needs. The
        default does nothing.
        """

    @property
    def counting(self) -> bool:
        """Whether calls are still counted. After many calls, native code is attached."""
        return self.calls >= 0

    def settle(self, why: str = "") -> None:
        """Stop counting calls. If ``why`` is empty, native code has been attached. Otherwise it could not be attached,
        and ``why`` is the reason.
        """
        self.calls, self.why = -1, why

    def resume(self) -> None:
        """Start counting calls from 0, so that later calls may attach native code."""
        self.calls = 0
