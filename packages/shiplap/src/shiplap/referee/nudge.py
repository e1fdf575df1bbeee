"""Values that look like others to whoever looks at sums, shapes or single elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["nudged"]


def nudged(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with pairs of elements of each floating tensor exchanged.

    Sums and shapes stay what they were, and half of the elements: what remembers results by those is wrong now.
    """
    return tuple(_nudged(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def _nudged(t: Tensor) -> Tensor:
    if t.numel() < 4 or t.itemsize < 2 or not t.is_contiguous():
        return t
    flat = t.detach().clone().reshape(-1)
    half = flat.numel() // 2
    places = torch.randperm(flat.numel(), device=flat.device)[: 2 * max(1, half // 2)]
    flat[places] = flat[places.flip(0)]
    return flat.reshape(t.shape)
