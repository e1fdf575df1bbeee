"""Builds on request: the native binding of an op, and the launcher of its Triton templates."""

from __future__ import annotations

from pathlib import Path

import torch

from shiplap.dispatch import Op
from shiplap.kernels.native import binding
from shiplap.kernels.triton import replay


def build_op(op: Op) -> Path | None:
    """Build or find what the kernels of ``op`` need to run without Python, and put it into use.

    Returns the library of the native binding, or None for an op with Triton templates alone.

    Raises:
        LibraryError: SL404 for kernels that Python has to serve, SL405 or SL406 when a library cannot be built.
    """
    has_templates = any(k.template is not None for k in op.kernels.get("cuda", ())) and torch.cuda.is_available()
    if has_templates and replay.is_replay_wanted():
        replay.build_replay_library(op)
    has_native = any(k.native is not None for kernels in op.kernels.values() for k in kernels)
    return binding.build(op) if has_native or not has_templates else None
