"""The mode and the device of a network as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def device_of(net: nn.Module) -> torch.device:
    """Return the device of the first parameter of ``net``."""
    parameter = next(net.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")


@contextmanager
def evaluation_mode(net: nn.Module) -> Iterator[None]:
    """Run the block with ``net`` in evaluation mode; afterwards each module has its former mode.

    A network in evaluation mode is left alone: setting the modes of 70 modules took a tenth of the host's time for a
    small tile.
    """
    training = [module for module in net.modules() if module.training]
    if training:
        net.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
