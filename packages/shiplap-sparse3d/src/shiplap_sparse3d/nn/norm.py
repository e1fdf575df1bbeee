"""Batch norm over voxels: as ``torch.nn.BatchNorm1d`` over rows, and blind to padding; over those of all ranks, too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shiplap_sparse3d import pooling, row_norms
from shiplap_sparse3d.coords import other_channels
from shiplap_sparse3d.nn.module import SparseModule
from shiplap_sparse3d.tensor import SparseTensor

__all__ = ["BatchNorm", "InstanceNorm", "SyncBatchNorm"]


class BatchNorm(nn.BatchNorm1d, SparseModule):
    """A batch norm over the voxels of a sparse tensor, with the arguments, buffers and state dict of
    ``torch.nn.BatchNorm1d``.

    Padding rows are not counted and become zeros. The number of voxels stays on the device, so nothing waits for it.
    Scenes without voxels change no statistics. A single voxel, which torch refuses, has variance zero.
    """

    def forward(self, x: SparseTensor) -> SparseTensor:  # type: ignore[override]
        """Return ``x`` with its features normalised per channel. In training, and if there are no running statistics,
        the statistics are those of the voxels of ``x`` without padding. Otherwise they are the running ones. Raise
        ``SL202`` for another number of channels.
        """
        self._check_gradient(x)
        if x.feats.size(1) != self.num_features:
            raise other_channels(type(self).__name__, x.feats, self.num_features, "num_features")
        batch = self.training or not self.track_running_stats
        if torch.compiler.is_compiling():  # torch's own asks how many rows there are, which a graph may not know
            return x.replace(batch_norm(self, x.feats, x.is_voxel) if batch else self._running_norm(x.feats))
        # torch's own function refuses a single row in training.
        if batch and (x.geometry.padded or x.feats.shape[0] < 2 or self._has_mixed_dtypes):
            return x.replace(batch_norm(self, x.feats, x.is_voxel))
        return x.replace(self._running_norm(x.feats) if self._has_mixed_dtypes else super().forward(x.feats))

    @property
    def _has_mixed_dtypes(self) -> bool:
        """Whether the weight and the running statistics differ in dtype, as under a mixed-precision policy of FSDP2.
        ``torch.nn.BatchNorm1d`` refuses such a mix.
        """
        weight, mean = self.weight, self.running_mean
        return weight is not None and mean is not None and weight.dtype != mean.dtype

    def _running_norm(self, feats: Tensor) -> Tensor:
        """Return ``feats [n, c]`` normalised by the running statistics, then multiplied by the weight and shifted by
        the bias.
        """
        assert self.running_mean is not None
        assert self.running_var is not None
        return row_norms.running_norm(feats, self.running_mean, self.running_var, self.weight, self.bias, self.eps)


class InstanceNorm(SparseModule):
    """An instance norm over the voxels of each scene, as ``torch.nn.InstanceNorm3d`` computes it. Padding rows are not
    counted and become zeros.

    Args:
        num_features: channels.
        eps: added to the variance.
        affine: whether to learn a weight and a bias for each channel.

    Shape: ``feats [n, num_features] -> [n, num_features]`` on the same voxels.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, affine: bool = False, device: Any = None, dtype: Any = None
    ) -> None:
        """Set the number of features and ``eps``. If ``affine`` is true, also create the weight and the bias, which are
        None otherwise. ``device`` and ``dtype`` are those of both.
        """
        super().__init__()
        self.num_features, self.eps = self._whole_number(num_features, "num_features", 0), eps
        self.weight = nn.Parameter(torch.ones(num_features, device=device, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype)) if affine else None

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return ``x`` with its features normalised per channel over the voxels of each scene, and zeros for padding.
        Raise ``SL202`` for another number of channels.
        """
        self._check_axes(x, x.geometry.ndim)
        if x.feats.shape[1] != self.num_features:
            raise other_channels("InstanceNorm", x.feats, self.num_features, "num_features")
        coords, scenes, wide = x.geometry.coords, x.batch_size, torch.promote_types(x.feats.dtype, torch.float32)
        # Padding reads the statistics of scene 0, and becomes zeros at the end.
        scene, feats = coords[:, 0].long().clamp_min(0), torch.where(x.is_voxel, x.feats.to(wide), 0)
        # Deviations from the mean come first, since a difference of large sums loses digits.
        centred = feats - pooling.global_pool(feats, coords, scenes).index_select(0, scene)
        var = pooling.global_pool(centred.square(), coords, scenes).index_select(0, scene)
        out = row_norms.scale_and_shift(centred, var, self.weight, self.bias, self.eps)
        return x.replace(torch.where(x.is_voxel, out, 0).to(x.feats.dtype))

    def extra_repr(self) -> str:
        """Return the number of channels, ``eps`` and whether there are a weight and a bias, as a string for the
        module's ``repr``.
        """
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"


class SyncBatchNorm(BatchNorm):
    """A :class:`BatchNorm` with statistics over the voxels of all ranks, in which every voxel has equal weight.

    As with ``torch.nn.SyncBatchNorm``, every rank must take part in each forward and backward pass of training, also a
    rank without voxels. In evaluation the layer works as :class:`BatchNorm`, and without running statistics it uses
    those of the rank's own voxels. With a single rank, and without a process group, the layer always works as
    :class:`BatchNorm`. It supports every device for which the process group has a backend.

    Shapes: features ``[voxels, num_features]`` in and out.

    Args:
        args, options: as for :class:`BatchNorm`.
        process_group: the ranks that share statistics, by default all ranks.

    Raises:
        ShiplapError: ``SL215`` for an input that enters or leaves a reentrant checkpoint.
    """

    def __init__(self, *args: Any, process_group: Any = None, **options: Any) -> None:
        """Set the ranks that share statistics, or None for all ranks. The other arguments are those of
        :class:`BatchNorm`.
        """
        super().__init__(*args, **options)
        self.process_group = process_group

    def forward(self, x: SparseTensor) -> SparseTensor:  # type: ignore[override]
        """Return ``x`` with its features normalised per channel by the statistics of the voxels of all ranks. In
        evaluation, or in a single process, return the result of :class:`BatchNorm`.
        """
        self._check_gradient(x)
        return x.replace(shared_norm(self, x)) if shares_statistics(self) else super().forward(x)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replace the batch norms in ``module``, in place, by batch norms that share their statistics between ranks.
        Return ``module``, or its replacement if it is a batch norm itself.

        A :class:`BatchNorm` becomes a :class:`SyncBatchNorm`, and a batch norm of torch becomes a
        ``torch.nn.SyncBatchNorm``. The function of the same name in torch would replace both by a
        ``torch.nn.SyncBatchNorm``, which accepts a ``SparseTensor`` only inside :class:`Sequential`.

        Args:
            module: the network. If it is a batch norm itself, use the returned module.
            process_group: the ranks that share statistics, by default all ranks.
        """
        if isinstance(module, BatchNorm):
            return cls._from_norm(module, process_group)
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            torchs: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
            return torchs
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
        return module

    @classmethod
    def _from_norm(cls, norm: BatchNorm, process_group: Any) -> SyncBatchNorm:
        """Return an instance that holds the parameters, the buffers and the settings of ``norm``. The parameters and
        the buffers are shared and not copied. As in torch, the hooks of ``norm`` are left out.
        """
        # On ``meta``, since the parameters and buffers are replaced at once.
        made = cls(norm.num_features, norm.eps, norm.momentum, process_group=process_group, device="meta")
        made.affine, made.track_running_stats = norm.affine, norm.track_running_stats
        made._parameters, made._buffers = norm._parameters, norm._buffers
        made.training = norm.training
        return made


