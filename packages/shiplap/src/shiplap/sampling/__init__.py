"""Samples of the arguments of an op, drawn from its declaration, and comparison of the op with its
reference on them.
"""

from shiplap.sampling.case import Case
from shiplap.sampling.compare import Reduction, bitwise, close, reduction
from shiplap.sampling.samples import Samples, sample

__all__ = ["Case", "Reduction", "Samples", "bitwise", "close", "reduction", "sample"]
