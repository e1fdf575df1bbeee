"""Arguments drawn from a declaration, run through op and reference, and compared: what audit and tune rest on."""

from shiplap.verify.compare import bitwise, close, reduction_size
from shiplap.verify.samples import Case, Samples, sample

__all__ = ["Case", "Samples", "bitwise", "close", "reduction_size", "sample"]
