"""Arguments drawn from a declaration, run through op and reference, and compared: what audit and tune rest on."""

from shiplap.verify.compare import Reduction, bitwise, close, reduction
from shiplap.verify.samples import Case, Samples, sample

__all__ = ["Case", "Reduction", "Samples", "bitwise", "close", "reduction", "sample"]
