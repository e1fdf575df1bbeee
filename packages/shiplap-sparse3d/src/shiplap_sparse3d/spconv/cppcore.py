"""``spconv.pytorch.cppcore``: conversions between torch's tensors and tensorviews."""

from __future__ import annotations

import torch

from shiplap_sparse3d.spconv.tensorview import Tensor

__all__ = ["get_arch", "get_current_stream", "torch_tensor_to_tv", "torch_tensors_to_tv"]


def get_current_stream() -> int:
    """Return the handle of the current CUDA stream, or 0 without a GPU."""
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0


def get_arch() -> tuple[int, int]:
    """Return the compute capability (major, minor) of the current GPU, or (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def torch_tensor_to_tv(
    ten: torch.Tensor, dtype: torch.dtype | None = None, shape: list[int] | None = None, stride: list[int] | None = None
) -> Tensor:
    """Return a tensorview on the memory of ``ten``, without a copy. ``dtype``, ``shape`` and ``stride`` replace those
    of ``ten`` unless they are None. ``stride`` is read only if ``shape`` is given.
    """
    view = ten if dtype is None else ten.view(dtype)
    if shape is not None:
        view = view.view(shape) if stride is None else view.as_strided(shape, stride)
    return Tensor(view)


def torch_tensors_to_tv(*tens: torch.Tensor) -> tuple[Tensor, ...]:
    """Return a tuple with a tensorview on the memory of each of the torch tensors ``tens``."""
    return tuple(map(torch_tensor_to_tv, tens))
