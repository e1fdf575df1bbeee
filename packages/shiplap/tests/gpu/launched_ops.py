"""Ops whose CUDA kernels are plain Triton functions, one ``sl.triton`` each: what a user would write."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import shiplap as sl


@triton.jit
def softmax_kernel(x, out, m, stride_x_0, stride_x_1, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row.to(tl.int64) * stride_x_0 + at * stride_x_1, mask=at < m, other=-float("inf")).to(
        tl.float32
    )
    grown = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row.to(tl.int64) * m + at, grown / tl.sum(grown, axis=0), mask=at < m)


@sl.op("launched_gpu::softmax", requires=("m >= 1", "m <= 65536"))
def softmax(x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    """Softmax along the rows."""
    return torch.softmax(x, dim=-1)


softmax.kernel(
    "cuda",
    sl.triton(softmax_kernel, grid="n", arguments={"BLOCK": "pow2ceil(m)"}, constants={"num_warps": 8}),
    dtypes=("float32", "float16", "bfloat16"),
)


@triton.jit
def layer_norm_kernel(x, weight, bias, out, m, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    value = tl.load(x + row * m + at, mask=at < m, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / m
    centred = tl.where(at < m, value - mean, 0.0)
    y = centred / tl.sqrt(tl.sum(centred * centred, axis=0) / m + eps)
    if weight is not None:
        y *= tl.load(weight + at, mask=at < m, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + at, mask=at < m, other=0.0).to(tl.float32)
    tl.store(out + row * m + at, y, mask=at < m)


@sl.op("launched_gpu::layer_norm", requires=("m >= 1", "m <= 65536"))
def layer_norm(
    x: Float[Tensor, "n m"],
    weight: Float[Tensor, "m"] | None = None,
    bias: Float[Tensor, "m"] | None = None,
    eps: float = 1e-5,
) -> Float[Tensor, "n m"]:
    """Layer norm along the rows. ``eps`` is positive."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


layer_norm.kernel(
    "cuda",
    sl.triton(layer_norm_kernel, grid="n", arguments={"BLOCK": "pow2ceil(m)"}),
    dtypes=("float32", "float16", "bfloat16"),
)


@triton.jit
def linear_gelu_kernel(
    x, weight, bias, out, n, k, m,
    stride_x_0, stride_x_1, stride_weight_0, stride_weight_1,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k, BK):
        inner = start + tl.arange(0, BK)
        a_at = rows[:, None].to(tl.int64) * stride_x_0 + inner[None, :] * stride_x_1
        b_at = columns[None, :].to(tl.int64) * stride_weight_0 + inner[:, None] * stride_weight_1
        a = tl.load(x + a_at, mask=(rows[:, None] < n) & (inner[None, :] < k), other=0.0)
        b = tl.load(weight + b_at, mask=(columns[None, :] < m) & (inner[:, None] < k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    acc += tl.load(bias + columns, mask=columns < m, other=0.0).to(tl.float32)[None, :]
    acc = acc * 0.5 * (1.0 + tl.erf(acc * 0.7071067811865476))
    at = rows[:, None].to(tl.int64) * m + columns[None, :]
    tl.store(out + at, acc, mask=(rows[:, None] < n) & (columns[None, :] < m))


@sl.op("launched_gpu::linear_gelu")
def linear_gelu(
    x: Float[Tensor, "n k"], weight: Float[Tensor, "m k"], bias: Float[Tensor, "m"]
) -> Float[Tensor, "n m"]:
    """GELU of a linear layer."""
    return F.gelu(F.linear(x, weight, bias))


TILES = [(64, 64, 32, 4), (128, 64, 32, 8), (32, 32, 32, 2)]
linear_gelu.kernel(
    "cuda",
    sl.triton(
        linear_gelu_kernel,
        grid=("cdiv(n, BM)", "cdiv(m, BN)"),
        configs=[{"BM": bm, "BN": bn, "BK": bk, "num_warps": w, "num_stages": 3} for bm, bn, bk, w in TILES],
    ),
    dtypes=("float32", "float16", "bfloat16"),
)


@triton.jit
def momentum_kernel(param, grad, velocity, lr, momentum, decay, n, NESTEROV: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    p = tl.load(param + at, mask=inside)
    g = tl.load(grad + at, mask=inside) + decay * p
    v = tl.load(velocity + at, mask=inside) * momentum + g
    step = g + momentum * v if NESTEROV else v
    tl.store(velocity + at, v, mask=inside)
    tl.store(param + at, p - lr * step, mask=inside)


@sl.op("launched_gpu::momentum_", mutates=("param", "velocity"))
def momentum_(
    param: Float[Tensor, "n"],
    grad: Float[Tensor, "n"],
    velocity: Float[Tensor, "n"],
    lr: float,
    momentum: float = 0.9,
    decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """One step of SGD with momentum, in place."""
    g = grad + decay * param
    velocity.mul_(momentum).add_(g)
    param.sub_(lr * (g + momentum * velocity if nesterov else velocity))


momentum_.kernel(
    "cuda",
    sl.triton(
        momentum_kernel,
        grid="cdiv(n, BLOCK)",
        arguments={"NESTEROV": "nesterov"},
        constants={"BLOCK": 1024},
    ),
    dtypes="float32",
)
OPS = (softmax, layer_norm, linear_gelu, momentum_)
