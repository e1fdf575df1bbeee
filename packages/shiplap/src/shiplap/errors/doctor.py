"""The doctor: SL7xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class DoctorError(ShiplapError, RuntimeError):
    """A program that cannot be examined as asked (SL7xx)."""


register(
    DoctorError,
    [
        (
            "SL701",
            "the program cannot be started",
            "The doctor starts the program in the way in which a shell would start it.",
            "pass a program that exists, for example: shiplap doctor -- python script.py",
        ),
        (
            "SL702",
            "nothing was compiled",
            "The doctor sees graph breaks only while torch.compile compiles a function that is called.",
            "call the torch.compile'd function in the program; unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE",
        ),
        (
            "SL703",
            "'shiplap doctor --try' cannot start this command",
            "It tries remedies in a copy of the program's folder, where it can start a Python script or a module only.",
            "in the program's folder, run: shiplap doctor --try -- python script.py (or: python -m module)",
        ),
        (
            "SL704",
            "two runs of the unchanged program differ",
            "Remedies are judged by the results of compiled functions, which have to be the same in two runs.",
            "seed what the program draws at random, and leave clocks out of its results",
        ),
    ],
)
