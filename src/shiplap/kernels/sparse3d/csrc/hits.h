// Hits of a block of table rows, grouped by tap: the form in which the matrix kernels consume a
// table. A submanifold table of a surface is about half misses, a LiDAR scan's mostly misses;
// grouping by tap means no multiplication is spent on a miss.
#ifndef SHIPLAP_SPARSE3D_HITS_H_
#define SHIPLAP_SPARSE3D_HITS_H_

#include "common.h"

namespace shiplap::sparse3d {

class HitLists {
 public:
  static int64_t bytes(int64_t capacity, int64_t taps) {
    return 2 * round_up(4 * capacity * taps, 64) + round_up(4 * taps, 64);
  }

  // Room for `capacity` table rows times `taps` taps.
  HitLists(Arena& arena, int64_t capacity, int64_t taps)
      : capacity_(capacity),
        from_(arena.take<int32_t>(capacity * taps)),
        to_(arena.take<int32_t>(capacity * taps)),
        counts_(arena.take<int32_t>(taps)) {}

  // Collects `rows` (at most the capacity) table rows, each `stride` entries after the last, of
  // which `taps` are read. False when an entry is outside [-1, limit).
  bool collect(const int32_t* table, int64_t stride, int64_t rows, int64_t taps, int64_t limit) {
    std::fill_n(counts_, taps, 0);
    bool valid = true;
    for (int64_t row = 0; row < rows; ++row, table += stride) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        const int32_t entry = table[tap];
        // Written always, kept only for a hit: a branch here would be mispredicted.
        const int64_t slot = tap * capacity_ + counts_[tap];
        from_[slot] = entry;
        to_[slot] = static_cast<int32_t>(row);
        counts_[tap] += entry >= 0;
        valid &= entry >= -1 && entry < limit;
      }
    }
    return valid;
  }

  int64_t count(int64_t tap) const { return counts_[tap]; }
  const int32_t* from(int64_t tap) const { return from_ + tap * capacity_; }  // entries
  const int32_t* to(int64_t tap) const { return to_ + tap * capacity_; }      // rows, ascending

 private:
  int64_t capacity_;
  int32_t* from_;
  int32_t* to_;
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
