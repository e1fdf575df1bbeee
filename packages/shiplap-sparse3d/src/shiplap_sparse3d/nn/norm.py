"""Batch norm over voxels: as ``torch.nn.BatchNorm1d`` over rows, and blind to padding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shiplap_sparse3d.nn.container import SparseModule
from shiplap_sparse3d.tensor import SparseTensor

__all__ = ["BatchNorm", "running_norm"]


class BatchNorm(nn.BatchNorm1d, SparseModule):
    """``torch.nn.BatchNorm1d`` over the voxels of a tensor, with its arguments, buffers and state dict.

    Padding rows count for nothing and become zeros. How many rows are voxels stays on the device, so nothing waits for
    it. Scenes without voxels change no statistics, and a single voxel, where torch refuses, has variance zero.
    """

    def forward(self, x: SparseTensor) -> SparseTensor:  # type: ignore[override]
        batch = self.training or not self.track_running_stats
        if torch.compiler.is_compiling():  # torch's own asks how many rows there are, which a graph may not know
            return x.replace(self._over(x.feats, x.is_voxel) if batch else self._running(x.feats))
        if batch and (x.geometry.padded or x.feats.shape[0] < 2):
            return x.replace(self._over(x.feats, x.is_voxel))
        return x.replace(super().forward(x.feats))

    def _over(self, feats: Tensor, keep: Tensor) -> Tensor:
        """``feats`` normalised by the statistics of the rows to ``keep``, which are learned from, too."""
        wide = feats.to(torch.promote_types(feats.dtype, torch.float32))
        voxels = keep.sum()
        count = voxels.clamp_min(1).to(wide.dtype)
        mean = torch.where(keep, wide, 0).sum(0) / count
        centred = torch.where(keep, wide - mean, 0)
        var = centred.square().sum(0) / count
        if self.training and self.track_running_stats:
            self._learn(voxels, mean.detach(), var.detach() * count / (count - 1).clamp_min(1))
        return torch.where(keep, _scaled(centred, var, self.weight, self.bias, self.eps), 0).to(feats.dtype)

    def _running(self, feats: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        return running_norm(feats, self.running_mean, self.running_var, self.weight, self.bias, self.eps)

    @torch.no_grad()
    def _learn(self, count: Tensor, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics towards those of a batch, unless it is empty."""
        assert self.num_batches_tracked is not None
        any_voxel = count > 0
        self.num_batches_tracked.add_(any_voxel.to(torch.int64))
        step = 1 / self.num_batches_tracked.clamp_min(1) if self.momentum is None else self.momentum
        for running, seen in ((self.running_mean, mean), (self.running_var, var)):
            assert running is not None
            moved = running + (seen.to(running.dtype) - running) * step
            running.copy_(torch.where(any_voxel, moved, running))


def running_norm(
    feats: Tensor, mean: Tensor, var: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float
) -> Tensor:
    """``feats`` ``[n, c]`` normalised by running statistics. ``conv_norm_sparse3d`` looks for what this computes."""
    wide = feats.to(torch.promote_types(feats.dtype, mean.dtype))
    return _scaled(wide - mean, var, scale, shift, eps).to(feats.dtype)


def _scaled(centred: Tensor, var: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float) -> Tensor:
    out = centred * torch.rsqrt(var + eps)
    return out if scale is None or shift is None else out * scale + shift
