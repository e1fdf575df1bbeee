// unique_coords and segment_mean: points to voxels.
#include "common.h"
#include "radix_sort.h"

namespace shiplap::sparse3d {
namespace {

// Packs rows of four int32 into keys whose order is the rows' lexicographic order: each axis is
// shifted to start at its minimum, and its extent is its radix.
class RowPacking {
 public:
  RowPacking(const int32_t* coords, int64_t n) {
    if (n == 0) return;
    std::array<int64_t, 4> high;
    for (int axis = 0; axis < 4; ++axis) low_[axis] = high[axis] = coords[axis];
    for (const int32_t* c = coords; c != coords + 4 * n; c += 4) {
      for (int axis = 0; axis < 4; ++axis) {
        low_[axis] = std::min<int64_t>(low_[axis], c[axis]);
        high[axis] = std::max<int64_t>(high[axis], c[axis]);
      }
    }
    for (int axis = 0; axis < 4; ++axis) extent_[axis] = high[axis] - low_[axis] + 1;
  }

  int64_t extent(int axis) const { return extent_[axis]; }

  bool fits() const {
    unsigned __int128 cells = 1;
    for (const int64_t extent : extent_) {
      cells *= static_cast<uint64_t>(extent);  // each at most 2^32
      if (cells >> 63 != 0) return false;
    }
    return true;
  }

  int bits() const {
    uint64_t cells = 1;
    for (const int64_t extent : extent_) cells *= static_cast<uint64_t>(extent);
    return bit_length(cells - 1);
  }

  uint64_t pack(const int32_t* c) const {
    uint64_t key = 0;
    for (int axis = 0; axis < 4; ++axis) {
      key *= static_cast<uint64_t>(extent_[axis]);
      key += static_cast<uint64_t>(c[axis] - low_[axis]);
    }
    return key;
  }

 private:
  std::array<int64_t, 4> low_{}, extent_{1, 1, 1, 1};
};

struct UniqueResult {
  int32_t* unique;
  int32_t* inverse;
  int32_t* counts;
};

int64_t write_groups(const KeyRows& sorted, int64_t n, const int32_t* coords,
                     const UniqueResult& result) {
  int64_t m = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i == 0 || sorted.keys[i] != sorted.keys[i - 1]) {
      std::copy_n(coords + 4 * int64_t{sorted.rows[i]}, 4, result.unique + 4 * m);
      result.counts[m++] = 0;
    }
    ++result.counts[m - 1];
    result.inverse[sorted.rows[i]] = static_cast<int32_t>(m - 1);
  }
  return m;
}

int unique_coords(const sl_context* ctx, const DLTensor* coords, DLTensor* unique,
                  DLTensor* inverse, DLTensor* counts, int64_t* m) {
  SL_TRY(check_coords(ctx, "coords", coords));
  const int64_t n = coords->shape[0];
  SL_TRY(check_coords(ctx, "unique", unique));
  SL_TRY(check_extent(ctx, "unique", unique, 0, n));
  SL_TRY(check_int32(ctx, "inverse", inverse, 1));
  SL_TRY(check_extent(ctx, "inverse", inverse, 0, n));
  SL_TRY(check_int32(ctx, "counts", counts, 1));
  SL_TRY(check_extent(ctx, "counts", counts, 0, n));
  SL_TRY(Arena::require(ctx, 4 * kHistogramSize + 24 * n + 256));
  const int32_t* rows = data<const int32_t>(coords);
  const RowPacking packing(rows, n);
  if (!packing.fits()) {
    return fail(ctx, SL_INVALID_ARGUMENT,
                "coords span (%lld, %lld, %lld, %lld) cells, 2^63 or more in all",
                static_cast<long long>(packing.extent(0)),
                static_cast<long long>(packing.extent(1)),
                static_cast<long long>(packing.extent(2)),
                static_cast<long long>(packing.extent(3)));
  }
  Arena arena(ctx);
  uint32_t* histogram = arena.take<uint32_t>(kHistogramSize);
  KeyRows keys{arena.take<uint64_t>(n), arena.take<int32_t>(n)};
  KeyRows scratch{arena.take<uint64_t>(n), arena.take<int32_t>(n)};
  for (int64_t row = 0; row < n; ++row) {
    keys.keys[row] = packing.pack(rows + 4 * row);
    keys.rows[row] = static_cast<int32_t>(row);
  }
  keys = radix_sort(keys, scratch, n, packing.bits(), histogram);
  *m = write_groups(keys, n, rows, UniqueResult{data<int32_t>(unique), data<int32_t>(inverse),
                                                   data<int32_t>(counts)});
  return SL_OK;
}

