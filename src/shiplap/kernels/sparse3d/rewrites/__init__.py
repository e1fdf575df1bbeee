"""Rewrites of sparse networks: the batch norm behind a convolution goes into its weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from shiplap.kernels.sparse3d import ops
from shiplap.rewrite import Program
from shiplap.rewrite.shipped import FoldedNorm
from shiplap.rewrite.shipped.conv_norm import statistics

__all__ = ["conv_norm_sparse3d"]


def _examples() -> Iterator[Program]:
    rng = torch.Generator().manual_seed(0)
    columns = [torch.randperm(7, generator=rng) for _ in range(3)]  # no row twice under one tap
    table = torch.stack([torch.where(c < 5, c, -1) for c in columns], 1).int()
    args = [torch.randn(5, 4), torch.randn(6, 3, 4) / 4, table, *statistics(6)]
    for more in ([torch.randn(6)], []):
        yield Program(_normed, (*args, *more), f"{len(more)} bias")


def _normed(
    feats: Tensor, weight: Tensor, table: Tensor, mean: Tensor, var: Tensor, scale: Tensor, shift: Tensor,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = ops.conv(feats, weight, table, bias)
    return F.batch_norm(out, mean.detach(), var.detach(), scale, shift, False, 0.1, 1e-3)


conv_norm_sparse3d = FoldedNorm("conv_norm_sparse3d", ops.conv.spec.name, ops.conv.overload, _examples)
"""Any sparse convolution and an evaluated ``torch.nn.BatchNorm1d`` over its rows."""
