"""Whether a call sets the random numbers of everybody to a place of its own.

A call may draw numbers. After it, the next number is another one than after the call before, unless the call has set
the place from which numbers come.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def places() -> dict[str, int]:
    """Where the sources of random numbers stand that everybody in this process shares, as numbers to compare."""
    place = np.random.get_state(legacy=False)["state"]
    return {
        "random.seed": hash(random.getstate()),
        "numpy.random.seed": hash((place["key"].tobytes(), place["pos"])),
        "torch.set_rng_state": hash(torch.get_rng_state().numpy().tobytes()),
    }


class Dice:
    """What was to come after the last call. One number is drawn before each call, so that no two are alike."""

    def __init__(self) -> None:
        self._after: dict[str, int] = {}

    def throw(self) -> None:
        """Before a call."""
        random.random()
        np.random.random()
        torch.rand(1)

    def stuck(self) -> list[str]:
        """After a call: the sources that stand where they stood after the call before."""
        before, self._after = self._after, places()
        return [name for name, place in self._after.items() if before.get(name) == place]