def shares_statistics(norm: SyncBatchNorm | nn.SyncBatchNorm) -> bool:
    """Return whether ``norm`` uses the statistics of a batch that several processes share. It does in training, if
    there is a process group with more than one process. In evaluation it does not, as in torch, so that one process can
    evaluate alone.
    """
    if not norm.training:
        return False
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(norm.process_group) > 1


def shared_norm(norm: SyncBatchNorm | nn.SyncBatchNorm, x: SparseTensor) -> Tensor:
    """Return the features of ``x``, ``[n, c]``, normalised by the statistics of the voxels of all ranks in
    ``norm.process_group``. In training, update the running statistics of ``norm``.
    """
    group = norm.process_group

    def total(part: Tensor) -> Tensor:
        """Return the sum of ``part`` over the ranks of ``group``, the process group of the enclosing function's
        ``norm``. The sum is differentiable.
        """
        summed: Tensor = _RankTotal.apply(part, group)
        return summed

    return batch_norm(norm, x.feats, x.is_voxel, total)


class _RankTotal(torch.autograd.Function):
    """The sum of a tensor over the ranks of a process group. Its gradient is the sum of the gradients of all ranks,
    since each rank uses the sum.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        """Return the sum of ``part`` over the ranks of ``group``, and store ``group`` for the backward pass. ``part``
        is not changed.
        """
        ctx.group = group
        # ``all_reduce`` works in place, and the caller still needs its tensor.
        summed = part.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sum of ``grad`` over the ranks of the group, and None for the argument ``group``. The gradients
        are summed because the tensor of each rank affects the results of all ranks. The sum can be differentiated
        again.
        """
        summed: Tensor = _RankTotal.apply(grad.contiguous(), ctx.group)
        return summed, None


def batch_norm(
    norm: nn.BatchNorm1d | nn.SyncBatchNorm,
    feats: Tensor,
    keep: Tensor,
    total: row_norms.Total = lambda part: part,
) -> Tensor:
    """Return ``feats [n, c]`` normalised by the statistics of the rows that ``keep`` (``bool [n, 1]``) selects. In
    training, update the running statistics of ``norm`` with them. ``total`` sums a tensor over all processes that share
    the statistics, and by default returns it unchanged.
    """
    out, voxels, *seen = row_norms.batch_norm(feats, keep, norm.weight, norm.bias, norm.eps, total)
    if norm.training and norm.track_running_stats:
        mean, var, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
        assert mean is not None
        assert var is not None
        assert batches is not None
        with torch.no_grad():
            # Without a voxel there was no batch to learn from.
            batches.add_((voxels > 0).to(torch.int64))
            # As in torch, a momentum of None is the average of all batches.
            step = 1 / batches.clamp_min(1) if norm.momentum is None else norm.momentum
        row_norms.update_running_stats(mean, var, step, voxels, *seen)
    return out
