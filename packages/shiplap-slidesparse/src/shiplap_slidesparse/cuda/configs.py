"""The launch configurations of the activation kernels, and their defaults.

These kernels are bound by memory, so the number of bytes in flight decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CONFIGS", "LIFTS", "default_lift", "default_quantise"]

CONFIGS = [{"num_warps": w} for w in (4, 8, 2, 16)]


# Threads of one row meet in two reductions, where they wait for each other.
def default_quantise(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Return the default launch configuration for quantising rows of ``sizes["k"]`` elements. Rows of at most 1024
    elements get fewer warps. Many rows in flight hide latency better than many threads per row.
    """
    return CONFIGS[0] if sizes["k"] > 1024 else CONFIGS[2]


LIFTS = [{"BLOCK": b, "num_warps": w} for b, w in ((1024, 8), (512, 4), (1024, 4), (2048, 8), (2048, 16), (256, 4))]


def default_lift(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Return the default launch configuration for lifting rows of ``sizes["k"]`` elements, which writes overlapping
    windows side by side. Rows with fewer windows get fewer warps. ``sizes["pairs"]`` is the number of pairs in a group
    of the weight's pattern.
    """
    windows = (sizes["k"] // (2 * sizes["pairs"]) + 1) * (sizes["pairs"] - 1)
    return LIFTS[0] if windows > 1024 else LIFTS[1] if windows > 256 else LIFTS[5]
