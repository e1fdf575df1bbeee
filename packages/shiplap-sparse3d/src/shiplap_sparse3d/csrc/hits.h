// Hits of a block of table rows, grouped by tap: the form in which the matrix kernels consume a
// table. A submanifold table of a surface is about half misses, a LiDAR scan's mostly misses;
// grouping by tap means no multiplication is spent on a miss.
#ifndef SHIPLAP_SPARSE3D_HITS_H_
#define SHIPLAP_SPARSE3D_HITS_H_

#include "common.h"
#include "gemm_kernels.h"

namespace shiplap::sparse3d {

class HitLists {
 public:
  // `capacity` is a multiple of 16: as many hits are stored at once.
  static int64_t bytes(int64_t capacity, int64_t taps) {
    return 8 * stride(capacity) * taps + round_up(4 * taps, 64);
  }

  // Room for `capacity` table rows times `taps` taps.
  HitLists(Arena& arena, const IsaKernels& kernels, int64_t capacity, int64_t taps)
      : kernels_(kernels),
        stride_(stride(capacity)),
        lists_(arena.take<Hit>(stride_ * taps)),
        counts_(arena.take<int32_t>(taps)) {}

  // Collects `rows` (at most the capacity) table rows, each `table_stride` entries after the
  // last, of which `taps` are read. False when an entry is outside [-1, limit).
  bool collect(const int32_t* table, int64_t table_stride, int64_t rows, int64_t taps,
               int64_t limit) {
    std::fill_n(counts_, taps, 0);
    return kernels_.collect_hits(
        CollectHits{table, table_stride, rows, taps, limit, lists_, stride_, counts_});
  }

  int64_t count(int64_t tap) const { return counts_[tap]; }
  const Hit* list(int64_t tap) const { return lists_ + tap * stride_; }

 private:
  // Lists a power of two apart would all fall into the same few sets of the L1 cache.
  static int64_t stride(int64_t capacity) { return capacity + 8; }

  const IsaKernels& kernels_;
  int64_t stride_;
  Hit* lists_;
  int32_t* counts_;
};

// The message for a table that collect() refused: its first entry outside [-1, limit).
inline int report_bad_entry(const sl_context* ctx, const DLTensor* table, int64_t limit) {
  const int32_t* entries = data<const int32_t>(table);
  const int64_t taps = table->shape[1];
  for (int64_t i = 0; i < table->shape[0] * taps; ++i) {
    if (entries[i] >= -1 && entries[i] < limit) continue;
    return fail(ctx, SL_INVALID_ARGUMENT, "table[%lld, %lld] = %d but feats has %lld rows",
                static_cast<long long>(i / taps), static_cast<long long>(i % taps), entries[i],
                static_cast<long long>(limit));
  }
  return fail(ctx, SL_INTERNAL, "the table changed while it was read");
}

}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_HITS_H_
