"""Run a program, read torch's own trace, and report every graph break with its line, its cause and its remedy."""

from shiplap.doctor.diagnosis import Break, Diagnosis, Place, Recompile, Skip
from shiplap.doctor.examine import diagnose, doctor, examine

__all__ = ["Break", "Diagnosis", "Place", "Recompile", "Skip", "diagnose", "doctor", "examine"]
