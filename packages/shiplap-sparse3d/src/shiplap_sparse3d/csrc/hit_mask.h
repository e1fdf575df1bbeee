// Which of up to 64 table entries are hits, as a bit mask. Part of gemm_kernels_impl.h, so of
// internal linkage and compiled once per instruction set.
#ifndef SHIPLAP_SPARSE3D_HIT_MASK_H_
#define SHIPLAP_SPARSE3D_HIT_MASK_H_

#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace shiplap::sparse3d {
namespace {

typedef uint32_t Entries __attribute__((vector_size(32)));
typedef uint32_t UnalignedEntries __attribute__((vector_size(32), aligned(4), may_alias));

// Sign bits of eight entries: the misses.
inline uint64_t miss_bits(const int32_t* entries) {
#if defined(__AVX2__)
  const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(entries));
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(all)));
#elif defined(__SSE2__)
  const auto four = [](const int32_t* from) {
    const __m128i loaded = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return static_cast<uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(loaded)));
  };
  return four(entries) | four(entries + 4) << 4;
#else
  uint64_t bits = 0;
  for (int i = 0; i < 8; ++i) bits |= static_cast<uint64_t>(entries[i] < 0) << i;
  return bits;
#endif
}

// The largest entry + 1 seen, modulo 2^32: -1 is the smallest, an entry below it a huge one.
struct EntryRange {
  Entries vectors = {};
  uint32_t rest = 0;

  uint32_t largest() const {
    uint32_t largest = rest;
    for (int lane = 0; lane < 8; ++lane) {
      if (vectors[lane] > largest) largest = vectors[lane];
    }
    return largest;
  }
};

// Bit i is set where entries[i] >= 0, for i < width <= 64.
inline uint64_t hit_mask(const int32_t* entries, int64_t width, EntryRange& range) {
  uint64_t hits = 0;
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) {
    hits |= (miss_bits(entries + i) ^ 0xff) << i;
    const Entries next = *reinterpret_cast<const UnalignedEntries*>(entries + i) + 1;
    range.vectors = next > range.vectors ? next : range.vectors;
  }
  for (; i < width; ++i) {
    hits |= static_cast<uint64_t>(entries[i] >= 0) << i;
    const uint32_t next = static_cast<uint32_t>(entries[i]) + 1;
    range.rest = next > range.rest ? next : range.rest;
  }
  return hits;
}

}  // namespace
}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_HIT_MASK_H_
