"""The zoo of CUDA graphs: ops that are right when called, and wrong, or impossible, when captured and replayed.

Written as kernel libraries write them, with torch's own kernels in the place of theirs. Importing needs no GPU.
"""

from shiplap_testing.zoo.gpu import faults, later, memory, sound
from shiplap_testing.zoo.gpu.common import BAD, EVIDENCE, GOOD, TWO_DEVICES

__all__ = ["BAD", "EVIDENCE", "GOOD", "TWO_DEVICES", "faults", "later", "memory", "sound"]
