"""The doctor: SL7xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register

__all__ = ["DoctorError"]


class DoctorError(ShiplapError, RuntimeError):
    """A program that cannot be examined as asked (SL7xx)."""


register(
    DoctorError,
    [
        (
            "SL701",
            "program cannot be started",
            "The doctor runs it as the shell would.",
            "check the path: shiplap doctor -- python script.py",
        ),
        (
            "SL702",
            "nothing was compiled",
            "Graph breaks are seen while torch compiles a function that is called.",
            "call the torch.compile'd function in the program; unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE",
        ),
    ],
)
