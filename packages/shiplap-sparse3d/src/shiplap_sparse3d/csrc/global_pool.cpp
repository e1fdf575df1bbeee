// Pooling over scenes. A thread owns some channels and goes through all rows in their order, so
// results do not depend on the number of threads.
#include <cmath>

#include "common.h"
#include "number.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kChannels = 32;          // of a task: a few cache lines of each row
constexpr int64_t kSerialValues = 200000;  // below which one thread is faster

template <class S>
struct Scenes {
  const S* feats;         // [n, c]
  const int32_t* coords;  // [n, 4]
  int64_t n, c, count;
};

// Calls body(first channel, channels) for all tasks.
template <class S, class Body>
void over_channels(const sl_context* ctx, const Scenes<S>& at, const Body& body) {
  const int threads = at.n * at.c < kSerialValues ? 1 : thread_count(ctx);
  parallel_for(threads, cdiv(at.c, kChannels), [&](int, int64_t task) {
    const int64_t first = task * kChannels;
    body(first, std::min(kChannels, at.c - first));
  });
}

// Sums into `sums` [count, c], then stores them, divided by `counts` unless that is NULL.
template <class S>
void sum(const sl_context* ctx, const Scenes<S>& at, const int64_t* counts, Sum<S>* sums, S* out) {
  over_channels(ctx, at, [&](int64_t first, int64_t channels) {
    for (int64_t b = 0; b < at.count; ++b) std::fill_n(sums + b * at.c + first, channels, Sum<S>{0});
    for (int64_t row = 0; row < at.n; ++row) {
      const int32_t b = at.coords[4 * row];
      if (b < 0) continue;
      const S* from = at.feats + row * at.c + first;
      Sum<S>* to = sums + b * at.c + first;
      for (int64_t i = 0; i < channels; ++i) to[i] += widen(from[i]);
    }
    for (int64_t b = 0; b < at.count; ++b) {
      const Sum<S> over = counts == nullptr ? 1 : static_cast<Sum<S>>(std::max<int64_t>(counts[b], 1));
      for (int64_t i = b * at.c + first; i < b * at.c + first + channels; ++i) {
        narrow(sums[i] / over, out + i);
      }
    }
  });
}

// The first largest value, NaN above all, and its row.
template <class S>
void maximum(const sl_context* ctx, const Scenes<S>& at, S* out, int32_t* rows) {
  over_channels(ctx, at, [&](int64_t first, int64_t channels) {
    for (int64_t b = 0; b < at.count; ++b) {
      std::fill_n(out + b * at.c + first, channels, S{});
      std::fill_n(rows + b * at.c + first, channels, -1);
    }
    for (int64_t row = 0; row < at.n; ++row) {
      const int32_t b = at.coords[4 * row];
      if (b < 0) continue;
      const S* from = at.feats + row * at.c + first;
      S* best = out + b * at.c + first;
      int32_t* winner = rows + b * at.c + first;
      for (int64_t i = 0; i < channels; ++i) {
        const Sum<S> value = widen(from[i]), held = widen(best[i]);
        if (winner[i] < 0 || value > held || (std::isnan(value) && !std::isnan(held))) {
          best[i] = from[i];
          winner[i] = static_cast<int32_t>(row);
        }
      }
    }
  });
}

int check(const sl_context* ctx, const DLTensor* feats, const DLTensor* coords,
          const DLTensor* out, int64_t batch_size) {
  SL_TRY(check_number(ctx, "feats", feats, 2));
  SL_TRY(check_coords(ctx, "coords", coords));
  SL_TRY(check_extent(ctx, "coords", coords, 0, feats->shape[0]));
  SL_TRY(check_same_float(ctx, "out", out, 2, feats));
  SL_TRY(check_extent(ctx, "out", out, 0, batch_size));
  SL_TRY(check_extent(ctx, "out", out, 1, feats->shape[1]));
  const int32_t* rows = data<const int32_t>(coords);
  for (int64_t row = 0; row < feats->shape[0]; ++row) {
    const int32_t b = rows[4 * row];
    if (b >= -1 && b < batch_size) continue;
    return fail(ctx, SL_INVALID_ARGUMENT, "coords row %lld has a batch index outside [-1, %lld)",
                static_cast<long long>(row), static_cast<long long>(batch_size));
  }
  return SL_OK;
}

// Calls pool(scenes) with the element type of `feats`.
template <class Pool>
int for_type(const DLTensor* feats, const DLTensor* coords, int64_t batch_size, const Pool& pool) {
  const auto run = [&](auto type) {
    using S = decltype(type);
    return pool(Scenes<S>{data<const S>(feats), data<const int32_t>(coords), feats->shape[0],
                          feats->shape[1], batch_size});
  };
  if (feats->dtype.bits == 64) return run(double{});
  if (feats->dtype.bits == 32) return run(float{});
  return feats->dtype.code == 2 ? run(Half{}) : run(Bfloat16{});
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: 0
extern "C" int sparse3d_global_max_pool(const sl_context* ctx, const DLTensor* feats,
                                        const DLTensor* coords, DLTensor* out, DLTensor* rows,
                                        int64_t batch_size) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&]() -> int {
    SL_TRY(check(ctx, feats, coords, out, batch_size));
    SL_TRY(check_int32(ctx, "rows", rows, 2));
    SL_TRY(check_extent(ctx, "rows", rows, 0, batch_size));
    SL_TRY(check_extent(ctx, "rows", rows, 1, feats->shape[1]));
    return for_type(feats, coords, batch_size, [&](const auto& at) {
      using S = std::remove_const_t<std::remove_pointer_t<decltype(at.feats)>>;
      maximum(ctx, at, data<S>(out), data<int32_t>(rows));
      return SL_OK;
    });
  });
}

// Workspace: 8 * batch_size + batch_size * c * (bytes of a sum) + 128
extern "C" int sparse3d_global_sum_pool(const sl_context* ctx, const DLTensor* feats,
                                        const DLTensor* coords, DLTensor* out, int64_t batch_size,
                                        int32_t average) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&]() -> int {
    SL_TRY(check(ctx, feats, coords, out, batch_size));
    return for_type(feats, coords, batch_size, [&](const auto& at) {
      using S = std::remove_const_t<std::remove_pointer_t<decltype(at.feats)>>;
      const int64_t bytes = static_cast<int64_t>(sizeof(Sum<S>)) * batch_size * at.c;
      SL_TRY(Arena::require(ctx, 8 * batch_size + bytes + 128));
      Arena arena(ctx);
      int64_t* counts = arena.take<int64_t>(batch_size);
      std::fill_n(counts, batch_size, 0);
      for (int64_t row = 0; row < at.n; ++row) {
        if (at.coords[4 * row] >= 0) ++counts[at.coords[4 * row]];
      }
      sum(ctx, at, average != 0 ? counts : nullptr, arena.take<Sum<S>>(batch_size * at.c), data<S>(out));
      return static_cast<int>(SL_OK);
    });
  });
}
