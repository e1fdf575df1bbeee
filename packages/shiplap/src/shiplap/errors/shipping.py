"""Packages with native code: SL308 to SL310. Models for other runtimes: SL321, SL322. Plain sources: SL323."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class ShippingError(ShiplapError, RuntimeError):
    """A package or a model for another runtime that cannot be made, or code in it that cannot be used."""


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
        (
            "SL321",
            "the op cannot be exported to ONNX",
            (
                "In an ONNX file, the op's reference stands for the op, in standard operators. torch.onnx must be able "
                "to export the reference, and the reference must return its results, not write to arguments."
            ),
            "change what 'got' names in the reference: return the results, and use operators that torch.onnx exports",
        ),
        (
            "SL322",
            "the packages for ONNX are not installed",
            "torch exports ONNX models with the packages onnx and onnxscript.",
            "install them: pip install 'shiplap[onnx]'",
        ),
        (
            "SL323",
            "an op cannot be ejected",
            (
                "'shiplap eject' writes ops as plain sources. A template, a choice among configs, an object as an"
                " argument, or a function without a source of its own has no plain form. Nothing was written."
            ),
            "eject the other ops by their names, or change what 'got' names",
        ),
    ],
)
