// masked_gemm_signals, masked_gemm_kernels: what postprocess.py derives from a table.
#include "common.h"
#include "radix_sort.h"

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kMaxTaps = 32;
constexpr int64_t kBlock = 2048;
constexpr int64_t kSerialEntries = 100000;

uint32_t gray_code(const int32_t* row, int64_t taps) {
  uint32_t code = 0;
  for (int64_t tap = 0; tap < taps; ++tap) code |= uint32_t{row[tap] >= 0} << tap;
  return code;
}

// Position of a code in the Gray sequence: the prefix XOR of its bits.
uint32_t gray_rank(uint32_t code) {
  for (int shift = 1; shift < kMaxTaps; shift *= 2) code ^= code >> shift;
  return code;
}

struct Signals {
  int32_t* gray;
  int64_t* sorted;
  int32_t* inputs;
  int32_t* outputs;
  int64_t* ends;
};

void list_pairs(const int32_t* table, int64_t rows, int64_t taps, int threads, const Signals& out) {
  std::fill_n(out.ends, taps + 1, 0);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t tap = 0; tap < taps; ++tap) out.ends[tap + 1] += table[i * taps + tap] >= 0;
  }
  for (int64_t tap = 0; tap < taps; ++tap) out.ends[tap + 1] += out.ends[tap];
  parallel_for(threads, taps, [&](int, int64_t tap) {
    int64_t at = out.ends[tap];
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t entry = table[row * taps + tap];
      if (entry < 0) continue;
      out.inputs[at] = entry;
      out.outputs[at++] = static_cast<int32_t>(row);
    }
  });
  const int64_t count = out.ends[taps];
  std::fill_n(out.inputs + count, rows * taps - count, -1);
  std::fill_n(out.outputs + count, rows * taps - count, -1);
}

int signals(const sl_context* ctx, const DLTensor* table, const Signals& out) {
  const int64_t rows = table->shape[0], taps = table->shape[1];
  SL_TRY(Arena::require(ctx, 24 * rows + 4 * kHistogramSize + 320));
  Arena arena(ctx);
  uint32_t* histogram = arena.take<uint32_t>(kHistogramSize);
  KeyRows ranks{arena.take<uint64_t>(rows), arena.take<int32_t>(rows)};
  KeyRows scratch{arena.take<uint64_t>(rows), arena.take<int32_t>(rows)};
  const int32_t* entries = data<const int32_t>(table);
  const int threads = rows * taps < kSerialEntries ? 1 : thread_count(ctx);
  parallel_for(threads, cdiv(rows, kBlock), [&](int, int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * kBlock);
    for (int64_t row = task * kBlock; row < end; ++row) {
      const uint32_t code = gray_code(entries + row * taps, taps);
      out.gray[row] = static_cast<int32_t>(code);
      ranks.keys[row] = gray_rank(code);
      ranks.rows[row] = static_cast<int32_t>(row);
    }
  });
  ranks = radix_sort(ranks, scratch, rows, static_cast<int>(taps), histogram);
  std::copy_n(ranks.rows, rows, out.sorted);
  list_pairs(entries, rows, taps, threads, out);
  return SL_OK;
}

}  // namespace
}  // namespace shiplap::sparse3d

// Workspace: 24 * n + 49472
extern "C" int sparse3d_masked_gemm_signals(const sl_context* ctx, const DLTensor* table,
                                            DLTensor* gray_code, DLTensor* sorted_index,
                                            DLTensor* valid_signal_i, DLTensor* valid_signal_o,
                                            DLTensor* valid_signal_seg) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    SL_TRY(check_int32(ctx, "table", table, 2));
    const int64_t n = table->shape[0], v = table->shape[1];
    if (v > kMaxTaps) return fail(ctx, SL_INVALID_ARGUMENT, "more than 32 taps");
    SL_TRY(check_int32(ctx, "gray_code", gray_code, 1));
    SL_TRY(check_extent(ctx, "gray_code", gray_code, 0, n));
    SL_TRY(check_int64(ctx, "sorted_index", sorted_index, 1));
    SL_TRY(check_extent(ctx, "sorted_index", sorted_index, 0, n));
    SL_TRY(check_int64(ctx, "valid_signal_seg", valid_signal_seg, 1));
    SL_TRY(check_extent(ctx, "valid_signal_seg", valid_signal_seg, 0, v + 1));
    SL_TRY(check_extent(ctx, "valid_signal_i", valid_signal_i, 0, n * v));
    SL_TRY(check_extent(ctx, "valid_signal_o", valid_signal_o, 0, n * v));
    return signals(ctx, table,
                   Signals{data<int32_t>(gray_code), data<int64_t>(sorted_index),
                           data<int32_t>(valid_signal_i), data<int32_t>(valid_signal_o),
                           data<int64_t>(valid_signal_seg)});
  });
}

// Workspace: 0
extern "C" int sparse3d_masked_gemm_kernels(const sl_context* ctx, const DLTensor* gray_code,
                                            const DLTensor* sorted_index, DLTensor* valid_kernel,
                                            DLTensor* valid_kernel_seg, int64_t block) {
  using namespace shiplap::sparse3d;
  return guarded(ctx, [&] {
    SL_TRY(check_int32(ctx, "gray_code", gray_code, 1));
    SL_TRY(check_int64(ctx, "sorted_index", sorted_index, 1));
    const int64_t n = gray_code->shape[0];
    SL_TRY(check_extent(ctx, "sorted_index", sorted_index, 0, n));
    if (block < 1) return fail(ctx, SL_INVALID_ARGUMENT, "block is not positive");
    const int64_t blocks = n == 0 ? 0 : (n - 1) / block + 1;
    SL_TRY(check_int32(ctx, "valid_kernel", valid_kernel, 1));
    SL_TRY(check_int32(ctx, "valid_kernel_seg", valid_kernel_seg, 1));
    SL_TRY(check_extent(ctx, "valid_kernel", valid_kernel, 0, kMaxTaps * blocks));
    SL_TRY(check_extent(ctx, "valid_kernel_seg", valid_kernel_seg, 0, blocks + 1));
    const int32_t* gray = data<const int32_t>(gray_code);
    const int64_t* order = data<const int64_t>(sorted_index);
    int32_t* taps = data<int32_t>(valid_kernel);
    int32_t* ends = data<int32_t>(valid_kernel_seg);
    int64_t count = 0;
    ends[0] = 0;
    for (int64_t i = 0; i < blocks; ++i) {
      uint32_t code = 0;
      const int64_t end = n - i * block < block ? n : (i + 1) * block;
      for (int64_t at = i * block; at < end; ++at) {
        if (order[at] < 0 || order[at] >= n) {
          return fail(ctx, SL_INVALID_ARGUMENT, "sorted_index[%lld] = %lld is no row",
                      static_cast<long long>(at), static_cast<long long>(order[at]));
        }
        code |= static_cast<uint32_t>(gray[order[at]]);
      }
      for (int32_t tap = 0; tap < kMaxTaps; ++tap) {
        if (code >> tap & 1) taps[count++] = tap;
      }
      ends[i + 1] = static_cast<int32_t>(count);
    }
    std::fill(taps + count, taps + kMaxTaps * blocks, -1);
    return static_cast<int>(SL_OK);
  });
}
