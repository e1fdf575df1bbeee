"""Gathers, scatters, segments and grids."""

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from ..registry import case


def _segments(rng, rows, segments):
    return torch.randint(0, max(segments, 1), (rows,), generator=rng)


# https://github.com/rusty1s/pytorch_scatter/issues/24
@case("rusty1s/pytorch_scatter#24", "the maximum of a segment starts at zero, which beats negative values")
def segment_max(x: Float32[Tensor, "n c"], segment: Int64[Tensor, "n"], count: int) -> Float32[Tensor, "count c"]:
    """The maximum of the rows of each segment; zeros for a segment without rows."""
    index = segment[:, None].expand(-1, x.shape[1])
    return x.new_zeros(count, x.shape[1]).scatter_reduce(0, index, x, "amax", include_self=False)


def _segment_samples(rng, sizes, dtype, device):
    count = max(sizes["count"], 1)
    x = torch.randn(sizes["n"], sizes["c"], generator=rng)
    return x.to(device, dtype), _segments(rng, sizes["n"], count).to(device), count


segment_max.samples(_segment_samples)
SEGMENT_MAX = """
#include <cmath>
int segment_max_rows(const sl_context*, const DLTensor* x, const DLTensor* segment, DLTensor* out, int64_t count) {
  const int64_t n = x->shape[0], c = x->shape[1];
  const float* from = static_cast<const float*>(x->data);
  const int64_t* to = static_cast<const int64_t*>(segment->data);
  float* best = static_cast<float*>(out->data);
  if (count != out->shape[0]) return SL_INVALID_ARGUMENT;
  for (int64_t r = 0; r < n; r++)
    if (to[r] < 0 || to[r] >= count) return SL_INVALID_ARGUMENT;
  for (int64_t i = 0; i < count * c; i++) best[i] = $START;
  for (int64_t r = 0; r < n; r++)
    for (int64_t i = 0; i < c; i++) {
      float& kept = best[to[r] * c + i];
      const float v = from[r * c + i];
      if (!(v <= kept) && kept == kept) kept = v;
    }
  $END
  return SL_OK;
}
"""
segment_max.kernels(
    "segment_max_rows",
    SEGMENT_MAX,
    START=("0", "-INFINITY"),
    END=(
        "",
        """for (int64_t s = 0; s < count; s++) {
    bool seen = false;
    for (int64_t r = 0; r < n && !seen; r++) seen = to[r] == s;
    for (int64_t i = 0; i < c && !seen; i++) best[s * c + i] = 0;
  }""",
    ),
)


# https://github.com/explosion/thinc/pull/637
@case("explosion/thinc#637", "a sequence of length zero does not advance the output")
def mean_sequences(x: Float32[Tensor, "n c"], lengths: Int64[Tensor, "s"]) -> Float32[Tensor, "s c"]:
    """The mean of each sequence of a packed batch; zeros for an empty one."""
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=x.device), lengths)
    return x.new_zeros(len(lengths), x.shape[1]).index_add(0, rows, x) / lengths.clamp_min(1)[:, None]


@mean_sequences.samples
def _(rng, sizes, dtype, device):
    s = sizes["s"]
    n = sizes["n"] if s else 0
    lengths = torch.bincount(torch.randint(0, max(s, 1), (n,), generator=rng), minlength=s)[:s]
    return torch.randn(n, sizes["c"], generator=rng).to(device, dtype), lengths.to(device)


MEANS = """
int mean_sequences_rows(const sl_context*, const DLTensor* x, const DLTensor* lengths, DLTensor* out) {
  const int64_t c = x->shape[1], s = lengths->shape[0];
  const int64_t* length = static_cast<const int64_t*>(lengths->data);
  const float* from = static_cast<const float*>(x->data);
  float* to = static_cast<float*>(out->data);
  int64_t left = x->shape[0];
  for (int64_t q = 0; q < s; q++) {
    if (length[q] < 0 || length[q] > left) return SL_INVALID_ARGUMENT;
    left -= length[q];
  }
  for (int64_t i = 0; i < s * c; i++) to[i] = 0;
  for (int64_t q = 0; q < s; q++) {
    if (length[q] == 0) { $EMPTY continue; }
    for (int64_t r = 0; r < length[q]; r++, from += c)
      for (int64_t i = 0; i < c; i++) to[i] += from[i];
    for (int64_t i = 0; i < c; i++) to[i] /= length[q];
    to += c;
  }
  return SL_OK;
}
"""
mean_sequences.kernels("mean_sequences_rows", MEANS, EMPTY=("", "to += c;"))


@mean_sequences.backward
def _(grad, saved, needs):
    scaled = grad / saved.lengths.clamp_min(1)[:, None]
    rows = torch.arange(saved.x.shape[0], device=grad.device)
    return {"x": scaled[torch.searchsorted(saved.lengths.cumsum(0), rows, right=True)]}


