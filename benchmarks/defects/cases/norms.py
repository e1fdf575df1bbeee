"""Normalisations and softmaxes."""

import torch
from jaxtyping import BFloat16, Bool, Float, Float16, Float32
from torch import Tensor

import shiplap as sl

from ..registry import address_view, case


# https://github.com/pytorch/pytorch/issues/40302
@case("pytorch/pytorch#40302", "the variance is the difference of two moments in float32, which cancel")
def layer_norm(
    x: Float32[Tensor, "n c"], weight: Float32[Tensor, "c"], bias: Float32[Tensor, "c"], eps: float = 1e-5
) -> Float32[Tensor, "n c"]:
    """Layer normalisation of rows."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


LAYER_NORM = """
#include <cmath>
int layer_norm_rows(const sl_context*, const DLTensor* x, const DLTensor* weight, const DLTensor* bias, DLTensor* out,
                    double eps) {
  const int64_t n = x->shape[0], c = x->shape[1];
  const float *w = static_cast<const float*>(weight->data), *b = static_cast<const float*>(bias->data);
  for (int64_t r = 0; r < n; r++) {
    const float* row = static_cast<const float*>(x->data) + r * c;
    float* to = static_cast<float*>(out->data) + r * c;
    $MOMENTS
    const float rstd = 1.0f / std::sqrt(var + static_cast<float>(eps));
    for (int64_t i = 0; i < c; i++) to[i] = (row[i] - mean) * rstd * w[i] + b[i];
  }
  return SL_OK;
}
"""
ONE_PASS = """float sum = 0, squares = 0;
    for (int64_t i = 0; i < c; i++) { sum += row[i]; squares += row[i] * row[i]; }
    const float mean = sum / c, var = squares / c - mean * mean;"""
TWO_PASSES = """float sum = 0, squares = 0;
    for (int64_t i = 0; i < c; i++) sum += row[i];
    const float mean = sum / c;
    for (int64_t i = 0; i < c; i++) squares += (row[i] - mean) * (row[i] - mean);
    const float var = squares / c;"""
layer_norm.kernels("layer_norm_rows", LAYER_NORM, MOMENTS=(ONE_PASS, TWO_PASSES))


# https://github.com/nntrainer/nntrainer/issues/3935
@case("nntrainer/nntrainer#3935", "squares are taken in float16, where they overflow from 256 on")
def rms_norm_half(x: Float16[Tensor, "n c"], weight: Float16[Tensor, "c"], eps: float = 1e-6) -> Float16[Tensor, "n c"]:
    """Root mean square normalisation, computed in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


@rms_norm_half.broken.kernel("cpu")
def _(x, weight, eps):
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True, dtype=torch.float32) + eps)
    return (x.float() * scale * weight).to(x.dtype)


@rms_norm_half.sound.kernel("cpu")
def _(x, weight, eps):
    wide = x.float()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


# https://github.com/linkedin/Liger-Kernel/pull/950
@case("linkedin/Liger-Kernel#950", "the gradient of the weight is summed over rows in bfloat16")
def rms_norm_train(x: Float[Tensor, "n c"], weight: Float[Tensor, "c"], eps: float = 1e-6) -> Float[Tensor, "n c"]:
    """Root mean square normalisation, to be trained."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@rms_norm_train.broken.kernel("cpu")
@rms_norm_train.sound.kernel("cpu")
def _(x, weight, eps):
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * weight


def _column_sums(x: Float[Tensor, "n c"]) -> Float[Tensor, "c"]:
    return x.sum(0)


column_sums_narrow = sl.op("defects_parts::column_sums_narrow")(_column_sums)
column_sums_wide = sl.op("defects_parts::column_sums_wide")(_column_sums)


@column_sums_narrow.kernel("cpu")
def _(x, *, out):
    out.zero_()
    for row in x:
        out.add_(row)


@column_sums_wide.kernel("cpu")
def _(x, *, out):
    total = torch.zeros(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    for row in x:
        total.add_(row)
    out.copy_(total)


def _rms_backward(column_sums):
    def backward(grad, saved, needs):
        x, weight = saved.x, saved.weight
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + saved.eps)
        normal, inner = x * scale, grad * weight
        return {
            "x": scale * (inner - normal * (inner * normal).mean(-1, keepdim=True)),
            "weight": column_sums(grad * normal),
        }

    return backward


for _sums in (column_sums_narrow, column_sums_wide):

    @_sums.backward
    def _(grad, saved, needs):
        return {"x": grad.expand_as(saved.x)}


rms_norm_train.broken.backward(_rms_backward(column_sums_narrow))
rms_norm_train.sound.backward(_rms_backward(column_sums_wide))


# https://github.com/Xilinx/mlir-air/pull/1679
@case(
    "Xilinx/mlir-air#1679",
    "the statistic is computed in bfloat16 and only then widened to its float32",
    outputs=("out", "rstd"),
    nondifferentiable="rstd",
)
def rms_norm_stats(
    x: BFloat16[Tensor, "n c"], weight: BFloat16[Tensor, "c"], eps: float = 1e-6
) -> tuple[BFloat16[Tensor, "n c"], Float32[Tensor, "n"]]:
    """Root mean square normalisation of bfloat16 rows, and the reciprocal of each root in float32."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * rstd[:, None] * weight.float()).to(x.dtype), rstd.detach()


