"""Samples of the arguments of an op, drawn from its declaration, and comparison of the op with its
reference on them.
"""

from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare import Reduction, bitwise_difference, compare_within_tolerance, derive_reduction
from shiplap.sampling.samples import Samples, sample

__all__ = [
    "Reduction",
    "SampleCase",
    "Samples",
    "bitwise_difference",
    "compare_within_tolerance",
    "derive_reduction",
    "sample",
]
