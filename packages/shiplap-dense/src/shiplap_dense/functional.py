"""The functions that a model calls: the ops under PyTorch's own conventions."""

from __future__ import annotations

from torch import Tensor

from shiplap_dense import ops

__all__ = ["conv2d", "grouped_matmul", "matmul", "matmul_int8"]


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias``.

    Args:
        a: ``[..., m, k]``, any strides.
        b: ``[k, n]``, or ``[..., k, n]`` with the leading sizes of ``a``.
        bias: ``[n]``, only with a 2-D ``b``.

    Returns:
        ``[..., m, n]``, contiguous.
    """
    if b.dim() == 2:
        return ops.mm(a.reshape(-1, a.shape[-1]), b, bias).view(*a.shape[:-1], b.shape[1])
    out = ops.bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])).view(*a.shape[:-1], b.shape[-1])
    return out if bias is None else out + bias


def matmul_int8(a: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the result of a linear layer with weights of 8 bits: ``a @ (weight * scale[:, None]).T + bias``.

    Args:
        a: ``[..., k]``, floating.
        weight: ``[n, k]`` int8, as ``nn.Linear`` lays it out.
        scale: ``[n]``, one per output channel, of ``a``'s dtype.
        bias: ``[n]``.
    """
    return ops.int8_mm(a.reshape(-1, a.shape[-1]), weight, scale, bias).view(*a.shape[:-1], weight.shape[0])


def grouped_matmul(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return rows ``ends[i-1]:ends[i]`` of ``a`` ``[m, k]`` times ``b[i]`` of ``[g, k, n]``: a mixture of experts."""
    return ops.grouped_mm(a, b, ends)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """Return ``torch.nn.functional.conv2d`` without groups; ``torch.channels_last`` tensors are not copied.

    Args:
        x: ``[batch, ci, h, w]``.
        weight: ``[co, ci, kh, kw]``.

    Returns:
        ``[batch, co, ho, wo]`` in ``torch.channels_last``.
    """
    pair = [[v, v] if isinstance(v, int) else list(v) for v in (stride, padding, dilation)]
    out = ops.conv2d(x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1), bias, *pair)
    return out.permute(0, 3, 1, 2)
