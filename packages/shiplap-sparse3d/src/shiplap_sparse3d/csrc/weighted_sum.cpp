// indice_weighted_sum and its gradient: rows of features, mixed.
#include "common.h"
#include "number.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kBlock = 512;
constexpr int64_t kChunk = 64;  // channels whose sums are held at a time
constexpr int64_t kSerialProducts = 200000;

struct Mix {
  const int32_t* indices;  // [queries, corners]
  const float* weights;
  int64_t queries, corners, channels, rows;

  int64_t entries() const { return queries * corners; }
  int threads(const sl_context* ctx) const {
    return entries() * channels < kSerialProducts ? 1 : thread_count(ctx);
  }
};

int read_mix(const sl_context* ctx, const DLTensor* indices, const DLTensor* weights,
             int64_t channels, int64_t rows, Mix* out) {
  SL_TRY(check_int32(ctx, "indices", indices, 2));
  SL_TRY(check_float(ctx, "weights", weights, 2));
  if (!has_dtype(weights, 2, 32)) return fail(ctx, SL_UNSUPPORTED, "weights is not float32");
  const int64_t q = indices->shape[0], k = indices->shape[1];
  SL_TRY(check_extent(ctx, "weights", weights, 0, q));
  SL_TRY(check_extent(ctx, "weights", weights, 1, k));
  *out = Mix{data<const int32_t>(indices), data<const float>(weights), q, k, channels, rows};
  for (int64_t i = 0; i < q * k; ++i) {
    if (out->indices[i] >= -1 && out->indices[i] < rows) continue;
    return fail(ctx, SL_INVALID_ARGUMENT, "indices[%lld, %lld] = %d, outside [-1, %lld)",
                static_cast<long long>(i / k), static_cast<long long>(i % k), out->indices[i],
                static_cast<long long>(rows));
  }
  return SL_OK;
}

// out = the sum of weight * row over what each(position, &weight) gives for positions from `first`
// to `end`, a row of `channels` values or nullptr, in this order.
template <class S, class Each>
void add_up(S* out, int64_t channels, int64_t first, int64_t end, const Each& each) {
  for (int64_t start = 0; start < channels; start += kChunk) {
    const int64_t width = std::min(kChunk, channels - start);
    Sum<S> total[kChunk] = {};
    for (int64_t at = first; at < end; ++at) {
      float weight;
      const S* row = each(at, &weight);
      if (row == nullptr) continue;
      for (int64_t c = 0; c < width; ++c) {
        total[c] += static_cast<Sum<S>>(weight) * widen(row[start + c]);
      }
    }
    for (int64_t c = 0; c < width; ++c) narrow(total[c], out + start + c);
  }
}

template <class S>
void weighted_sum(const sl_context* ctx, const Mix& mix, const S* feats, S* out) {
  const auto each = [&](int64_t i, float* weight) {
    *weight = mix.weights[i];
    return mix.indices[i] < 0 ? nullptr : feats + mix.indices[i] * mix.channels;
  };
  parallel_for(mix.threads(ctx), cdiv(mix.queries, kBlock), [&](int, int64_t task) {
    const int64_t end = std::min(mix.queries, (task + 1) * kBlock);
    for (int64_t q = task * kBlock; q < end; ++q) {
      add_up(out + q * mix.channels, mix.channels, q * mix.corners, (q + 1) * mix.corners, each);
    }
  });
}

// Entries by the row they go to, ascending among those of a row: a counting sort. `ends[row]` is
// where its entries end in `sorted`, and those of the next row begin.
void sort_entries(const Mix& mix, int64_t* ends, int64_t* sorted) {
  std::fill_n(ends, mix.rows + 1, 0);
  for (int64_t i = 0; i < mix.entries(); ++i) {
    if (mix.indices[i] >= 0) ++ends[mix.indices[i] + 1];
  }
  for (int64_t row = 0; row < mix.rows; ++row) ends[row + 1] += ends[row];
  for (int64_t i = 0; i < mix.entries(); ++i) {
    if (mix.indices[i] >= 0) sorted[ends[mix.indices[i]]++] = i;
  }
}

template <class S>
void weighted_sum_grad(const sl_context* ctx, const Mix& mix, const S* grad, const int64_t* ends,
                       const int64_t* sorted, S* out) {
  const auto each = [&](int64_t at, float* weight) {
    *weight = mix.weights[sorted[at]];
    return grad + sorted[at] / mix.corners * mix.channels;
  };
  parallel_for(mix.threads(ctx), cdiv(mix.rows, kBlock), [&](int, int64_t task) {
    const int64_t end = std::min(mix.rows, (task + 1) * kBlock);
    for (int64_t row = task * kBlock; row < end; ++row) {
      add_up(out + row * mix.channels, mix.channels, row == 0 ? 0 : ends[row - 1], ends[row], each);
    }
  });
}

// Calls run(type) with the element type of `tensor`.
template <class Run>
void for_type(const DLTensor* tensor, const Run& run) {
  if (tensor->dtype.bits == 64) return run(double{});
  if (tensor->dtype.bits == 32) return run(float{});
  return tensor->dtype.code == 2 ? run(Half{}) : run(Bfloat16{});
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: 0
extern "C" int sparse3d_indice_weighted_sum(const sl_context* ctx, const DLTensor* feats,
                                            const DLTensor* indices, const DLTensor* weights,
                                            DLTensor* out) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&]() -> int {
    Mix mix;
    SL_TRY(check_number(ctx, "feats", feats, 2));
    SL_TRY(check_same_float(ctx, "out", out, 2, feats));
    SL_TRY(read_mix(ctx, indices, weights, feats->shape[1], feats->shape[0], &mix));
    SL_TRY(check_extent(ctx, "out", out, 0, mix.queries));
    SL_TRY(check_extent(ctx, "out", out, 1, mix.channels));
    for_type(feats, [&](auto type) {
      using S = decltype(type);
      weighted_sum(ctx, mix, data<const S>(feats), data<S>(out));
    });
    return SL_OK;
  });
}

// Workspace: 8 * (rows + q * k) + 192
extern "C" int sparse3d_indice_weighted_sum_grad(const sl_context* ctx, const DLTensor* grad,
                                                 const DLTensor* indices, const DLTensor* weights,
                                                 DLTensor* out, int64_t rows) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&]() -> int {
    Mix mix;
    SL_TRY(check_number(ctx, "grad", grad, 2));
    SL_TRY(check_same_float(ctx, "out", out, 2, grad));
    SL_TRY(read_mix(ctx, indices, weights, grad->shape[1], rows, &mix));
    SL_TRY(check_extent(ctx, "grad", grad, 0, mix.queries));
    SL_TRY(check_extent(ctx, "out", out, 0, rows));
    SL_TRY(check_extent(ctx, "out", out, 1, mix.channels));
    SL_TRY(Arena::require(ctx, 8 * (rows + mix.entries()) + 192));
    Arena arena(ctx);
    int64_t* ends = arena.take<int64_t>(rows + 1);
    int64_t* sorted = arena.take<int64_t>(mix.entries());
    sort_entries(mix, ends, sorted);
    for_type(grad, [&](auto type) {
      using S = decltype(type);
      weighted_sum_grad(ctx, mix, data<const S>(grad), ends, sorted, data<S>(out));
    });
    return SL_OK;
  });
}
