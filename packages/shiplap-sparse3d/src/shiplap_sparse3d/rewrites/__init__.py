"""Rewrites of sparse networks: the batch norm behind a convolution goes into its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import BFloat16, Float16, Float32
from torch import Tensor
from torch.nn import functional as F

from shiplap.plugin_api.rewriting import FoldedNorm, Program, norm_statistics
from shiplap_sparse3d import ops
from shiplap_sparse3d.row_norms import running_norm

__all__ = ["conv_norm_sparse3d"]

# The classes with which a pattern states a dtype.
KINDS = {torch.float32: Float32, torch.bfloat16: BFloat16, torch.float16: Float16}


def _written_norm(kind: Any) -> Callable[..., Tensor]:
    """Return ``sparse3d.BatchNorm`` in evaluation as a function of tensors whose annotations have the dtype ``kind``.
    The rewrite that folds a norm into a convolution searches compiled code for this computation. The dtype determines
    which casts the code has.
    """

    def norm(x: Tensor, mean: Tensor, var: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
        """Return ``x`` normalised by running statistics, ``(x - mean) / sqrt(var + eps) * scale + shift``."""
        return running_norm(x, mean, var, scale, shift, eps)

    norm.__annotations__ |= dict.fromkeys(("mean", "var", "scale", "shift"), kind[Tensor, "c"])
    norm.__annotations__["x"] = kind[Tensor, "n c"]
    return norm


def _norm_examples() -> Iterator[Program]:
    """Yield programs (functions with example arguments) that contain a sparse convolution followed by a batch norm. The
    rewrite must find both in each of them. Two use torch's batch norm, with and without a bias of the convolution, and
    the last one uses ``sparse3d.BatchNorm``.
    """
    rng = torch.Generator().manual_seed(0)
    columns = [torch.randperm(7, generator=rng) for _ in range(3)]  # no row twice under one tap
    table = torch.stack([torch.where(c < 5, c, -1) for c in columns], 1).int()
    args = [torch.randn(5, 4), torch.randn(6, 3, 4) / 4, table, *norm_statistics(6)]
    for more in ([torch.randn(6)], []):
        yield Program(_conv_batch_norm, (*args, *more), f"{len(more)} bias")
    yield Program(_conv_running_norm, tuple(args), "sparse3d.BatchNorm")


def _conv_batch_norm(
    feats: Tensor,
    weight: Tensor,
    table: Tensor,
    mean: Tensor,
    var: Tensor,
    scale: Tensor,
    shift: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Return a sparse convolution over the neighbour ``table``, followed by torch's batch norm in evaluation with the
    given statistics. ``scale`` and ``shift`` are the norm's weight and bias. This is an example that the rewrite
    ``conv_norm_sparse3d`` must find in a graph.
    """
    out = ops.conv(feats, weight, table, bias)
    return F.batch_norm(out, mean.detach(), var.detach(), scale, shift, False, 0.1, 1e-3)


def _conv_running_norm(
    feats: Tensor, weight: Tensor, table: Tensor, mean: Tensor, var: Tensor, scale: Tensor, shift: Tensor
) -> Tensor:
    """Return a sparse convolution over the neighbour ``table``, followed by ``sparse3d.BatchNorm`` in evaluation with
    the given statistics. ``scale`` and ``shift`` are the norm's weight and bias. This is an example that the rewrite
    ``conv_norm_sparse3d`` must find in a graph.
    """
    return running_norm(ops.conv(feats, weight, table), mean, var, scale, shift, 1e-3)


conv_norm_sparse3d = FoldedNorm(
    "conv_norm_sparse3d",
    ops.conv.spec.name,
    ops.conv.overload,
    _norm_examples,
    written_out={dtype: _written_norm(kind) for dtype, kind in KINDS.items()},
)
"""Any sparse convolution and an evaluated norm over its rows: ``torch.nn.BatchNorm1d`` or ``sparse3d.BatchNorm``."""
