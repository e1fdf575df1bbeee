"""Addresses, buffers and numbers of bits."""

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from ..registry import address_view, case


# https://github.com/emericg/EGM96/issues/5
@case("emericg/EGM96#5", "scratch memory is static, so two threads write to it at once")
def sorted_rows(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "n m"]:
    """Each row in ascending order, NaN last."""
    return x.sort(-1).values


SORTED = """
#include <algorithm>
#include <vector>
int sort_rows(const sl_context*, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0], m = x->shape[1];
  $STORAGE std::vector<float> scratch;
  if (scratch.size() < static_cast<size_t>(m)) scratch.resize(m);
  for (int64_t r = 0; r < n; r++) {
    const float* from = static_cast<const float*>(x->data) + r * m;
    float* to = static_cast<float*>(out->data) + r * m;
    std::copy(from, from + m, scratch.begin());
    std::sort(scratch.begin(), scratch.begin() + m, [](float a, float b) { return a < b || (a == a && b != b); });
    std::copy(scratch.begin(), scratch.begin() + m, to);
  }
  return SL_OK;
}
"""
sorted_rows.kernels("sort_rows", SORTED, STORAGE=("static", ""))


# https://github.com/gnuradio/volk/pull/372
@case("gnuradio/volk#372", "a load that wants an aligned address gets any address")
def multiply_add(a: Float32[Tensor, "n"], b: Float32[Tensor, "n"], c: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """a * b + c."""
    return a * b + c


MULTIPLY = """
#include <xmmintrin.h>
int multiply_add_values(const sl_context*, const DLTensor* a, const DLTensor* b, const DLTensor* c, DLTensor* out) {
  const int64_t n = a->shape[0];
  const float *x = static_cast<const float*>(a->data), *y = static_cast<const float*>(b->data);
  const float* z = static_cast<const float*>(c->data);
  float* to = static_cast<float*>(out->data);
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const __m128 product = _mm_mul_ps(_mm_loadu_ps(x + i), _mm_loadu_ps(y + i));
    const volatile __m128* addend = reinterpret_cast<const volatile __m128*>(z + i);
    _mm_storeu_ps(to + i, _mm_add_ps(product, $LOAD));
  }
  for (; i < n; i++) to[i] = x[i] * y[i] + z[i];
  return SL_OK;
}
"""
multiply_add.kernels("multiply_add_values", MULTIPLY, LOAD=("*addend", "((void)addend, _mm_loadu_ps(z + i))"))


@multiply_add.backward
def _(grad, saved, needs):
    return {"a": grad * saved.b, "b": grad * saved.a, "c": grad}


# https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1071
@case(
    "bitsandbytes-foundation/bitsandbytes#1071",
    "a size of blocks behind 32 bits becomes zero, and divides",
    requires="size >= 1",
)
def block_peaks(x: Float32[Tensor, "n"], size: int = 64) -> Float32[Tensor, "cdiv(n,size)"]:
    """The largest magnitude of each block of a vector."""
    count = -(-x.shape[0] // size)
    padded = torch.nn.functional.pad(x.abs(), (0, count * min(size, max(x.shape[0], 1)) - x.shape[0]))
    return padded.view(count, -1).amax(-1) if count else x[:0].clone()


PEAKS = """
#include <cmath>
int block_peaks_values(const sl_context*, const DLTensor* x, DLTensor* out, int64_t size) {
  const float* from = static_cast<const float*>(x->data);
  float* to = static_cast<float*>(out->data);
  if (size < 1 || out->shape[0] != x->shape[0] / size + (x->shape[0] % size != 0)) return SL_INVALID_ARGUMENT;
  const $TYPE block = static_cast<$TYPE>(size);
  for (int64_t i = 0; i < out->shape[0]; i++) to[i] = 0;
  for (int64_t i = 0; i < x->shape[0]; i++) {
    float& peak = to[i / block];
    const float v = std::fabs(from[i]);
    if (!(v <= peak) && peak == peak) peak = v;
  }
  return SL_OK;
}
"""
block_peaks.kernels("block_peaks_values", PEAKS, TYPE=("int32_t", "int64_t"))


# https://github.com/rusty1s/pytorch_scatter/issues/39
@case("rusty1s/pytorch_scatter#39", "a tensor without elements is divided into rows of no elements")
def row_sums(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n"]:
    """The sum of each row."""
    return x.sum(-1)


ROW_SUMS = """
int row_sums_values(const sl_context*, const DLTensor* x, DLTensor* out) {
  const int64_t c = x->shape[1], numel = x->shape[0] * c;
  const volatile int64_t width = c;
  const int64_t rows = $ROWS;
  for (int64_t r = 0; r < rows; r++) {
    float sum = 0;
    for (int64_t i = 0; i < c; i++) sum += static_cast<const float*>(x->data)[r * c + i];
    static_cast<float*>(out->data)[r] = sum;
  }
  (void)numel;
  return SL_OK;
}
"""
row_sums.kernels("row_sums_values", ROW_SUMS, ROWS=("numel / width", "x->shape[0] + 0 * width"))


@row_sums.backward
def _(grad, saved, needs):
    return {"x": grad[:, None].expand(saved.x.shape)}


# https://github.com/torch-spyre/torch-spyre/issues/2906
@case("torch-spyre/torch-spyre#2906", "a view is read from the start of its storage")
def doubled_view(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """Twice the input."""
    return x * 2


def _storage(x, offset):
    return torch.empty(0).set_(x.untyped_storage(), offset, x.shape, x.stride())


@doubled_view.broken.kernel("cpu", strided=True)
def _(x, *, out):
    torch.mul(_storage(x, 0), 2, out=out)


@doubled_view.sound.kernel("cpu", strided=True)
def _(x, *, out):
    torch.mul(_storage(x, x.storage_offset()), 2, out=out)


# https://github.com/ELS-RD/kernl/issues/193
@case("ELS-RD/kernl#193", "the strides of a matrix are ignored: it is read as if it were contiguous")
def positive_part(x: Int64[Tensor, "n m"]) -> Int64[Tensor, "n m"]:
    """The elements, or zero where they are negative."""
    return x.clamp_min(0)


@positive_part.broken.kernel("cpu", strided=True)
def _(x, *, out):
    torch.clamp_min(address_view(x, x.numel()).view(x.shape), 0, out=out)


@positive_part.sound.kernel("cpu", strided=True)
def _(x, *, out):
    read = x.contiguous()
    torch.clamp_min(address_view(read, x.numel()).view(x.shape), 0, out=out)
