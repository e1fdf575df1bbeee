"""Compiled Triton code without a GPU (``shiplap.extend.interpreting``): imported first, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shiplap.compat.interpreting import Kernel as _Kernel
from shiplap.compat.interpreting import edit as MUTATE
from shiplap.compat.interpreting import launches as LAUNCHES
from shiplap.extend.interpreting import _error, interpret, run_interpreted

__all__ = ["LAUNCHES", "MUTATE", "_Kernel", "_error", "run"]

interpret()


def run(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> tuple[list[torch.Tensor], float, list[str]]:
    """Compile and run ``fn``: outputs, worst error relative to the largest value of eager, kernels launched."""
    done = run_interpreted(fn, *args, dynamic=dynamic)
    return list(done.results), done.error, list(done.kernels)
