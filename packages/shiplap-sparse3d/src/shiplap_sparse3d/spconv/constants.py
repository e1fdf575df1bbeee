"""The constants of spconv's version that models read."""

from __future__ import annotations

import torch

__all__ = ["PYTORCH_VERSION", "SPCONV_VERSION_NUMBERS", "__version__", "is_amp_enabled"]

SPCONV_VERSION_NUMBERS = [2, 3, 8]  # the release whose surface and semantics this package has
__version__ = ".".join(map(str, SPCONV_VERSION_NUMBERS))
PYTORCH_VERSION = [int(part) for part in torch.__version__.split("+")[0].split(".")[:2]]


def is_amp_enabled() -> bool:
    """Return whether ``torch.autocast`` is enabled for CUDA devices."""
    return torch.is_autocast_enabled()
