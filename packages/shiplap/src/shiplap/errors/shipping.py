"""Packages that carry native code: SL308 to SL310."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register

__all__ = ["ShippingError"]


class ShippingError(ShiplapError, RuntimeError):
    """A package that cannot be made, or whose native code cannot be used (SL308 to SL310)."""


register(
    ShippingError,
    [
        (
            "SL308",
            "the package cannot be given native code",
            "Native bindings lie in the package that declares the ops, beside their kernel libraries.",
            "correct what 'got' names, then run 'shiplap package' again",
        ),
        (
            "SL309",
            "an installed binding cannot be used",
            "The binding in the package was made for something else, or its files have changed since.",
            "install a wheel that 'shiplap package' made for this version of the package and of shiplap",
        ),
        (
            "SL310",
            "the wheel cannot be read",
            "A wheel is a zip file with one folder *.dist-info, whose WHEEL and RECORD describe its other files.",
            "build the wheel again, and pass its path",
        ),
    ],
)
