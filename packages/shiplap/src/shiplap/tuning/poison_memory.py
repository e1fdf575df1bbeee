"""Fill the memory that a candidate allocates in Python, so that reading uninitialised memory gives wrong results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Poison(TorchFunctionMode):
    """A torch mode in which every tensor that Python code allocates without values is filled with one byte."""

    ALLOCATORS = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)

    def __init__(self, byte: int) -> None:
        """Make a mode that fills newly allocated tensors with ``byte``."""
        super().__init__()
        self.byte = byte

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the torch function ``func`` and return its result. If ``func`` allocates a tensor without values, such
        as ``torch.empty``, fill the tensor's whole storage with the byte.
        """
        result = func(*args, **(kwargs or {}))
        if func in self.ALLOCATORS and isinstance(result, Tensor) and result.numel() and result.layout is torch.strided:
            # The whole storage is filled, as a kernel may read between the strides of the tensor.
            room = torch.empty(0, dtype=torch.uint8, device=result.device).set_(result.untyped_storage())
            room.fill_(self.byte)
        return result
