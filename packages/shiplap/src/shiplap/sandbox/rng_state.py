"""Detection of a call that sets the shared random number generators to a position of its own.

A call may draw numbers. Generators are advanced before each call, so their positions after two calls are equal only if
the second call has set them.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_torch(seed: int) -> None:
    """Seed torch's random generator of the CPU, and that of the accelerator if there is one.

    ``torch.manual_seed`` is called only for an accelerator other than an initialized GPU of CUDA, since it formats the
    stack of its caller for each kind of accelerator. That takes 1 to 3 ms.
    """
    if torch.cuda.is_initialized():
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            generator.manual_seed(seed)
    elif torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def rng_positions() -> dict[str, int]:
    """Return a dict with a hash of the state of each random generator of Python, NumPy and torch's CPU. The key is the
    name of the function that would set the state.
    """
    place = np.random.get_state(legacy=False)["state"]
    return {
        "random.seed": hash(random.getstate()),
        "numpy.random.seed": hash((place["key"].tobytes(), place["pos"])),
        "torch.set_rng_state": hash(torch.get_rng_state().numpy().tobytes()),
    }


class RngWatch:
    """A record of the positions of the random generators that all code shares, as they were after the last call. It
    shows whether a candidate resets a generator.
    """

    def __init__(self) -> None:
        """Start without a known position of any generator."""
        self._after: dict[str, int] = {}

    def advance_generators(self) -> None:
        """Draw one number from each shared random generator before a call. No two calls then begin at the same
        position.
        """
        random.random()
        np.random.random()
        torch.rand(1)

    def stuck_generators(self) -> list[str]:
        """Return the names of the generators (see ``rng_positions``) whose state is the same as when this method was
        last called. Since the generators were advanced in between, the candidate must have set them.
        """
        before, self._after = self._after, rng_positions()
        return [name for name, place in self._after.items() if before.get(name) == place]
