"""Scans, tiles and sums."""

import torch
from jaxtyping import Float, Float16, Float32, Int64
from torch import Tensor

from ..registry import case


# https://github.com/intel/torch-xpu-ops/pull/4820
@case("intel/torch-xpu-ops#4820", "a block adds the total of the block before it, not of all blocks before it")
def cumsum_rows(x: Float32[Tensor, "n t"]) -> Float32[Tensor, "n t"]:
    """The running sum of each row."""
    return x.cumsum(-1)


CUMSUM = """
constexpr int64_t BLOCK = 256;
int cumsum_blocks(const sl_context*, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0], t = x->shape[1];
  for (int64_t r = 0; r < n; r++) {
    const float* from = static_cast<const float*>(x->data) + r * t;
    float* to = static_cast<float*>(out->data) + r * t;
    float carry = 0;
    for (int64_t start = 0; start < t; start += BLOCK) {
      const int64_t end = start + BLOCK < t ? start + BLOCK : t;
      float sum = 0;
      for (int64_t i = start; i < end; i++) to[i] = carry + (sum += from[i]);
      carry $CARRY sum;
    }
  }
  return SL_OK;
}
"""
cumsum_rows.kernels("cumsum_blocks", CUMSUM, CARRY=("=", "+="))


@cumsum_rows.backward
def _(grad, saved, needs):
    return {"x": grad.flip(-1).cumsum(-1).flip(-1)}


# https://github.com/triton-lang/triton/issues/630
@case("triton-lang/triton#630", "the inner dim behind the last whole tile is left out")
def tiled_matmul(a: Float32[Tensor, "n k"], b: Float32[Tensor, "k m"]) -> Float32[Tensor, "n m"]:
    """A matrix product."""
    return a @ b


MATMUL = """
constexpr int64_t TILE = 32;
int matmul_tiles(const sl_context*, const DLTensor* a, const DLTensor* b, DLTensor* out) {
  const int64_t n = a->shape[0], k = a->shape[1], m = b->shape[1];
  const float *left = static_cast<const float*>(a->data), *right = static_cast<const float*>(b->data);
  float* to = static_cast<float*>(out->data);
  for (int64_t i = 0; i < n * m; i++) to[i] = 0;
  for (int64_t start = 0; start < k; start += TILE) {
    const int64_t end = start + TILE;
    if (end > k$SKIP) break;
    for (int64_t r = 0; r < n; r++)
      for (int64_t i = start; i < (end < k ? end : k); i++)
        for (int64_t c = 0; c < m; c++) to[r * m + c] += left[r * k + i] * right[i * m + c];
  }
  return SL_OK;
}
"""
tiled_matmul.kernels("matmul_tiles", MATMUL, SKIP=(" && start > 0", " && end >= k + TILE"))


@tiled_matmul.backward
def _(grad, saved, needs):
    return {"a": grad @ saved.b.mT, "b": saved.a.mT @ grad}


