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
            "Generated C++ launches the kernel, so sl.triton has to say where each of its parameters comes from.",
            "name the parameter like an argument, an output or a size, or add what 'expected' names to sl.triton(...)",
        ),
        (
            "SL619",
            "the Triton kernel cannot be launched by generated code",
            "A generated launch passes tensors, numbers and scratch memory to one plain kernel after the other.",
            "write a Python function that launches the kernel on its grid, and bind that function",
        ),
        (
            "SL620",
            "no Triton kernel of the op is compiled for the package",
            "A program without Python cannot compile Triton kernels. Its library has one for each dtype and layout of "
            "its calls.",
            "call shiplap.kernels.triton.compile_ahead(op, calls, architectures=(90,)) with the architecture of the "
            "program's GPU, and with arguments like those of the program",
        ),
    ],
)
