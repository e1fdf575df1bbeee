"""Compiled Triton code without a GPU (``shiplap.plugin_api.interpreting``): imported first, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shiplap.plugin_api.interpreting import _error, interpret, run_interpreted
from shiplap.torch_private.triton_internals import InterpretedKernel as _Kernel
from shiplap.torch_private.triton_internals import edit as MUTATE
from shiplap.torch_private.triton_internals import launches as LAUNCHES

__all__ = ["LAUNCHES", "MUTATE", "_Kernel", "_error", "run"]

interpret()


def run(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> tuple[list[torch.Tensor], float, list[str]]:
    """Compile ``fn`` and run it on ``args`` with Triton's interpreter. If ``dynamic`` is true, it is compiled with
    dynamic shapes, and otherwise with fixed ones.

    Return the list of outputs, the largest error, and the list of names of the launched kernels. The error is relative
    to the largest value that ``fn`` returns in eager mode.
    """
    done = run_interpreted(fn, *args, dynamic=dynamic)
    return list(done.results), done.error, list(done.kernels)
