"""Launches of Triton kernels that C++ makes: SL618 to SL620."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class LaunchError(ShiplapError, TypeError):
    """A Triton function that cannot be bound as it was asked (SL618 to SL620)."""


register(
    LaunchError,
    [
        (
            "SL618",
            "a parameter of the Triton kernel has no value",
            (
                "Shiplap generates C++ code that launches the kernel. So it must know where the value of each "
                "parameter and the size of the grid come from. A parameter gets the value of the same name, or one "
                "from an option of sl.triton."
            ),
            (
                "give each parameter of the kernel the name of an argument, an output or a size of the op, or write "
                'what it stands for: arguments={"x_ptr": "x", "total": "n * m"}, and for a tl.constexpr '
                "constants={\"BLOCK\": 128}. If 'got' shows no parameter, pass what 'expected' shows"
            ),
        ),
        (
            "SL619",
            "the Triton kernel cannot be launched by generated code",
            (
                "Generated code launches plain Triton kernels, one after the other. It can pass them only tensors, "
                "numbers and scratch memory."
            ),
            (
                "write a Python function that launches the Triton kernel itself, and bind that function with "
                '@op.kernel("cuda")'
            ),
        ),
        (
            "SL620",
            "no Triton kernel of the op is compiled for the package",
            (
                "A program without Python cannot compile Triton kernels. Its library must hold a compiled kernel for "
                "each dtype and layout of its calls."
            ),
            (
                "call shiplap.kernels.triton.compile_ahead(op, calls, architectures=(90,)) before you make the "
                "package. calls lists argument tuples like those of the program, and 90 stands for compute capability "
                "9.0. If the op has no Triton kernel for CUDA, bind one with sl.triton"
            ),
        ),
    ],
)