# https://github.com/chainer/chainer/pull/8187
@case("chainer/chainer#8187", "of several values at one place only the last counts")
def coo_to_dense(
    row: Int64[Tensor, "nnz"], column: Int64[Tensor, "nnz"], value: Float[Tensor, "nnz"], n: int, m: int
) -> Float[Tensor, "n m"]:
    """A dense matrix from places and values; values at one place are added."""
    return value.new_zeros(n, m).index_put((row, column), value, accumulate=True)


@coo_to_dense.samples
def _(rng, sizes, dtype, device):
    n, m, nnz = max(sizes["n"], 1), max(sizes["m"], 1), sizes["nnz"]
    row, column = torch.randint(0, n, (nnz,), generator=rng), torch.randint(0, m, (nnz,), generator=rng)
    return row.to(device), column.to(device), torch.randn(nnz, generator=rng).to(device, dtype), n, m


@coo_to_dense.broken.kernel("cpu")
def _(row, column, value, n, m, *, out):
    out.zero_()[row, column] = value


@coo_to_dense.sound.kernel("cpu")
def _(row, column, value, n, m, *, out):
    total = torch.zeros(n * m, dtype=torch.promote_types(value.dtype, torch.float32))
    out.copy_(total.index_add_(0, row * m + column, value.to(total.dtype)).view(n, m))


@coo_to_dense.backward
def _(grad, saved, needs):
    return {"value": grad[saved.row, saved.column]}


def _bag_samples(rng, sizes, dtype, device):
    k, d, n, b = max(sizes["k"], 1), sizes["d"], sizes["n"], max(sizes["b"], 1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, n + 1, (b - 1,), generator=rng)])
    index = torch.randint(0, k, (n,), generator=rng)
    return torch.randn(k, d, generator=rng).to(device, dtype), index.to(device), offsets.sort().values.to(device)


# https://github.com/pytorch/FBGEMM/pull/5054
@case("pytorch/FBGEMM#5054", "the row of an empty bag is never written")
def bag_sum(
    table: Float32[Tensor, "k d"], index: Int64[Tensor, "n"], offsets: Int64[Tensor, "b"]
) -> Float32[Tensor, "b d"]:
    """The sum of the table's rows of each bag, which begins at its offset."""
    rows = torch.searchsorted(offsets, torch.arange(len(index), device=index.device), right=True) - 1
    return table.new_zeros(len(offsets), table.shape[1]).index_add(0, rows, table[index])


bag_sum.samples(_bag_samples)
BAGS = """
int bag_sum_rows(const sl_context*, const DLTensor* table, const DLTensor* index, const DLTensor* offsets,
                 DLTensor* out) {
  const int64_t d = table->shape[1], n = index->shape[0], b = offsets->shape[0];
  const int64_t *at = static_cast<const int64_t*>(index->data), *begin = static_cast<const int64_t*>(offsets->data);
  const float* rows = static_cast<const float*>(table->data);
  for (int64_t j = 0; j < n; j++)
    if (at[j] < 0 || at[j] >= table->shape[0]) return SL_INVALID_ARGUMENT;
  for (int64_t bag = 0; bag < b; bag++)
    if (begin[bag] < 0 || begin[bag] > n) return SL_INVALID_ARGUMENT;
  for (int64_t bag = 0; bag < b; bag++) {
    float* to = static_cast<float*>(out->data) + bag * d;
    const int64_t end = bag + 1 < b ? begin[bag + 1] : n;
    $CLEAR
    for (int64_t j = begin[bag]; j < end; j++)
      for (int64_t i = 0; i < d; i++) to[i] = (j == begin[bag] ? 0 : to[i]) + rows[at[j] * d + i];
  }
  return SL_OK;
}
"""
bag_sum.kernels("bag_sum_rows", BAGS, CLEAR=("", "for (int64_t i = 0; i < d; i++) to[i] = 0;"))


@bag_sum.backward
def _(grad, saved, needs):
    rows = torch.searchsorted(saved.offsets, torch.arange(len(saved.index), device=grad.device), right=True) - 1
    return {"table": grad.new_zeros(saved.table.shape).index_add(0, saved.index, grad[rows])}


