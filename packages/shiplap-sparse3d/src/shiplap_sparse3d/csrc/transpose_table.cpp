// transpose_table: t[table[j, v], v] = j, -1 elsewhere.
#include "hits.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kBlockRows = 2048;
constexpr int64_t kSerialEntries = 100000;

// Two rows that name the same entry under one tap write the same place. They may do so from two
// threads, hence the atomic type (a plain store on every machine).
void put(int32_t* slot, int32_t value) { __atomic_store_n(slot, value, __ATOMIC_RELAXED); }
int32_t get(const int32_t* slot) { return __atomic_load_n(slot, __ATOMIC_RELAXED); }

struct Transpose {
  const int32_t* table;
  int64_t m, taps;
  int32_t* out;
  int64_t rows;

  // Calls body(slot, entry, row) for the hits of table rows [first, end); false if body says so
  // or an entry is out of range.
  template <class Body>
  bool each_hit(int64_t first, int64_t end, const Body& body) const {
    bool good = true;
    for (int64_t row = first; row < end; ++row) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        const int32_t entry = table[row * taps + tap];
        if (entry == -1) continue;
        if (entry < -1 || entry >= rows) return false;
        good &= body(out + entry * taps + tap, static_cast<int32_t>(row));
      }
    }
    return good;
  }

  // Runs body(first, end) over blocks of [0, count); false if one of them returns false.
  template <class Body>
  static bool blocks(int threads, int64_t count, const Body& body) {
    std::atomic<bool> good{true};
    parallel_for(threads, cdiv(count, kBlockRows), [&](int, int64_t task) {
      const int64_t first = task * kBlockRows;
      if (!body(first, std::min(first + kBlockRows, count))) {
        good.store(false, std::memory_order_relaxed);
      }
    });
    return good.load();
  }

  // False when an entry is out of range or written twice.
  bool run(int threads) const {
    blocks(threads, rows, [this](int64_t first, int64_t end) {
      std::fill(out + first * taps, out + end * taps, -1);
      return true;
    });
    const bool in_range = blocks(threads, m, [this](int64_t first, int64_t end) {
      return each_hit(first, end, [](int32_t* slot, int32_t row) {
        put(slot, row);
        return true;
      });
    });
    // Whoever was overwritten finds another row in its place, whatever the order was.
    return in_range && blocks(threads, m, [this](int64_t first, int64_t end) {
      return each_hit(first, end, [](int32_t* slot, int32_t row) { return get(slot) == row; });
    });
  }
};

// Goes through the table again, in order, for a message that does not depend on the threads.
int report(const sl_context* ctx, const Transpose& t) {
  std::fill_n(t.out, t.rows * t.taps, -1);
  for (int64_t i = 0; i < t.m * t.taps; ++i) {
    const long long row = i / t.taps, tap = i % t.taps;
    const int32_t entry = t.table[i];
    if (entry == -1) continue;
    if (entry < -1 || entry >= t.rows) {
      return fail(ctx, SL_INVALID_ARGUMENT, "table[%lld, %lld] = %d but rows is %lld", row, tap,
                  entry, static_cast<long long>(t.rows));
    }
    int32_t& slot = t.out[entry * t.taps + tap];
    if (slot != -1) {
      return fail(ctx, SL_INVALID_ARGUMENT,
                  "table[%d, %lld] and table[%lld, %lld] are both %d: no transpose has both",
                  slot, tap, row, tap, entry);
    }
    slot = static_cast<int32_t>(row);
  }
  return fail(ctx, SL_INTERNAL, "the table changed while it was read");
}

int transpose_table(const sl_context* ctx, const DLTensor* table, DLTensor* out, int64_t rows) {
  SL_TRY(check_int32(ctx, "table", table, 2));
  SL_TRY(check_int32(ctx, "out", out, 2));
  SL_TRY(check_extent(ctx, "out", out, 0, rows));
  SL_TRY(check_extent(ctx, "out", out, 1, table->shape[1]));
  const int64_t m = table->shape[0], taps = table->shape[1];
  const Transpose transpose{data<const int32_t>(table), m, taps, data<int32_t>(out), rows};
  const int threads = (m + rows) * taps < kSerialEntries ? 1 : thread_count(ctx);
  return transpose.run(threads) ? SL_OK : report(ctx, transpose);
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: 0
extern "C" int sparse3d_transpose_table(const sl_context* ctx, const DLTensor* table,
                                        DLTensor* out, int64_t rows) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] { return transpose_table(ctx, table, out, rows); });
}
