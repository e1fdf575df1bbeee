"""Packages with native code: SL308 to SL310. Models for other runtimes: SL321, SL322. Plain sources: SL323.

Programs that no file can hold: SL324, SL325.
"""

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
                "A native binding is compiled code through which calls reach a kernel. It is stored in the package "
                "that declares the op. The package must be a folder that can be imported, with the kernel libraries "
                "of its ops inside."
            ),
            (
                "if 'got' is an error of an import, correct it. If it names a module of one file, make it the file "
                "__init__.py of a folder of the module's name. If it names a library, build that library into the "
                "folder of the package. Then run 'shiplap package' again"
            ),
        ),
        (
            "SL309",
            "an installed native binding cannot be used",
            (
                "The installed package contains a compiled binding for this op. That binding was built for another "
                "declaration, machine or version of Shiplap, or its file was modified. Calls do not use it."
            ),
            (
                "install a wheel that 'shiplap package' made for this kind of machine, with the installed versions of "
                "the package and of shiplap"
            ),
        ),
        (
            "SL310",
            "the wheel cannot be read",
            (
                "A wheel is a zip file with one directory *.dist-info. The files WHEEL and RECORD in this directory "
                "describe the other files."
            ),
            "build the wheel again with 'python -m build', and pass the path of the new file in dist/",
        ),
        (
            "SL321",
            "the op cannot be exported to ONNX",
            (
                "In an ONNX file, a function of standard ONNX operators stands for the op. It is made from the op's "
                "reference. So torch.onnx must be able to export the reference, which must return its results and "
                "write to no argument."
            ),
            (
                "rewrite the part of the reference that 'got' names: return new tensors instead of writing to "
                "arguments, and use only operators that torch.onnx exports"
            ),
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
                "'shiplap eject' writes ops as plain sources that need no Shiplap. It cannot write a template, a "
                "choice among configs, an object as an argument, or a function without a source of its own. Nothing "
                "was written."
            ),
            (
                "name only ops that can be ejected, such as: shiplap eject mylib.ops:scale -o mylib_plain. To eject "
                "the others, remove what 'got' names from them"
            ),
        ),
        (
            "SL324",
            "the program is right for one size only",
            (
                "torch.export writes a float that follows from a size, such as x.shape[0] / 2 as an argument of an op, "
                "into the program as the number of the example, with a guard. A file has no such guard, and would "
                "return wrong values for other sizes."
            ),
            (
                "pass the number as a tensor without dims, such as x.new_full((), x.shape[0]) / 2, to an op that takes "
                "one; or export with a fixed size, without this dim in dynamic_shapes"
            ),
        ),
        (
            "SL325",
            "the compiled program takes fewer sizes than were declared",
            (
                "Inductor compiled code for a part of the declared range of a size, and the package would refuse other "
                "sizes. Nothing was written."
            ),
            "export the program with the range that 'got' names in dynamic_shapes, such as Dim('n', min=65, max=4096)",
        ),
    ],
)
