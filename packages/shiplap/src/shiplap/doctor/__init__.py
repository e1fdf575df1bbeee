"""Run a program, read torch's own trace, and report every graph break with its line, its cause and its remedy."""

from shiplap.doctor.diagnosis import Break, Diagnosis, Recompile, Skip, SourcePlace
from shiplap.doctor.examine import diagnose_command, diagnose_trace, doctor
from shiplap.doctor.treatment import Treatment, TriedEntry
from shiplap.doctor.trial import try_remedies

__all__ = [
    "Break",
    "Diagnosis",
    "Recompile",
    "Skip",
    "SourcePlace",
    "Treatment",
    "TriedEntry",
    "diagnose_command",
    "diagnose_trace",
    "doctor",
    "try_remedies",
]
