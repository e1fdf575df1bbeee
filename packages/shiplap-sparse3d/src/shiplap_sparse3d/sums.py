"""``x + tensor`` in compiled graphs: Dynamo takes a sum with a tensor for one of two tensors, unless the other refuses.

It asks ``__torch_function__`` then, as eager PyTorch does, so the sparse tensors answer there.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Summed"]

_SUMS = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__iadd__)


class Summed:
    """Sums of a sparse tensor and a tensor. No other function of torch takes a sparse tensor."""

    def plus(self, other: Any) -> Any:
        """This tensor and ``other``, row by row."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SUMS or kwargs or len(args) != 2:
            return NotImplemented
        first, second = args
        return first.plus(second) if isinstance(first, Summed) else second.plus(first)
