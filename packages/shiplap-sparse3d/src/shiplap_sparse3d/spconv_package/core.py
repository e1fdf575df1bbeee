"""The module ``spconv.core``."""

from __future__ import annotations

from enum import Enum

from shiplap_sparse3d.spconv.core import ConvAlgo
from shiplap_sparse3d.spconv_package.constants import NDIM_DONT_CARE

__all__ = ["NDIM_DONT_CARE", "AlgoHint", "ConvAlgo"]


class AlgoHint(Enum):
    """The purposes for which spconv chooses a kernel. Functions accept such a value and do not read it, since Shiplap
    chooses kernels by measuring them.
    """

    NoHint = 0b000
    Fowrard = 0b001  # codespell:ignore - spconv's own spelling
    BackwardInput = 0b010
    BackwardWeight = 0b100
