"""The layer ``Identity``."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

__all__ = ["Identity"]


class Identity(Module):
    """A layer that returns its input."""

    def forward(self, input: Any) -> Any:
        """Return ``input`` unchanged."""
        return input

    def input_spatial_size(self, out_size: Any) -> Any:
        """Return ``out_size``, since the layer does not change the spatial size."""
        return out_size
