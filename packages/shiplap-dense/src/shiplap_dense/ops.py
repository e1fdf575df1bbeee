"""The declarations of the ops: shapes, references, gradients, samples. Templates are in ``cpu.py`` and ``cuda.py``."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int8, Int32
from torch import Tensor

import shiplap as sl

__all__ = ["bmm", "conv2d", "grouped_mm", "int8_mm", "mm"]

TUNED = ("cpu", "cuda")  # where torch calls a vendor's library


@sl.op("dense::mm", reference_is_fast_on=TUNED)
def mm(
    a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], bias: Float[Tensor, "n"] | None = None
) -> Float[Tensor, "m n"]:
    """Return the matrix product ``a @ b + bias``, rounded once. Without a ``bias`` nothing is added. Any strides are
    accepted, so transposed operands are not copied.
    """
    return a @ b if bias is None else torch.addmm(bias, a, b)


mm.batches("m", "n")


@mm.backward(strided=True)
def _(grad: Tensor, saved: Any, needs: Any) -> dict[str, Tensor]:
    """Return the gradients of the matrix product by argument name. The dict has those of ``a``, ``b`` and ``bias`` that
    autograd needs. ``grad`` is the gradient of the product.
    """
    gradients = {}
    if needs.a:
        gradients["a"] = mm(grad, saved.b.t())
    if needs.b:
        gradients["b"] = mm(saved.a.t(), grad)
    if needs.bias:
        gradients["bias"] = grad.sum(0)
    return gradients


@sl.op("dense::bmm", reference_is_fast_on=TUNED)
def bmm(a: Float[Tensor, "batch m k"], b: Float[Tensor, "batch k n"]) -> Float[Tensor, "batch m n"]:
    """Return the matrix product of ``a`` and ``b`` for each index of the batch. Any strides are accepted."""
    return torch.bmm(a, b)


bmm.batches("batch")


@bmm.backward(strided=True)
def _(grad: Tensor, saved: Any, needs: Any) -> dict[str, Tensor]:
    """Return the gradients of the batched product by argument name. The dict has those of ``a`` and ``b`` that autograd
    needs. ``grad`` is the gradient of the product.
    """
    gradients = {}
    if needs.a:
        gradients["a"] = bmm(grad, saved.b.mT)
    if needs.b:
        gradients["b"] = bmm(saved.a.mT, grad)
    return gradients


@sl.op("dense::int8_mm")
def int8_mm(
    a: Float[Tensor, "m k"],
    weight: Int8[Tensor, "n k"],
    scale: Float[Tensor, "n"],
    bias: Float[Tensor, "n"] | None = None,
) -> Float[Tensor, "m n"]:
    """Return ``a @ (weight * scale[:, None]).T + bias`` for 8-bit weights with one scale per output channel."""
    out = (a @ weight.to(a.dtype).t()) * scale
    return out if bias is None else out + bias


int8_mm.batches("m", "n")


@int8_mm.backward(strided=True)
def _(grad: Tensor, saved: Any, needs: Any) -> dict[str, Tensor]:
    """Return the gradients of the int8 product by argument name. The dict has those of ``a``, ``scale`` and ``bias``
    that autograd needs. ``grad`` is the gradient of the product. The 8-bit weights have no gradient.
    """
    gradients = {}
    if needs.a:
        gradients["a"] = mm(grad * saved.scale, saved.weight.to(grad.dtype))
    if needs.scale:
        gradients["scale"] = (grad * mm(saved.a, saved.weight.to(grad.dtype).t())).sum(0)
    if needs.bias:
        gradients["bias"] = grad.sum(0)
    return gradients


@int8_mm.samples
def _(rng: torch.Generator, sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return random activations, 8-bit weights, scales (one for each output feature) and a bias. They are one sample of
    arguments of ``int8_mm``.
    """
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    a, bias = torch.randn(m, k, generator=rng), torch.randn(n, generator=rng)
    weight = torch.randint(-127, 128, (n, k), generator=rng, dtype=torch.int8)
    scale = (0.5 + torch.rand(n, generator=rng)) / 127
    return (a.to(device, dtype), weight.to(device), scale.to(device, dtype), bias.to(device, dtype))


@sl.op("dense::grouped_mm")
def grouped_mm(a: Float[Tensor, "m k"], b: Float[Tensor, "g k n"], ends: Int32[Tensor, "g"]) -> Float[Tensor, "m n"]:
    """Return the products of rows ``ends[i-1]:ends[i]`` of ``a`` and ``b[i]``, as for tokens sorted by expert. Rows
    past ``ends[-1]`` give zeros. ``ends`` never decreases. An end above ``m`` counts as ``m``.
    """
    row = torch.arange(a.shape[0], device=a.device)
    group = torch.searchsorted(ends.to(torch.int64), row, right=True)
    products = a @ b if b.shape[0] else a.new_zeros(1, a.shape[0], b.shape[2])
    picked = products[group.clamp_max(max(b.shape[0] - 1, 0)), row]
    return torch.where((group < b.shape[0])[:, None], picked, 0)


@grouped_mm.samples
def _(rng: torch.Generator, sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return random rows, a random matrix for each group, and ascending ends of the groups. They are one sample of
    arguments of ``grouped_mm``.
    """
    m, k, n, g = sizes["m"], sizes["k"], sizes["n"], sizes["g"]
    a, b = torch.randn(m, k, generator=rng), torch.randn(g, k, n, generator=rng)
    ends = torch.randint(0, m + 1, (g,), generator=rng).sort().values.to(torch.int32)
    if torch.rand((), generator=rng) < 0.75:  # as a rule, every row belongs to a group
        ends[-1:] = m
    return a.to(device, dtype), b.to(device, dtype), ends.to(device)


@sl.op(
    "dense::conv2d",
    dims={
        "ho": "(h + 2 * padding[0] - dilation[0] * (kh - 1) - 1) // stride[0] + 1",
        "wo": "(w + 2 * padding[1] - dilation[1] * (kw - 1) - 1) // stride[1] + 1",
    },
    requires=(
        "min(stride) >= 1",
        "min(dilation) >= 1",
        "min(padding) >= 0",
        "len(stride) == 2",
        "len(padding) == 2",
        "len(dilation) == 2",
        "min(h, w, ci, co, kh, kw) >= 1",
        "h + 2 * padding[0] > dilation[0] * (kh - 1)",
        "w + 2 * padding[1] > dilation[1] * (kw - 1)",
    ),
    reference_is_fast_on=TUNED,
)
def conv2d(
    x: Float[Tensor, "batch h w ci"],
    weight: Float[Tensor, "co kh kw ci"],
    bias: Float[Tensor, "co"] | None = None,
    stride: list[int] = [1, 1],  # noqa: B006
    padding: list[int] = [0, 0],  # noqa: B006
    dilation: list[int] = [1, 1],  # noqa: B006
) -> Float[Tensor, "batch ho wo co"]:
    """Return the 2-D convolution, without groups, of ``x`` and ``weight``, plus ``bias`` if it is not None. The
    channels are the last dim of the operands and of the result.
    """
    out = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), bias, stride, padding, dilation)
    return out.permute(0, 2, 3, 1).contiguous()
