"""Packages that carry native code: SL308 to SL310."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class ShippingError(ShiplapError, RuntimeError):
    """A package that cannot be made, or whose native code cannot be used (SL308 to SL310)."""


register(
    ShippingError,
    [
        (
            "SL308",
            "native bindings cannot be added to the package",
            (
                "A native binding is stored in the package that declares the op. The kernel library of the op must be"
                " in the same package."
            ),
            "correct the problem that 'got' names, then run 'shiplap package' again",
        ),
        (
            "SL309",
            "an installed native binding cannot be used",
            (
                "The installed package contains a compiled binding for this op. That binding was built for another "
                "declaration, machine or version of Shiplap, or its file was modified. Shiplap ignores it."
            ),
            "install a wheel that 'shiplap package' made with the installed versions of the package and of shiplap",
        ),
        (
            "SL310",
            "the wheel cannot be read",
            (
                "A wheel is a zip file with one directory *.dist-info. The files WHEEL and RECORD in this directory "
                "describe the other files."
            ),
            "build the wheel again, and pass the path of the new file",
        ),
    ],
)
