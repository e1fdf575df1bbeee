"""Norms over the rows of sparse tensors as functions: statistics leave padding out, and no number of rows is asked for.

Torch's own batch norm and group norm branch on the number of rows, which a graph may not know. In graphs these take
their place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Total = Callable[[Tensor], Tensor]


def batch_norm(
    feats: Tensor,
    keep: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    total: Total = lambda part: part,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(out, rows, mean, var)``. ``out`` is ``feats [n, c]`` normalised by the statistics of the rows where the
    mask ``keep`` (``bool [n, 1]``) is true, with zeros in all other rows. It is multiplied by ``weight`` and shifted by
    ``bias`` unless these are None.

    ``rows`` is the number of rows to keep, ``mean`` is their mean and ``var`` their biased variance. ``total`` sums a
    tensor over all processes that share the statistics, and by default there is one process. Deviations are taken from
    the common mean, so a process with few rows loses no digits.
    """
    wide = feats.to(torch.promote_types(feats.dtype, torch.float32))
    # One tensor, so that processes exchange one message for both.
    sums = torch.cat([keep.sum()[None].to(wide.dtype), torch.where(keep, wide, 0).sum(0)])
    voxels, *_ = sums = total(sums)
    # Without any row the mean is zero, and not NaN.
    count = voxels.detach().clamp_min(1)
    mean = sums[1:] / count
    centred = torch.where(keep, wide - mean, 0)
    var = total(centred.square().sum(0)) / count
    out = torch.where(keep, scale_and_shift(centred, var, weight, bias, eps), 0).to(feats.dtype)
    return out, voxels.detach(), mean.detach(), var.detach()


@torch.no_grad()
def update_running_stats(
    running_mean: Tensor, running_var: Tensor, step: Tensor | float, voxels: Tensor, mean: Tensor, var: Tensor
) -> None:
    """Move the running statistics in place by the fraction ``step`` towards those of a batch. ``voxels``, ``mean`` and
    ``var`` are the batch's number of rows, their mean and their biased variance, as :func:`batch_norm` returns them.
    The running variance is unbiased. Without rows nothing changes.
    """
    # As in torch, running variances are unbiased, and those of the batch are not.
    unbiased = var * voxels.clamp_min(1) / (voxels - 1).clamp_min(1)
    for running, seen in ((running_mean, mean), (running_var, unbiased)):
        moved = running + (seen.to(running.dtype) - running) * step
        # A selection and no branch, since a graph does not know the number of rows.
        running.copy_(torch.where(voxels > 0, moved, running))


def running_norm(
    feats: Tensor, mean: Tensor, var: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float
) -> Tensor:
    """Return ``feats [n, c]`` normalised by the statistics ``mean`` and ``var``, then multiplied by ``scale`` and
    shifted by ``shift``. The rewrite ``conv_norm_sparse3d`` matches this computation.
    """
    wide = feats.to(torch.promote_types(feats.dtype, mean.dtype))
    return scale_and_shift(wide - mean, var, scale, shift, eps).to(feats.dtype)


def scale_and_shift(centred: Tensor, var: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float) -> Tensor:
    """Return ``centred / sqrt(var + eps) * scale + shift``. A factor or summand that is None is left out."""
    out = centred * torch.rsqrt(var + eps)
    out = out if scale is None else out * scale
    return out if shift is None else out + shift


def functional_batch_norm(
    feats: Tensor,
    keep: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return the result of ``torch.nn.functional.batch_norm`` for the rows where the mask ``keep`` (``bool [n, 1]``) is
    true, without a branch on the number of rows.

    If ``training`` is true, use the statistics of these rows, update the running statistics, and return zeros for the
    other rows. Otherwise use the running statistics for all rows, or proceed as in training if there are none. The
    other arguments are those of torch's function.
    """
    if not training and running_mean is not None and running_var is not None:
        return running_norm(feats, running_mean, running_var, weight, bias, eps)
    out, *seen = batch_norm(feats, keep, weight, bias, eps)
    if training and running_mean is not None and running_var is not None:
        update_running_stats(running_mean, running_var, momentum, *seen)
    return out


def functional_group_norm(
    feats: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return the result of ``torch.nn.functional.group_norm`` for rows ``[n, c]``, without a branch on the number of
    rows. The arguments are those of torch's function.
    """
    groups = feats.reshape(feats.shape[0], num_groups, feats.shape[1] // num_groups)
    # Each group of a row has statistics of its own, as a layer norm has for a row.
    out = torch.nn.functional.layer_norm(groups, groups.shape[2:], eps=eps).flatten(1)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias
