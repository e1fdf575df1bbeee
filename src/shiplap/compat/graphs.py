"""CUDA graphs as Inductor uses them (``mode="reduce-overhead"``)."""

from __future__ import annotations

__all__ = ["cudagraph_skips"]


def cudagraph_skips() -> int:
    """How often since ``reset_compiler`` Inductor ran a compiled region without a CUDA graph that was asked for."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"].get("cudagraph_skips", 0))
