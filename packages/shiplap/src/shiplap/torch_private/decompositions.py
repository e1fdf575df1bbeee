"""Torch's decompositions of fused operators into plain ones (a private table)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions: operator → a function that computes the same from plainer operators.

    The result is empty on a torch without the table.
    """
    try:
        from torch._decomp import core_aten_decompositions

        return dict(core_aten_decompositions())
    # The table is private. Without it, callers go without decompositions.
    except (ImportError, AttributeError, RuntimeError):
        return {}
