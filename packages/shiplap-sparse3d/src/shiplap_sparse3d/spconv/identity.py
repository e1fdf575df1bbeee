"""``Identity``."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

__all__ = ["Identity"]


class Identity(Module):
    """Its input, whatever that is."""

    def forward(self, input: Any) -> Any:
        return input

    def input_spatial_size(self, out_size: Any) -> Any:
        return out_size
