"""Reentrant activation checkpointing around a ``SparseTensor``: found and refused, since it would lose gradients.

``torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`` runs its function without gradients and gives one to
tensors that the function takes or returns itself. A tensor inside of an object comes out without a gradient, and what
was checkpointed is not trained, silently.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from shiplap.plugin_api import error

__all__ = ["inside", "made_inside", "refuse", "refuse_in_eager"]

_FORWARD = CheckpointFunction.forward.__code__


def _arguments() -> tuple[Any, ...] | None:
    """What the reentrant checkpoint that is running was called with; None outside of one. Nothing Dynamo may trace."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FORWARD:
            given: tuple[Any, ...] = frame.f_locals["args"]
            return given
        frame = frame.f_back
    return None


def made_inside() -> bool:
    """Whether what is made now is made in the forward pass of a reentrant checkpoint."""
    return not torch.compiler.is_compiling() and _arguments() is not None


def inside() -> bool:
    """The same for those who know that nothing is being compiled."""
    return _arguments() is not None


def refuse(where: str, x: Any) -> bool:
    """SL215 if ``x`` came into the reentrant checkpoint that is running as an argument, or came out of one.

    Returns whether one is running.
    """
    return not torch.compiler.is_compiling() and refuse_in_eager(where, x)


def refuse_in_eager(where: str, x: Any) -> bool:
    """The same for those who know that nothing is being compiled."""
    given = _arguments()
    if given is None:
        if not (x.checkpointed and torch.is_grad_enabled()):
            return False
        crossed = "a sparse tensor that a reentrant checkpoint returned"
    elif _among(type(x), given):
        crossed = "a sparse tensor as the argument of a reentrant checkpoint"
    else:
        return True
    raise error("SL215", where=where, got=crossed, expected="use_reentrant=False, or plain tensors in and out")


def _among(kind: type, value: Any) -> bool:
    """Whether an object of ``kind`` is among nested arguments."""
    if isinstance(value, (tuple, list, dict)):
        return any(_among(kind, v) for v in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, kind)
