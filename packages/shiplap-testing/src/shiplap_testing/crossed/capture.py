"""A call captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shiplap import torch_private


def capture_call(fn: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call of ``fn`` as a CUDA graph. Return the graph and the result of the call, which holds the memory
    that a replay writes to. If the capture fails, raise the exception that ended it.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        result, broken = torch_private.capture_graph(graph, fn, torch.cuda.graph_pool_handle())
    torch.cuda.synchronize()
    if broken is not None:
        raise broken
    return graph, result
