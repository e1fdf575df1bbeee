"""Refuse to measure where a measurement would disturb: inside an op, a backward, a capture, a trace, or a tuning
worker.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

from shiplap import torch_private
from shiplap.dispatch import Op
from shiplap.errors import error

WORKER = "_SHIPLAP_TUNE_WORKER"  # set in the worker's own environment, by the worker: not a setting


def blocked() -> str:
    """Return a string that names the context, such as ``a CUDA graph capture`` or ``an op``, in which kernels may not
    be measured now. Return an empty string if they may be measured.
    """
    # The process id is compared because a child that the worker starts inherits the variable.
    if os.environ.get(WORKER) == str(os.getpid()):
        return "a worker that imports the op"
    if torch.compiler.is_compiling():
        return "a function that is being traced"
    if torch_private.in_backward():
        return "a backward pass"
    # Without the first test, the second would initialise CUDA in a program that uses the CPU only.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph capture"
    return "an op" if _inside_op() else ""


def _inside_op() -> bool:
    """Return whether this thread is inside a call of an op.

    The function searches the thread's stack for ``Op.execute``, so calls of ops need not be counted.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Op.execute.__code__:
        frame = frame.f_back
    return frame is not None


def require_quiet(where: str) -> None:
    """Raise ``SL608`` if kernels may not be measured now.

    They may not be measured inside an op, a backward, a trace, a CUDA graph capture or a worker process. ``where``
    names the function that was called, for the error.
    """
    if reason := blocked():
        raise error("SL608", where=where, got=f"tuning inside {reason}", expected="tuning outside the model's own work")