@rms_norm_stats.broken.kernel("cpu")
def _(x, weight, eps):
    rstd = torch.rsqrt(x.square().mean(-1).float() + eps)
    return (x.float() * rstd[:, None] * weight).to(x.dtype), rstd


@rms_norm_stats.sound.kernel("cpu")
def _(x, weight, eps):
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * rstd[:, None] * weight).to(x.dtype), rstd


@rms_norm_stats.backward
def _(grads, saved, needs):
    grad, rstd = grads[0].float(), saved.rstd[:, None]
    normal, inner = saved.x.float() * rstd, grad * saved.weight.float()
    return {
        "x": (rstd * (inner - normal * (inner * normal).mean(-1, keepdim=True))).to(saved.x.dtype),
        "weight": (grad * normal).sum(0).to(saved.weight.dtype),
    }


# https://github.com/tracel-ai/burn/issues/4694
@case("tracel-ai/burn#4694", "a row without any allowed position is not a number instead of zero")
def masked_softmax(x: Float[Tensor, "n m"], mask: Bool[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    """Softmax over the allowed positions of each row; zeros where none is allowed."""
    scores = torch.softmax(x.masked_fill(~mask, float("-inf")), -1)
    return scores.masked_fill(~mask.any(-1, keepdim=True), 0)


@masked_softmax.broken.kernel("cpu")
def _(x, mask):
    return torch.softmax(torch.where(mask, x, float("-inf")), -1)


@masked_softmax.sound.kernel("cpu")
def _(x, mask):
    scores = torch.softmax(torch.where(mask, x, float("-inf")), -1)
    return torch.where(mask.any(-1, keepdim=True), scores, 0.0)


@masked_softmax.backward
def _(grad, saved, needs):
    return {"x": saved.out * (grad - (grad * saved.out).sum(-1, keepdim=True))}


# https://github.com/flashinfer-ai/flashinfer/pull/4401
@case("flashinfer-ai/flashinfer#4401", "the running maximum starts at a finite number, above valid scores")
def online_softmax(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "n m"]:
    """Softmax of rows."""
    return torch.softmax(x, -1)


ONLINE = """
#include <cmath>
int online_softmax_rows(const sl_context*, const DLTensor* x, DLTensor* out) {
  const float LOG2E = 1.44269504f;
  const int64_t n = x->shape[0], m = x->shape[1];
  for (int64_t r = 0; r < n; r++) {
    const float* row = static_cast<const float*>(x->data) + r * m;
    float* to = static_cast<float*>(out->data) + r * m;
    float high = $START, sum = 0;
    for (int64_t i = 0; i < m; i++) {
      const float next = row[i] > high ? row[i] : high;
      if (next != -INFINITY || row[i] != row[i])
        sum = (sum == 0 ? 0 : sum * exp2f((high - next) * LOG2E)) + exp2f((row[i] - next) * LOG2E);
      high = next;
    }
    for (int64_t i = 0; i < m; i++) to[i] = exp2f((row[i] - high) * LOG2E) / sum;
  }
  return SL_OK;
}
"""
online_softmax.kernels("online_softmax_rows", ONLINE, START=("-5e4f", "-INFINITY"))


@online_softmax.backward
def _(grad, saved, needs):
    return {"x": saved.out * (grad - (grad * saved.out).sum(-1, keepdim=True))}


# https://github.com/intel/torch-xpu-ops/pull/5022
@case("intel/torch-xpu-ops#5022", "a masked row with a NaN counts as wholly masked, since the maximum drops the NaN")
def safe_softmax(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "n m"]:
    """Softmax of rows; a row of minus infinity gives zeros."""
    return torch.where(x.isneginf().all(-1, keepdim=True), 0.0, torch.softmax(x, -1))


SAFE = """
#include <cfloat>
#include <cmath>
int safe_softmax_rows(const sl_context*, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0], m = x->shape[1];
  for (int64_t r = 0; r < n; r++) {
    const float* row = static_cast<const float*>(x->data) + r * m;
    float* to = static_cast<float*>(out->data) + r * m;
    float high = -INFINITY, sum = 0;
    bool nan = false;
    for (int64_t i = 0; i < m; i++) {
      if (row[i] > high) high = row[i];
      if (row[i] != row[i]) nan = true;
    }
    if (high == -INFINITY$UNLESS) {
      for (int64_t i = 0; i < m; i++) to[i] = 0;
      continue;
    }
    for (int64_t i = 0; i < m; i++) sum += to[i] = expf(row[i] - high);
    for (int64_t i = 0; i < m; i++) to[i] = nan ? NAN : to[i] / sum;
  }
  return SL_OK;
}
"""
safe_softmax.kernels("safe_softmax_rows", SAFE, UNLESS=("", " && !nan"))


# https://github.com/flagos-ai/FlagGems/issues/5392
@case("flagos-ai/FlagGems#5392", "the backward takes its input to have two dims")
def layer_norm_ranks(
    x: Float[Tensor, "*batch c"], weight: Float[Tensor, "c"], eps: float = 1e-5
) -> Float[Tensor, "*batch c"]:
    """Layer normalisation over the last dim."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight


@layer_norm_ranks.broken.kernel("cpu")
@layer_norm_ranks.sound.kernel("cpu")
def _(x, weight, eps):
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + eps) * weight


def _normal(saved):
    centred = saved.x - saved.x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + saved.eps)
    return centred * rstd, rstd


@layer_norm_ranks.broken.backward
def _(grad, saved, needs):
    normal, rstd = _normal(saved)
    rows = max(saved.x.shape[0], 1) if saved.x.dim() > 1 else 1
    flat, inner = normal.reshape(rows, -1), (grad * saved.weight).reshape(rows, -1)
    shift = inner.mean(-1, keepdim=True) + flat * (inner * flat).mean(-1, keepdim=True)
    weight = (grad.reshape(rows, -1) * flat).sum(0)[: saved.x.shape[-1]]
    return {"x": (inner - shift).reshape(saved.x.shape) * rstd, "weight": weight}


@layer_norm_ranks.sound.backward
def _(grad, saved, needs):
    normal, rstd = _normal(saved)
    inner = grad * saved.weight
    shift = inner.mean(-1, keepdim=True) + normal * (inner * normal).mean(-1, keepdim=True)
    return {"x": rstd * (inner - shift), "weight": (grad * normal).sum_to_size(saved.weight.shape)}


# https://github.com/torch/nn/pull/345
@case("torch/nn#345", "the backward reads the incoming gradient as if it were contiguous")
def mean_columns(x: Float32[Tensor, "n m c"]) -> Float32[Tensor, "n c"]:
    """The mean over the middle dim."""
    return x.mean(1)


@mean_columns.broken.kernel("cpu")
@mean_columns.sound.kernel("cpu")
def _(x, *, out):
    torch.mean(x, 1, out=out)


def _mean_backward(name, contiguous):
    @torch.library.custom_op(f"defects_parts::{name}", mutates_args=())
    def spread(grad: Tensor, m: int) -> Tensor:
        n, c = grad.shape
        read = grad.contiguous() if contiguous else grad
        flat = address_view(read, n * c).view(n, 1, c)
        return (flat / max(m, 1)).expand(n, m, c).contiguous()

    spread.register_fake(lambda grad, m: grad.new_empty(grad.shape[0], m, grad.shape[1]))
    return lambda grad, saved, needs: {"x": spread(grad, saved.x.shape[1])}


mean_columns.broken.backward(_mean_backward("mean_backward_flat", False), strided=True)
mean_columns.sound.backward(_mean_backward("mean_backward", True), strided=True)
