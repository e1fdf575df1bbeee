"""What the kernels of activations may be launched with, and what they are launched with by default.

They are bound to the memory, so what counts is how much of it is under way at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CONFIGS", "LIFTS", "default", "default_lift"]

CONFIGS = [{"num_warps": w} for w in (4, 8, 2, 16)]


def default(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Many rows under way hide more than many threads on one do: they meet twice in each."""
    return CONFIGS[0] if sizes["k"] > 1024 else CONFIGS[2]


LIFTS = [{"BLOCK": b, "num_warps": w} for b, w in ((1024, 8), (512, 4), (1024, 4), (2048, 8), (2048, 16), (256, 4))]


def default_lift(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Few windows want few warps."""
    windows = (sizes["k"] // (2 * sizes["pairs"]) + 1) * (sizes["pairs"] - 1)
    return LIFTS[0] if windows > 1024 else LIFTS[1] if windows > 256 else LIFTS[5]
