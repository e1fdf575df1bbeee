"""CUDA graphs as Inductor uses them (``mode="reduce-overhead"``)."""

from __future__ import annotations


def cudagraph_skips() -> int:
    """Return how often Inductor has run a region without the requested CUDA graph, since ``reset_compiler``."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"].get("cudagraph_skips", 0))


def cudagraph_inputs() -> int:
    """Return the number of inputs that torch copies before each replay, since ``reset_compiler``.

    0 means that no graph was recorded. The number is only meaningful for a function with at least one input that is
    neither parameter nor buffer.
    """
    from torch._dynamo.utils import counters

    return int(counters["inductor"].get("cudagraph_recorded_non_static_inputs", 0))
