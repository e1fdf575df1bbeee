"""Activations for ``act_type`` of spconv's layers: values of ``cumm.tensorview.gemm.Activation``, or names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shiplap.plugin_api import error

__all__ = ["activation_of", "apply_activation"]

_KNOWN: dict[str, Callable[[Tensor, float], Tensor]] = {
    "ReLU": lambda x, alpha: torch.relu(x),
    "Sigmoid": lambda x, alpha: torch.sigmoid(x),
    "LeakyReLU": lambda x, alpha: functional.leaky_relu(x, alpha),
}


def activation_of(where: str, act_type: Any) -> str | None:
    """Return the name of the activation ``act_type``, or None for no activation. ``act_type`` is a name, a member of
    cumm's enumeration or None. Raise ``SL208`` for an activation that this package does not have. ``where`` is the
    layer's name in the message.
    """
    name = getattr(act_type, "name", act_type)
    if name is None or name == "None_":
        return None
    if name not in _KNOWN:
        raise error("SL208", where=where, got=f"act_type={act_type}", expected=f"None_, {', '.join(_KNOWN)}")
    return str(name)


def apply_activation(features: Tensor, name: str | None, alpha: float) -> Tensor:
    """Return ``features`` after the activation ``name`` (ReLU, Sigmoid or LeakyReLU), or ``features`` itself if
    ``name`` is None. ``alpha`` is the slope of LeakyReLU for negative numbers.
    """
    return features if name is None else _KNOWN[name](features, alpha)
