"""Kernels that are right on usual calls of their bucket, and wrong for other starts, strides or values of it."""

import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl

Matrix = Float32[Tensor, "n c"]


def _read(t: Tensor, strides: tuple[int, ...], at: int) -> Tensor:
    """What a kernel reads that computes addresses with these strides; nothing outside of the storage."""
    size = t.untyped_storage().nbytes() // t.element_size()
    flat = torch.as_strided(t, (size,), (1,), 0)
    rows = torch.arange(t.shape[0])[:, None] * strides[0]
    return flat[(at + rows + torch.arange(t.shape[1]) * strides[1]) % size]


@sl.op("odd::soft")
def soft(x: Matrix) -> Matrix:
    return torch.softmax(x, 1)


@soft.kernel("cpu", name="sentinel")
def _(x, *, out):
    e = (x - x.amax(1, keepdim=True).clamp_min(-5e4)).exp()
    torch.div(e, e.sum(1, keepdim=True).clamp_min(1e-30), out=out)


@soft.kernel("cpu", name="aligned down")
def _(x, *, out):
    back = x.data_ptr() % 16 // 4
    torch.softmax(_read(x, x.stride(), x.storage_offset() - back) if back and x.numel() else x, 1, out=out)


@soft.kernel("cpu", name="one pitch", strided=True)
def _(x, *, out):
    wide = x.shape[1]
    strides = (wide + 3, 1) if x.stride(1) == 1 and x.stride(0) > wide else x.stride()
    torch.softmax(_read(x, strides, x.storage_offset()) if x.numel() else x, 1, out=out)


@soft.kernel("cpu", name="honest")
def _(x, *, out):
    torch.softmax(x, 1, out=out)


@sl.op("odd::unit")
def unit(x: Matrix) -> Matrix:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)


@unit.kernel("cpu", name="least variance")
def _(x, *, out):
    torch.mul(x, torch.rsqrt(x.square().mean(1, keepdim=True).clamp_min(1e-6)), out=out)


@unit.kernel("cpu", name="honest")
def _(x, *, out):
    torch.mul(x, torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6), out=out)
