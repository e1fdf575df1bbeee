"""Sampling: arguments drawn from a declaration, run through op and reference, and compared."""

from shiplap.sampling.case import Case
from shiplap.sampling.compare import Reduction, bitwise, close, reduction
from shiplap.sampling.samples import Samples, sample

__all__ = ["Case", "Reduction", "Samples", "bitwise", "close", "reduction", "sample"]
