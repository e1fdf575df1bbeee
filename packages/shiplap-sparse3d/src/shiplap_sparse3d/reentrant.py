"""The refusal of reentrant activation checkpointing around a ``SparseTensor``, which would lose gradients.

``torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`` runs its function without gradients, and attaches a
gradient only to tensors that are themselves arguments or results of the function. A tensor inside of an object comes
out without a gradient, and the checkpointed layers are silently not trained.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from shiplap.plugin_api import error

__all__ = ["inside_checkpoint", "made_inside", "refuse_checkpoint", "refuse_checkpoint_in_eager"]

_FORWARD = CheckpointFunction.forward.__code__


def _checkpoint_arguments() -> tuple[Any, ...] | None:
    """Return the arguments of the reentrant checkpoint whose forward pass is running. Return None if there is none, and
    while gradients are recorded or inference mode is on. Dynamo must not trace this function.
    """
    # The reentrant forward pass runs without gradients, so the stack need not be walked otherwise.
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # PyTorch has no function that tells whether a checkpoint is running, so the stack is searched.
        if frame.f_code is _FORWARD:
            given: tuple[Any, ...] = frame.f_locals["args"]
            return given
        frame = frame.f_back
    return None


def made_inside() -> bool:
    """Return whether the forward pass of a reentrant checkpoint is running, so that a tensor made now is made inside
    it. In a graph it is False.
    """
    return not torch.compiler.is_compiling() and _checkpoint_arguments() is not None


def inside_checkpoint() -> bool:
    """Return whether the forward pass of a reentrant checkpoint is running. Unlike :func:`made_inside`, this function
    must not be called in a graph.
    """
    return _checkpoint_arguments() is not None


def refuse_checkpoint(where: str, x: Any) -> bool:
    """Raise ``SL215`` if the sparse tensor ``x`` is an argument or a result of a reentrant checkpoint, since its
    gradient would be lost. Return whether a reentrant checkpoint is running. In a graph nothing is checked. ``where``
    is the layer's name in the error.
    """
    return not torch.compiler.is_compiling() and refuse_checkpoint_in_eager(where, x)


def refuse_checkpoint_in_eager(where: str, x: Any) -> bool:
    """Raise ``SL215`` if the sparse tensor ``x`` is an argument or a result of a reentrant checkpoint. Return whether a
    reentrant checkpoint is running. Unlike :func:`refuse_checkpoint`, this function must not be called in a graph.
    ``where`` is the layer's name in the error.
    """
    given = _checkpoint_arguments()
    if given is None:
        if not (x.checkpointed and torch.is_grad_enabled()):
            return False
        crossed = "a sparse tensor that a reentrant checkpoint returned"
    elif _is_in_arguments(type(x), given):
        crossed = "a sparse tensor as the argument of a reentrant checkpoint"
    else:
        return True
    raise error("SL215", where=where, got=crossed, expected="use_reentrant=False, or plain tensors in and out")


def _is_in_arguments(kind: type, value: Any) -> bool:
    """Return whether ``value`` is an object of the class ``kind``, or contains one at any depth of tuples, lists and
    dicts.
    """
    if isinstance(value, (tuple, list, dict)):
        return any(_is_in_arguments(kind, v) for v in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, kind)
