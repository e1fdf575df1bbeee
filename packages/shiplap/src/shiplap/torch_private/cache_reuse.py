"""Reuse of the graphs and kernels that an earlier process has left in the caches of torch and Triton."""

from __future__ import annotations

import torch
from torch._inductor import config

from shiplap.torch_private import triton_assembler

_CHECK = "torch._check"
_CACHES_CHECKS = (2, 13)  # since then a graph that asserts something with torch._check is cached as it is


def prepare_cache_keys() -> None:
    """Make this process look for graphs and kernels under the keys of others. Called before compile caches are read.

    Triton's key holds the version of the assembler. Inductor selects torch's own assembler when it compiles a kernel in
    this process and not in a worker, which depends on the contents of the caches. The assembler is therefore selected
    here.
    """
    triton_assembler.use_torch_assembler()
    marked = config.unsafe_marked_cacheable_functions
    major, minor = torch.__version__.split(".")[:2]
    # Torch leaves out of its cache each graph with a function that it does not know to be safe.
    if _CHECK not in marked and (int(major), int(minor)) < _CACHES_CHECKS:
        config.unsafe_marked_cacheable_functions = {**marked, _CHECK: torch.__version__}
