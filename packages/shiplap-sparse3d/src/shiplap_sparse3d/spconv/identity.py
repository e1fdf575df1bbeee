"""The layer ``Identity``."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

__all__ = ["Identity"]


class Identity(Module):
    """A layer that returns its input."""

    def forward(self, input: Any) -> Any:
        return input

    def input_spatial_size(self, out_size: Any) -> Any:
        return out_size
