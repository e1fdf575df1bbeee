"""A batch norm and the ReLU behind it as one op: on a GPU, by running statistics, where the result between is unused.

Networks of spconv's users are bound by the CPU. Two modules of PyTorch are some six kernels in float16, with as many
calls, in every layer of a detector's backbone. The op is a single one (docs/consumers.md, "Where the time goes").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shiplap.plugin_api import is_hooked
from shiplap_sparse3d.norms import norm_relu

__all__ = ["norm_and_relu"]

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))  # of the kernel


def norm_and_relu(norm: nn.BatchNorm1d, relu: nn.Module, input: Any) -> Tensor | None:
    """Return the features of the sparse tensor ``input`` after batch norm and ReLU, computed by one kernel on a GPU.
    Return None if the kernel cannot be used, so that the caller has to call ``norm`` and ``relu``.

    The kernel cannot be used in training, in grad mode, on the CPU, without voxels, for other dtypes than its own, and
    if a module has hooks.
    """
    feats, mean, var = getattr(input, "_features", None), norm.running_mean, norm.running_var
    weight, bias = norm.weight, norm.bias
    if feats is None or norm.training or torch.is_grad_enabled():
        return None
    if mean is None or var is None or weight is None or bias is None:
        return None
    if not _on_gpu(feats) or feats.dtype not in _DTYPES or not feats.dtype == mean.dtype == weight.dtype:
        return None
    # The kernel would skip the hooks.
    if feats.shape[0] == 0 or feats.shape[1] != mean.shape[0] or is_hooked(norm) or is_hooked(relu):
        return None
    made: Tensor = norm_relu(feats, mean, var, weight, bias, norm.eps)
    return made


def _on_gpu(tensor: Tensor) -> bool:
    """Return whether ``tensor`` lies on a GPU."""
    return tensor.is_cuda
