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
            (
                "The doctor starts the program as a shell would. The first word after -- must be a program that "
                "exists and may be run."
            ),
            "pass a program that exists and that you may run, such as: shiplap doctor -- python script.py",
        ),
        (
            "SL702",
            "nothing was compiled",
            (
                "Shiplap sees graph breaks and compiled code only while torch.compile compiles a function that the "
                "program calls."
            ),
            (
                "in the program, call a function that torch.compile returned. Unset TORCH_COMPILE_DISABLE and "
                "TORCHDYNAMO_DISABLE"
            ),
        ),
        (
            "SL703",
            "'shiplap doctor --try' cannot start this command",
            (
                "'shiplap doctor --try' copies the program's folder and tries remedies in the copy. There it can "
                "start only a Python script or module. It does not copy a folder with more than 5,000 Python files."
            ),
            (
                "in the program's folder, run: shiplap doctor --try -- python script.py (for a module: python -m "
                "module). If the folder has too many files, move the program to a folder of its own"
            ),
        ),
        (
            "SL704",
            "two runs of the unchanged program differ",
            (
                "The doctor judges a remedy by comparing the results of compiled functions with those of the "
                "unchanged program. So two unchanged runs must have the same results."
            ),
            (
                "seed the random numbers, as with torch.manual_seed(0), and keep times and other varying values out "
                "of the results of compiled functions"
            ),
        ),
    ],
)