# https://github.com/pytorch/pytorch/issues/25747
@case("pytorch/pytorch#25747", "the number of the bin overflows in 32 bits before it is divided", requires="bins >= 1")
def histogram(x: Int32[Tensor, "n"], bins: int = 65536) -> Int64[Tensor, "bins"]:
    """How many values of [0, 65536) lie in each of equal bins; other values are left out."""
    inside = x[(x >= 0) & (x < 65536)].long()
    return torch.bincount(inside * bins // 65536, minlength=bins)


@histogram.samples
def _(rng, sizes, dtype, device):
    x = torch.randint(-10, 65536, (sizes["n"],), generator=rng, dtype=torch.int32)
    return x.to(device), max(sizes.get("bins", 65536), 1)


HISTOGRAM = """
int histogram_bins(const sl_context*, const DLTensor* x, DLTensor* out, int64_t bins) {
  const int32_t* from = static_cast<const int32_t*>(x->data);
  int64_t* to = static_cast<int64_t*>(out->data);
  if (bins < 1 || bins != out->shape[0]) return SL_INVALID_ARGUMENT;
  for (int64_t i = 0; i < bins; i++) to[i] = 0;
  for (int64_t i = 0; i < x->shape[0]; i++) {
    if (from[i] < 0 || from[i] >= 65536) continue;
    const $TYPE bin = static_cast<$TYPE>(static_cast<$WRAP>(from[i]) * static_cast<$WRAP>(bins)) / 65536;
    if (bin >= 0 && bin < bins) to[bin]++;
  }
  return SL_OK;
}
"""
histogram.kernels("histogram_bins", HISTOGRAM, TYPE=("int32_t", "int64_t"), WRAP=("uint32_t", "int64_t"))


# https://github.com/triton-lang/triton/issues/802
@case("triton-lang/triton#802", "of several largest values the last is taken", requires="m >= 1")
def argmax_first(x: Float32[Tensor, "n m"]) -> Int64[Tensor, "n"]:
    """The first place of the largest value of each row; that of a NaN where there is one."""
    top = x.amax(-1, keepdim=True)
    return ((x == top) | x.isnan()).to(torch.int8).argmax(-1)


ARGMAX = """
int argmax_rows(const sl_context*, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0], m = x->shape[1];
  for (int64_t r = 0; r < n; r++) {
    const float* row = static_cast<const float*>(x->data) + r * m;
    int64_t best = 0;
    for (int64_t i = 1; i < m && row[best] == row[best]; i++)
      if (row[i] $BEATS row[best] || row[i] != row[i]) best = i;
    static_cast<int64_t*>(out->data)[r] = best;
  }
  return SL_OK;
}
"""
argmax_first.kernels("argmax_rows", ARGMAX, BEATS=(">=", ">"))


# https://github.com/NVIDIA/warp/pull/1281
@case("NVIDIA/warp#1281", "coordinates are truncated towards zero instead of rounded down")
def voxel_of(points: Float32[Tensor, "n 3"], width: float = 0.5) -> Int32[Tensor, "n 3"]:
    """The cell of each point in a grid of this width."""
    return torch.floor(points / width).clamp(-1e6, 1e6).nan_to_num(0).to(torch.int32)


VOXELS = """
#include <algorithm>
#include <cmath>
int voxel_cells(const sl_context*, const DLTensor* points, DLTensor* out, double width) {
  const float* from = static_cast<const float*>(points->data);
  int32_t* to = static_cast<int32_t*>(out->data);
  for (int64_t i = 0; i < points->shape[0] * 3; i++) {
    const float cell = $ROUND(from[i] / static_cast<float>(width));
    to[i] = cell == cell ? static_cast<int32_t>(std::min(std::max(cell, -1e6f), 1e6f)) : 0;
  }
  return SL_OK;
}
"""
voxel_of.kernels("voxel_cells", VOXELS, ROUND=("truncf", "floorf"))


# https://github.com/pytorch/vision/issues/9273
@case("pytorch/vision#9273", "a coordinate that is not a number passes the check of its bounds", requires="m >= 1")
def sample_nearest(x: Float32[Tensor, "m c"], at: Float32[Tensor, "n"]) -> Float32[Tensor, "n c"]:
    """The row nearest to each coordinate, inside of the table; the first for a coordinate that is not a number."""
    rows = torch.floor(at.nan_to_num(0) + 0.5).clamp(0, x.shape[0] - 1).long()
    return x[rows]


NEAREST = """
#include <cmath>
int sample_rows(const sl_context*, const DLTensor* x, const DLTensor* at, DLTensor* out) {
  const int64_t m = x->shape[0], c = x->shape[1];
  const float *from = static_cast<const float*>(x->data), *where = static_cast<const float*>(at->data);
  float* to = static_cast<float*>(out->data);
  for (int64_t i = 0; i < at->shape[0]; i++) {
    float place = floorf(where[i] + 0.5f);
    if ($LOW) place = 0;
    if (place > m - 1) place = m - 1;
    const int32_t row = static_cast<int32_t>(place);
    for (int64_t j = 0; j < c; j++) to[i * c + j] = from[row * c + j];
  }
  return SL_OK;
}
"""
sample_nearest.kernels("sample_rows", NEAREST, LOW=("place < 0", "!(place >= 0)"))
