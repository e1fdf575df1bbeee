"""Samples of the arguments of an op, drawn from its declaration, and comparison of the op with its
reference on them.
"""

from typing import TYPE_CHECKING

from shiplap.lazy_imports import names

if TYPE_CHECKING:
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

# Late, since a judgement of a plain function needs no samples of an op.
_LATE = {
    "Reduction": "shiplap.sampling.compare",
    "SampleCase": "shiplap.sampling.case",
    "Samples": "shiplap.sampling.samples",
    "bitwise_difference": "shiplap.sampling.compare",
    "compare_within_tolerance": "shiplap.sampling.compare",
    "derive_reduction": "shiplap.sampling.compare",
    "sample": "shiplap.sampling.samples",
}

__getattr__ = names(__name__, _LATE)
