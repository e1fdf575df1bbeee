""""""

from shiplap.referee.case import Case
from shiplap.referee.compare import Reduction, bitwise, close, reduction
from shiplap.referee.samples import Samples, sample

__all__ = ["Case", "Reduction", "Samples", "bitwise", "close", "reduction", "sample"]
