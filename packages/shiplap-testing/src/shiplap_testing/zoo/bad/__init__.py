"""Broken ops, a file per family of faults. Eleven of them are those of which ten pass ``torch.library.opcheck`` on a
plausible sample.

Ops in the namespace ``zoo`` are written as an outsider would, with raw torch.library, and adopted; those in ``zoo_sl``
are declared with ``sl.op`` and have a broken kernel. Every one works on the sample that its author tried.
"""

from shiplap_testing.zoo.bad import addresses, compiler, gradients, memory, values
from shiplap_testing.zoo.bad.common import SPECIMENS

__all__ = ["SPECIMENS", "addresses", "compiler", "gradients", "memory", "values"]
