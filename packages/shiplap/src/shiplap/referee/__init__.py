"""Arguments drawn from a declaration, run through op and reference, and compared: what audit and tune rest on."""

from shiplap.referee.case import Case
from shiplap.referee.compare import Reduction, bitwise, close, reduction
from shiplap.referee.samples import Samples, sample

__all__ = ["Case", "Reduction", "Samples", "bitwise", "close", "reduction", "sample"]
