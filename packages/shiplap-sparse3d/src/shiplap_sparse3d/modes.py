"""The mode and the device of a network as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def device_of(net: nn.Module) -> torch.device:
    """Return the device of the first parameter of ``net``, or the CPU if it has none."""
    parameter = next(net.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")


@contextmanager
def evaluation_mode(net: nn.Module) -> Iterator[None]:
    """Run the block of a context manager with ``net`` in evaluation mode. Afterwards each module has its former mode
    again.

    If all modules are in evaluation mode already, no mode is set. Setting those of 70 modules took a tenth of the
    host's time for a small input.
    """
    training = [module for module in net.modules() if module.training]
    if training:
        net.eval()
    try:
        yield
    finally:
        # Not ``net.train()``, which would also change modules that were in evaluation before.
        for module in training:
            module.training = True
