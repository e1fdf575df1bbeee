#include "radix_sort.h"

#include <cstring>
#include <utility>

namespace shiplap::sparse3d {
namespace {

constexpr int kBuckets = 1 << kRadixBits;

inline int digit_of(uint64_t key, int pass) {
  return static_cast<int>(key >> (pass * kRadixBits)) & (kBuckets - 1);
}

// One read of the keys counts the digits of every pass.
void count_digits(const uint64_t* keys, int64_t n, int passes, uint32_t* histogram) {
  std::memset(histogram, 0, sizeof(uint32_t) * static_cast<size_t>(passes) * kBuckets);
  for (int64_t i = 0; i < n; ++i) {
    for (int pass = 0; pass < passes; ++pass) {
      ++histogram[pass * kBuckets + digit_of(keys[i], pass)];
    }
  }
}

void to_offsets(uint32_t* counts) {
  uint32_t offset = 0;
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    offset += std::exchange(counts[bucket], offset);
  }
}

void scatter(KeyRows from, KeyRows to, int64_t n, int pass, uint32_t* offsets) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t slot = offsets[digit_of(from.keys[i], pass)]++;
    to.keys[slot] = from.keys[i];
    if (from.rows != nullptr) to.rows[slot] = from.rows[i];
  }
}

}  // namespace

KeyRows radix_sort(KeyRows input, KeyRows scratch, int64_t n, int bits, uint32_t* histogram) {
  if (n == 0) return input;
  const int passes = (bits + kRadixBits - 1) / kRadixBits;
  count_digits(input.keys, n, passes, histogram);
  for (int pass = 0; pass < passes; ++pass) {
    uint32_t* counts = histogram + pass * kBuckets;
    // A digit that all keys share (the batch index, often) needs no pass.
    if (counts[digit_of(input.keys[0], pass)] == static_cast<uint64_t>(n)) continue;
    to_offsets(counts);
    scatter(input, scratch, n, pass, counts);
    std::swap(input, scratch);
  }
  return input;
}

}  // namespace shiplap::sparse3d
