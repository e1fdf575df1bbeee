// Sorted tables are made for GPUs. Here they are put back into the order of their output rows.
#ifndef SHIPLAP_SPARSE3D_SORTED_TABLE_H_
#define SHIPLAP_SPARSE3D_SORTED_TABLE_H_

#include "common.h"

namespace shiplap::sparse3d {

// Workspace of a table: `order` may be there or not.
inline int64_t unsorted_bytes(int64_t m, int64_t taps) { return round_up(4 * m * taps, 64); }

// Points `entries` at the table [m, taps] by output row: the one given, or a copy in the arena. Taps
// are cut into parts, and row r of part p belongs to output row order[p, r].
inline int by_output_row(const sl_context* ctx, const DLTensor* table, const DLTensor* order,
                         Arena& arena, const int32_t** entries) {
  const int32_t* sorted = data<const int32_t>(table);
  *entries = sorted;
  if (order == nullptr) return SL_OK;
  const int64_t m = table->shape[0], taps = table->shape[1];
  SL_TRY(check_int32(ctx, "order", order, 2));
  SL_TRY(check_extent(ctx, "order", order, 1, m));
  int32_t* found = arena.take<int32_t>(m * taps);
  *entries = found;
  if (m == 0 || taps == 0) return SL_OK;
  const int64_t parts = order->shape[0], part = cdiv(taps, std::max<int64_t>(parts, 1));
  if (parts * part < taps) return fail(ctx, SL_INVALID_ARGUMENT, "order has no parts");
  std::fill_n(found, m * taps, -1);
  for (int64_t p = 0; p < cdiv(taps, part); ++p) {
    const int64_t first = p * part, width = std::min(part, taps - first);
    const int32_t* rows = data<const int32_t>(order) + p * m;
    for (int64_t r = 0; r < m; ++r) {
      if (rows[r] < 0 || rows[r] >= m) {
        return fail(ctx, SL_INVALID_ARGUMENT, "order[%lld, %lld] = %d but the table has %lld rows",
                    static_cast<long long>(p), static_cast<long long>(r), rows[r],
                    static_cast<long long>(m));
      }
      std::copy_n(sorted + r * taps + first, width, found + rows[r] * taps + first);
    }
  }
  return SL_OK;
}

}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_SORTED_TABLE_H_
