"""CUDA graphs as Inductor uses them (``mode="reduce-overhead"``)."""

from __future__ import annotations

__all__ = ["cudagraph_inputs", "cudagraph_skips"]


def cudagraph_skips() -> int:
    """How often since ``reset_compiler`` Inductor ran a compiled region without a CUDA graph that was asked for."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"].get("cudagraph_skips", 0))


def cudagraph_inputs() -> int:
    """How many inputs that torch copies before each replay were recorded since ``reset_compiler``; 0: no graph at all.

    Only meaningful for a function with at least one input that is neither parameter nor buffer.
    """
    from torch._dynamo.utils import counters

    return int(counters["inductor"].get("cudagraph_recorded_non_static_inputs", 0))
