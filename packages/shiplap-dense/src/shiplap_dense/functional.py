"""The functions that a model calls: the ops under PyTorch's own conventions."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_dense import losses, ops

__all__ = ["conv2d", "grouped_matmul", "linear_cross_entropy", "matmul", "matmul_int8"]


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias``.

    Args:
        a: ``[..., m, k]``, any strides.
        b: ``[k, n]``, or ``[..., k, n]`` with the leading sizes of ``a``.
        bias: ``[n]``, only with a 2-D ``b``, or None for no bias.

    Returns:
        ``[..., m, n]``, contiguous.
    """
    if b.dim() == 2:
        return ops.mm(_flattened(a, 1), b, bias).view(*a.shape[:-1], b.shape[1])
    out = ops.bmm(_flattened(a, 2), _flattened(b, 2)).view(*a.shape[:-1], b.shape[-1])
    return out if bias is None else out + bias


def matmul_int8(a: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the result of a linear layer with weights of 8 bits, which is ``a @ (weight * scale[:, None]).T + bias``.

    Args:
        a: ``[..., k]``, floating.
        weight: ``[n, k]`` int8, as ``nn.Linear`` lays it out.
        scale: ``[n]``, one per output channel, of ``a``'s dtype.
        bias: ``[n]``.
    """
    return ops.int8_mm(_flattened(a, 1), weight, scale, bias).view(*a.shape[:-1], weight.shape[0])


def grouped_matmul(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return the products of rows ``ends[i-1]:ends[i]`` of ``a`` ``[m, k]`` and ``b[i]`` of ``b`` ``[g, k, n]``, as in
    a mixture of experts. The result is ``[m, n]``. Rows past the last end are zeros.
    """
    return ops.grouped_mm(a, b, ends)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """Return ``torch.nn.functional.conv2d`` without groups, computed with channels last. Tensors in
    ``torch.channels_last`` are not copied. The other arguments are those of that function.

    Args:
        x: ``[batch, ci, h, w]``.
        weight: ``[co, ci, kh, kw]``.

    Returns:
        ``[batch, co, ho, wo]`` in ``torch.channels_last``.
    """
    pair = [[v, v] if isinstance(v, int) else list(v) for v in (stride, padding, dilation)]
    out = ops.conv2d(x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1), bias, *pair)
    return out.permute(0, 3, 1, 2)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``F.cross_entropy(F.linear(hidden, weight, bias).float(), target)`` without the logits of all rows.

    In training, a mean or a sum computes its gradients together with the loss, and stores these instead of the tensors
    that the backward would need. ``"none"`` and float16 compute logits again in the backward. A second derivative is
    refused (``SL313``). float64 is computed by torch, with logits.

    Args:
        hidden: ``[..., h]``.
        weight: ``[v, h]``, of the dtype of ``hidden``.
        target: ``[...]``, int64 classes.
        bias: ``[v]``, or None for no bias.
        reduction: ``"mean"`` or ``"sum"`` of the losses, or ``"none"`` for one loss per target.
        ignore_index: a target that does not count.
        label_smoothing: between 0 and 1, as in torch.
        lse_square_scale: the factor of ``logsumexp(logits) ** 2``, which is added to each loss.
        softcap: logits are ``softcap * tanh(logits / softcap)``. With None they are not capped.
        accum_dtype: ``torch.float32`` adds up the gradient of a bfloat16 weight in float32, and needs that memory. It
            has no effect with ``"none"`` and on float16.

    Returns:
        A float32 number, or with ``"none"`` float32 ``[...]``.
    """
    if reduction not in ("mean", "sum", "none"):
        where = "linear_cross_entropy, argument 'reduction'"
        raise error("SL208", where=where, got=repr(reduction), expected="'mean', 'sum' or 'none'")
    if accum_dtype not in (None, hidden.dtype, torch.float32):
        where = "linear_cross_entropy, argument 'accum_dtype'"
        raise error("SL204", where=where, got=str(accum_dtype), expected="torch.float32 or None")
    if target.dim() > 1 and target.shape != hidden.shape[:-1]:
        got = f"targets {tuple(target.shape)} for hidden states {tuple(hidden.shape)}"
        where = "linear_cross_entropy, argument 'target'"
        raise error("SL202", where=where, got=got, expected="a target for each row of hidden states")
    rows, wanted = _flattened(hidden, 1), target.reshape(-1)
    options = (ignore_index, label_smoothing, lse_square_scale, softcap or 0.0)
    asked = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (rows, weight, bias)]
    kind = rows.device.type
    casts = torch.is_autocast_enabled(kind) and rows.dtype != torch.float64  # which autocast leaves as it is
    dtype = torch.get_autocast_dtype(kind) if casts else rows.dtype
    # The gradients of a mean or a sum are known but for one factor, so they are computed with the loss.
    if any(asked) and reduction != "none" and dtype in (torch.float32, torch.bfloat16):
        flags = (*map(int, asked), int(accum_dtype == torch.float32))
        return losses.linear_cross_entropy_with_gradients(rows, weight, wanted, bias, reduction, *options, *flags)[0]
    op = losses.linear_cross_entropy.reference if dtype == torch.float64 else losses.linear_cross_entropy
    each = op(rows, weight, wanted, bias, *options)
    if reduction == "none":
        return each.view(target.shape)
    return each.sum() if reduction == "sum" else each.sum() / (wanted != ignore_index).sum()


def _flattened(x: Tensor, kept: int) -> Tensor:
    """Return ``x`` with all dims but the last ``kept`` ones joined into one. ``reshape(-1, ...)`` would refuse a tensor
    of which one of the last dims is empty.
    """
    return x.reshape(math.prod(x.shape[:-kept]), *x.shape[-kept:])
