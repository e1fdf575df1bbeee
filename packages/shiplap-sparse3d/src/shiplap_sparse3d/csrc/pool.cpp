// Pooling over a table: sum, average and maximum of the rows under the taps, and the gradient of the
// maximum over the transposed table. Each output row is written by one thread, in tap order.
#include "gemm_kernels.h"
#include "hits.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kTileRows = 256;
constexpr double kSerialWork = 2e6;  // values read below which one thread is faster

// The table of a pooling op, its source (n rows) and its result (m rows).
int check(const sl_context* ctx, const char* name, const DLTensor* source, const DLTensor* table,
          const DLTensor* out) {
  SL_TRY(check_number(ctx, name, source, 2));
  SL_TRY(check_int32(ctx, "table", table, 2));
  SL_TRY(check_same_float(ctx, "out", out, 2, source));
  SL_TRY(check_extent(ctx, "out", out, 0, table->shape[0]));
  return check_extent(ctx, "out", out, 1, source->shape[1]);
}

// int16 like `like`, which says for each value of that tensor from which tap it came.
int check_taps(const sl_context* ctx, const DLTensor* taps, const DLTensor* like) {
  if (taps == nullptr || !has_dtype(taps, 0, 16)) {
    return fail(ctx, SL_UNSUPPORTED, "taps is not int16");
  }
  SL_TRY(check_extent(ctx, "taps", taps, 0, like->shape[0]));
  return check_extent(ctx, "taps", taps, 1, like->shape[1]);
}

template <class S>
struct Tag {
  using type = S;
};

// Calls pool(tag of the element type) for the type of `source`.
template <class Pool>
int for_type(const DLTensor* source, const Pool& pool) {
  if (source->dtype.bits == 64) return pool(Tag<double>{});
  if (source->dtype.bits == 32) return pool(Tag<float>{});
  return source->dtype.code == 2 ? pool(Tag<Half>{}) : pool(Tag<Bfloat16>{});
}

// Calls tile(rows of the table, where they begin) for all tiles; it returns false for an entry out
// of range.
template <class S, class Tile>
int over_tiles(const sl_context* ctx, const DLTensor* source, const DLTensor* table,
               const Tile& tile) {
  const int64_t m = table->shape[0], taps = table->shape[1];
  const int64_t n = source->shape[0], channels = source->shape[1];
  const double work = static_cast<double>(m) * taps * channels;
  std::atomic<bool> valid{true};
  parallel_for(work < kSerialWork ? 1 : thread_count(ctx), cdiv(m, kTileRows),
               [&](int, int64_t task) {
                 const int64_t first = task * kTileRows, rows = std::min(kTileRows, m - first);
                 const TableRows<S> at{data<const int32_t>(table) + first * taps,
                                       taps, rows, taps, n, data<const S>(source), channels};
                 if (!tile(at, first * channels)) valid.store(false, std::memory_order_relaxed);
               });
  return valid.load() ? SL_OK : report_bad_entry(ctx, table, n);
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: 0
extern "C" int sparse3d_sum_pool(const sl_context* ctx, const DLTensor* feats,
                                 const DLTensor* table, const DLTensor*, DLTensor* out,
                                 int32_t average) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    SL_TRY(check(ctx, "feats", feats, table, out));
    return for_type(feats, [&](auto tag) {
      using S = typename decltype(tag)::type;
      const auto pool = best_kernels().of(S{}).rows.sum_pool;
      return over_tiles<S>(ctx, feats, table, [&](const TableRows<S>& at, int64_t first) {
        return pool(SumPool<S>{at, average != 0, data<S>(out) + first});
      });
    });
  });
}

// Workspace: 0
extern "C" int sparse3d_max_pool_with_taps(const sl_context* ctx, const DLTensor* feats,
                                           const DLTensor* table, const DLTensor*, DLTensor* out,
                                           DLTensor* taps) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    SL_TRY(check(ctx, "feats", feats, table, out));
    SL_TRY(check_taps(ctx, taps, out));
    return for_type(feats, [&](auto tag) {
      using S = typename decltype(tag)::type;
      const auto pool = best_kernels().of(S{}).rows.max_pool;
      return over_tiles<S>(ctx, feats, table, [&](const TableRows<S>& at, int64_t first) {
        return pool(MaxPool<S>{at, data<S>(out) + first, data<int16_t>(taps) + first});
      });
    });
  });
}

// Workspace: 0
extern "C" int sparse3d_max_pool_grad(const sl_context* ctx, const DLTensor* grad,
                                      const DLTensor* taps, const DLTensor* table_t,
                                      DLTensor* out) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    SL_TRY(check(ctx, "grad", grad, table_t, out));
    SL_TRY(check_taps(ctx, taps, grad));
    return for_type(grad, [&](auto tag) {
      using S = typename decltype(tag)::type;
      const auto pool = best_kernels().of(S{}).rows.max_pool_grad;
      return over_tiles<S>(ctx, grad, table_t, [&](const TableRows<S>& at, int64_t first) {
        return pool(MaxPoolGrad<S>{at, data<const int16_t>(taps), data<S>(out) + first});
      });
    });
  });
}
