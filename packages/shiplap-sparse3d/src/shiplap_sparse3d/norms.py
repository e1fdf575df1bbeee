"""Batch norm by running statistics with the ReLU behind it as one op, for eager layers without gradients."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl

__all__ = ["norm_relu"]


@sl.op("sparse3d::norm_relu")
def norm_relu(
    feats: Float[Tensor, "n c"],
    mean: Float[Tensor, "c"],
    var: Float[Tensor, "c"],
    weight: Float[Tensor, "c"],
    bias: Float[Tensor, "c"],
    eps: float,
) -> Float[Tensor, "n c"]:
    """Return ``relu((feats - mean) / sqrt(var + eps) * weight + bias)``, computed in at least float32. NaN stays NaN.
    The op has no gradient. If one is needed, batch norm and ReLU of PyTorch are used.
    """
    wide = torch.promote_types(feats.dtype, torch.float32)
    x, mean, var, weight, bias = (t.to(wide) for t in (feats, mean, var, weight, bias))
    return ((x - mean) * torch.rsqrt(var + eps) * weight + bias).relu().to(feats.dtype)