# https://github.com/triton-lang/triton/issues/11148
@case("triton-lang/triton#11148", "blocks that meet in the middle are swapped twice", mutates="x", aliases="x")
def reverse_(x: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
    """Reverse a vector in place."""
    return x.copy_(x.flip(0))


REVERSE = """
constexpr int64_t BLOCK = 64;
int reverse_blocks(const sl_context*, DLTensor* x) {
  const int64_t n = x->shape[0];
  int64_t* data = static_cast<int64_t*>(x->data);
  for (int64_t start = 0; start < n / 2; start += BLOCK)
    for (int64_t i = start; i < start + BLOCK && i < $LIMIT; i++) {
      const int64_t held = data[i];
      data[i] = data[n - 1 - i];
      data[n - 1 - i] = held;
    }
  return SL_OK;
}
"""
reverse_.kernels("reverse_blocks", REVERSE, LIMIT=("(n < BLOCK ? n / 2 : n)", "n / 2"))


# https://github.com/tracel-ai/burn/pull/4769
@case("tracel-ai/burn#4769", "the sum overflows in float16 where the mean does not")
def mean_half(x: Float16[Tensor, "n c"]) -> Float16[Tensor, "n"]:
    """The mean of each row."""
    return x.mean(-1, dtype=torch.float32).to(x.dtype)


@mean_half.broken.kernel("cpu")
def _(x):
    return x.sum(-1) / x.shape[1]


@mean_half.sound.kernel("cpu")
def _(x):
    return (x.sum(-1, dtype=torch.float32) / x.shape[1]).to(x.dtype)


@mean_half.backward
def _(grad, saved, needs):
    return {"x": (grad / max(saved.x.shape[1], 1))[:, None].expand(saved.x.shape)}


# https://github.com/frovedis/frovedis/pull/4
@case(
    "frovedis/frovedis#4",
    "sums of the last columns are not cleared between rows where they fill no whole vector",
    requires="ends >= 1",
)
def spmm(
    start: Int64[Tensor, "ends"],
    column: Int64[Tensor, "nnz"],
    value: Float32[Tensor, "nnz"],
    dense: Float32[Tensor, "k m"],
) -> Float32[Tensor, "ends-1 m"]:
    """The product of a matrix in compressed rows with a dense one."""
    rows = torch.repeat_interleave(torch.arange(len(start) - 1, device=start.device), start.diff())
    out = dense.new_zeros(len(start) - 1, dense.shape[1])
    return out.index_add(0, rows, value[:, None] * dense[column])


@spmm.samples
def _(rng, sizes, dtype, device):
    n, k, m = max(sizes["ends"], 1) - 1, sizes["k"], sizes["m"]
    nnz = sizes["nnz"] if n and k else 0
    lengths = torch.bincount(torch.randint(0, max(n, 1), (nnz,), generator=rng), minlength=n)[:n]
    start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    column = torch.randint(0, max(k, 1), (nnz,), generator=rng)
    value, dense = torch.randn(nnz, generator=rng), torch.randn(k, m, generator=rng)
    return start.to(device), column.to(device), value.to(device, dtype), dense.to(device, dtype)


SPMM = """
constexpr int64_t WIDTH = 8;
int spmm_rows(const sl_context*, const DLTensor* start, const DLTensor* column, const DLTensor* value,
              const DLTensor* dense, DLTensor* out) {
  const int64_t n = start->shape[0] - 1, m = dense->shape[1];
  const int64_t *begin = static_cast<const int64_t*>(start->data), *at = static_cast<const int64_t*>(column->data);
  const float *values = static_cast<const float*>(value->data), *right = static_cast<const float*>(dense->data);
  float* to = static_cast<float*>(out->data);
  const int64_t nnz = column->shape[0], k = dense->shape[0];
  for (int64_t r = 0; r < n; r++)
    if (begin[r] < 0 || begin[r] > begin[r + 1] || begin[r + 1] > nnz) return SL_INVALID_ARGUMENT;
  for (int64_t j = 0; j < nnz; j++)
    if (at[j] < 0 || at[j] >= k) return SL_INVALID_ARGUMENT;
  for (int64_t c = 0; c < m; c += WIDTH) {
    const int64_t width = m - c < WIDTH ? m - c : WIDTH;
    float sums[WIDTH] = {};
    for (int64_t r = 0; r < n; r++) {
      if ($CLEAR) for (auto& sum : sums) sum = 0;
      for (int64_t j = begin[r]; j < begin[r + 1]; j++)
        for (int64_t i = 0; i < width; i++) sums[i] += values[j] * right[at[j] * m + c + i];
      for (int64_t i = 0; i < width; i++) to[r * m + c + i] = sums[i];
    }
  }
  return SL_OK;
}
"""
spmm.kernels("spmm_rows", SPMM, CLEAR=("width == WIDTH", "true"))


# https://github.com/ml-explore/mlx/pull/3769
@case(
    "ml-explore/mlx#3769", "one output divides by the number of steps, which is zero", requires=("size >= 1", "n >= 1")
)
def resize_aligned(x: Float[Tensor, "c n"], size: int) -> Float[Tensor, "c size"]:
    """Rows in another length by linear interpolation, with the first and the last element kept."""
    step = (x.shape[1] - 1) / max(size - 1, 1)
    at = torch.arange(size, device=x.device, dtype=torch.float64) * step
    low = at.floor().long().clamp_max(x.shape[1] - 1)
    high = (low + 1).clamp_max(x.shape[1] - 1)
    weight = (at - low).to(x.dtype)
    return x[:, low] * (1 - weight) + x[:, high] * weight


def _resized(x, size, steps):
    at = torch.arange(size, dtype=torch.float64) * ((x.shape[1] - 1) / steps)
    low = at.floor().long().clamp_max(x.shape[1] - 1)
    weight = (at - low).to(x.dtype)
    return x[:, low] * (1 - weight) + x[:, (low + 1).clamp_max(x.shape[1] - 1)] * weight


@resize_aligned.broken.kernel("cpu")
def _(x, size):
    return _resized(x, size, size - 1)


@resize_aligned.sound.kernel("cpu")
def _(x, size):
    return _resized(x, size, max(size - 1, 1))