constexpr int64_t kSerialValues = 1 << 18;  // feats below which one thread is faster

int check_index(const sl_context* ctx, const int32_t* index, int64_t n, int64_t m) {
  for (int64_t row = 0; row < n; ++row) {
    if (index[row] >= 0 && index[row] < m) continue;
    return fail(ctx, SL_INVALID_ARGUMENT, "index[%lld] = %d, outside [0, %lld)",
                static_cast<long long>(row), index[row], static_cast<long long>(m));
  }
  return SL_OK;
}

// Means of the segments [first, end). Every thread reads the whole index and adds, in row order,
// the rows that are its own. A segment without rows is zero.
template <class T>
void mean_segments(const T* feats, const int32_t* index, const int32_t* counts, int64_t n,
                   int64_t c, int64_t first, int64_t end, T* out) {
  std::fill(out + first * c, out + end * c, T(0));
  for (int64_t row = 0; row < n; ++row) {
    if (index[row] < first || index[row] >= end) continue;
    T* sum = out + index[row] * c;
    for (int64_t i = 0; i < c; ++i) sum[i] += feats[row * c + i];
  }
  for (int64_t segment = first; segment < end; ++segment) {
    const T count = static_cast<T>(std::max(counts[segment], 1));  // an empty segment is zero
    for (int64_t i = 0; i < c; ++i) out[segment * c + i] /= count;
  }
}

template <class T>
int segment_mean(const sl_context* ctx, const DLTensor* feats, const DLTensor* index,
                 const DLTensor* counts, DLTensor* out) {
  const int64_t n = feats->shape[0], c = feats->shape[1], m = counts->shape[0];
  const int32_t* rows = data<const int32_t>(index);
  SL_TRY(check_index(ctx, rows, n, m));
  const int threads = n * c < kSerialValues ? 1 : thread_count(ctx);
  parallel_for(threads, threads, [&](int, int64_t share) {
    mean_segments(data<const T>(feats), rows, data<const int32_t>(counts), n, c,
                  m * share / threads, m * (share + 1) / threads, data<T>(out));
  });
  return SL_OK;
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: 24 * n + 49408
extern "C" int sparse3d_unique_coords(const sl_context* ctx, const DLTensor* coords,
                                      DLTensor* unique, DLTensor* inverse, DLTensor* counts,
                                      int64_t* m) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] { return unique_coords(ctx, coords, unique, inverse, counts, m); });
}

// Workspace: 0
extern "C" int sparse3d_segment_mean(const sl_context* ctx, const DLTensor* feats,
                                     const DLTensor* index, const DLTensor* counts,
                                     DLTensor* out) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    SL_TRY(check_float(ctx, "feats", feats, 2));
    SL_TRY(check_int32(ctx, "index", index, 1));
    SL_TRY(check_extent(ctx, "index", index, 0, feats->shape[0]));
    SL_TRY(check_int32(ctx, "counts", counts, 1));
    SL_TRY(check_same_float(ctx, "out", out, 2, feats));
    SL_TRY(check_extent(ctx, "out", out, 0, counts->shape[0]));
    SL_TRY(check_extent(ctx, "out", out, 1, feats->shape[1]));
    return feats->dtype.bits == 32 ? segment_mean<float>(ctx, feats, index, counts, out)
                                   : segment_mean<double>(ctx, feats, index, counts, out);
  });
}
