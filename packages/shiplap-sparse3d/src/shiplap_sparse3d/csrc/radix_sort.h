// A stable least-significant-digit radix sort of 64-bit keys that carry an int32 row each.
#ifndef SHIPLAP_SPARSE3D_RADIX_SORT_H_
#define SHIPLAP_SPARSE3D_RADIX_SORT_H_

#include <cstdint>

namespace shiplap::sparse3d {

struct KeyRows {
  uint64_t* keys;
  int32_t* rows;  // nullptr: sort bare keys
};

constexpr int kRadixBits = 11;
constexpr int kRadixPasses = (64 + kRadixBits - 1) / kRadixBits;
constexpr int64_t kHistogramSize = int64_t{kRadixPasses} << kRadixBits;  // uint32 each, 48 KiB

// Sorts the `n` entries of `input` by key; keys lie below 2^bits. Both buffers are overwritten;
// returns the one that holds the result.
KeyRows radix_sort(KeyRows input, KeyRows scratch, int64_t n, int bits, uint32_t* histogram);

// Number of bits of `value`; 0 for 0.
inline int bit_length(uint64_t value) { return value == 0 ? 0 : 64 - __builtin_clzll(value); }

}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_RADIX_SORT_H_
