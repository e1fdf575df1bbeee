"""A call captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shiplap import torch_private


def capture_call(fn: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph of a call of ``fn``, and its result. A capture that breaks raises what broke it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        result, broken = torch_private.capture_graph(graph, fn, torch.cuda.graph_pool_handle())
    torch.cuda.synchronize()
    if broken is not None:
        raise broken
    return graph, result
