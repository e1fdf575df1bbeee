"""``cumm.tensorview``, as far as callers of spconv's voxelisation use it: their input and output arrays."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

__all__ = ["Tensor", "empty", "from_numpy", "gemm", "to_torch", "zeros"]

float32, float64, float16 = torch.float32, torch.float64, torch.float16
int32, int64, int8, uint8, bool_ = torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool


class Tensor:
    """A torch tensor with those methods of cumm's tensorview that callers of spconv use."""

    def __init__(self, held: torch.Tensor) -> None:
        """Wrap the torch tensor ``held`` without a copy."""
        self.torch = held

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a NumPy array with a copy of the elements."""
        copied: np.ndarray[Any, Any] = self.numpy_view().copy()
        return copied

    def numpy_view(self) -> np.ndarray[Any, Any]:
        """Return a NumPy array that shares the memory of the elements. For a tensor on a GPU it holds a copy."""
        view: np.ndarray[Any, Any] = self.torch.cpu().numpy()
        return view

    def cpu(self) -> Tensor:
        """Return a tensorview on the CPU. If the elements are there already, it shares their memory."""
        return Tensor(self.torch.cpu())

    def cuda(self) -> Tensor:
        """Return a tensorview on the current GPU."""
        return Tensor(self.torch.cuda())

    def clone(self) -> Tensor:
        """Return a tensorview of a copy of the elements."""
        return Tensor(self.torch.clone())

    @property
    def shape(self) -> list[int]:
        """The sizes of the dimensions, as a list."""
        return list(self.torch.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.torch.ndim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the torch tensor."""
        return self.torch.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.torch.numel()

    def dim(self, axis: int) -> int:
        """Return the size of the dimension ``axis``."""
        return self.torch.shape[axis]

    def empty(self) -> bool:
        """Return whether the tensor has no elements."""
        return self.torch.numel() == 0

    def __getitem__(self, index: Any) -> Tensor:
        """Return a tensorview of the elements that torch's indexing by ``index`` selects."""
        return Tensor(self.torch[index])

    def __len__(self) -> int:
        """Return the length of the first axis."""
        return len(self.torch)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the elements as a NumPy array of ``dtype``, for ``np.asarray``. ``copy`` is not read."""
        return np.asarray(self.numpy_view(), dtype)

    def __repr__(self) -> str:
        """Return shape and dtype as text."""
        return f"Tensor[shape={self.shape}, dtype={self.dtype}]"


def to_torch(array: Any) -> torch.Tensor:
    """Return a torch tensor of ``array``. If ``array`` is this module's tensorview, return the tensor that it holds,
    and return a torch tensor unchanged. A contiguous NumPy array shares its memory with the result. A tensorview of
    cumm is read by its method ``numpy``.
    """
    if isinstance(array, Tensor):
        return array.torch
    if isinstance(array, torch.Tensor):
        return array
    # Tensorviews of the real cumm have ``numpy()``, and arrays have not.
    return torch.from_numpy(np.ascontiguousarray(array.numpy() if hasattr(array, "numpy") else array))


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensorview that shares the memory of ``array``."""
    return Tensor(torch.from_numpy(array))


def zeros(shape: Sequence[int], dtype: torch.dtype = torch.float32, device: int = -1) -> Tensor:
    """Return a tensorview of zeros. ``device`` is the number of a GPU, or negative for the CPU."""
    return Tensor(torch.zeros(*shape, dtype=dtype, device="cpu" if device < 0 else f"cuda:{device}"))


empty = zeros


class Activation(Enum):
    """The activations that a layer can apply to its result, as values of its argument ``act_type``. ``None_`` is no
    activation.
    """

    None_ = 0
    ReLU = 1
    Sigmoid = 2
    LeakyReLU = 3


gemm = SimpleNamespace(Activation=Activation)
