"""The score of the demonstration."""

from __future__ import annotations

from torch import Tensor

__all__ = ["iou"]


def iou(predicted: Tensor, truth: Tensor) -> float:
    """Return the intersection over union of two boolean masks of points, or 0 if both are empty."""
    return float((predicted & truth).sum() / (predicted | truth).sum().clamp_min(1))
