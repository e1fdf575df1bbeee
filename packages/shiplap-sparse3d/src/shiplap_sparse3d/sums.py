"""``x + tensor`` and checkpoints of sparse tensors in compiled graphs.

Dynamo takes a sum with a tensor for one of two tensors, unless the other refuses. It asks ``__torch_function__`` then,
as eager PyTorch does, so the sparse tensors answer there. They are asked about ``torch.utils.checkpoint`` as well,
which gets them as what its function refers to, like modules, and not as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from shiplap.extend.compiling import checkpoints_keep_objects

__all__ = ["Summed"]

_SUMS = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__iadd__)


class Summed:
    """Sums and checkpoints of a sparse tensor. No other function of torch takes one."""

    def plus(self, other: Any) -> Any:
        """This tensor and ``other``, row by row."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is checkpoint:  # only Dynamo asks
            return _checkpointed(func, args, kwargs) if checkpoints_keep_objects() else NotImplemented
        if func not in _SUMS or kwargs or len(args) != 2:
            return NotImplemented
        first, second = args
        return first.plus(second) if isinstance(first, Summed) else second.plus(first)


def _checkpointed(checkpoint: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``checkpoint(*args, **kwargs)``."""
    function, *given = args
    sparse = {name: value for name, value in kwargs.items() if isinstance(value, Summed)}
    others = {name: value for name, value in kwargs.items() if not isinstance(value, Summed)}
    return checkpoint(lambda **more: function(*given, **sparse, **more), **others)
