"""Dtypes and special values."""

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from ..registry import case


# https://github.com/xarray-contrib/xarray-spatial/issues/2769
@case("xarray-contrib/xarray-spatial#2769", "float64 is computed in float32")
def smooth(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """The mean of each element and its neighbours; the ends count twice."""
    padded = torch.cat([x[:1], x, x[-1:]])
    return (padded[:-2] + padded[1:-1] + padded[2:]) / 3


@smooth.broken.kernel("cpu")
def _(x):
    wide = x.to(torch.float32)
    padded = torch.cat([wide[:1], wide, wide[-1:]])
    return ((padded[:-2] + padded[1:-1] + padded[2:]) / 3).to(x.dtype)


@smooth.sound.kernel("cpu")
def _(x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    padded = torch.cat([wide[:1], wide, wide[-1:]])
    return ((padded[:-2] + padded[1:-1] + padded[2:]) / 3).to(x.dtype)


# https://github.com/ml-explore/mlx/pull/4346
@case("ml-explore/mlx#4346", "a quotient of integers is truncated instead of rounded down")
def floor_quotient(a: Int32[Tensor, "n"], b: Int32[Tensor, "n"]) -> Int32[Tensor, "n"]:
    """a / b rounded down, in 32 bits; zero where b is zero."""
    wide, by = a.long(), torch.where(b == 0, 1, b.long())
    return torch.where(b == 0, 0, torch.div(wide, by, rounding_mode="floor")).to(torch.int32)


QUOTIENT = """
int floor_quotients(const sl_context*, const DLTensor* a, const DLTensor* b, DLTensor* out) {
  const int32_t *x = static_cast<const int32_t*>(a->data), *y = static_cast<const int32_t*>(b->data);
  int32_t* to = static_cast<int32_t*>(out->data);
  for (int64_t i = 0; i < a->shape[0]; i++) {
    const int64_t v = x[i], w = y[i];
    int64_t q = w ? v / w : 0;
    $DOWN
    to[i] = static_cast<int32_t>(q);
  }
  return SL_OK;
}
"""
floor_quotient.kernels("floor_quotients", QUOTIENT, DOWN=("", "if (w && q * w != v && (v < 0) != (w < 0)) q--;"))


# https://github.com/THUDM/slime/pull/2256
@case("THUDM/slime#2256", "a block of zeros is divided by its scale of zero")
def fake_quantize(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    """Each row rounded to 255 steps of its largest magnitude."""
    scale = x.abs().amax(-1, keepdim=True) / 127 if x.shape[1] else x.new_ones(x.shape[0], 1)
    scale = torch.where(scale == 0, 1.0, scale)
    return torch.round(x / scale) * scale


def _steps(x, zero):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = wide.abs().amax(-1, keepdim=True) / 127 if x.shape[1] else wide.new_ones(x.shape[0], 1)
    scale = torch.where(scale == 0, zero, scale)
    return (torch.round(wide / scale) * scale).to(x.dtype)


@fake_quantize.broken.kernel("cpu")
def _(x):
    return _steps(x, 0.0)


@fake_quantize.sound.kernel("cpu")
def _(x):
    return _steps(x, 1.0)


# https://github.com/apache/mxnet/issues/11115
@case("apache/mxnet#11115", "a NaN becomes zero")
def relu(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "n m"]:
    """The elements, or zero where they are negative."""
    return torch.relu(x)


RELU = """
int relu_values(const sl_context*, const DLTensor* x, DLTensor* out) {
  const int64_t count = x->shape[0] * x->shape[1];
  for (int64_t i = 0; i < count; i++) {
    const float v = static_cast<const float*>(x->data)[i];
    static_cast<float*>(out->data)[i] = $KEEP ? v : 0;
  }
  return SL_OK;
}
"""
relu.kernels("relu_values", RELU, KEEP=("v > 0", "!(v <= 0)"))


@relu.backward
def _(grad, saved, needs):
    return {"x": torch.where(saved.x > 0, grad, torch.where(saved.x.isnan(), grad, 0.0))}
