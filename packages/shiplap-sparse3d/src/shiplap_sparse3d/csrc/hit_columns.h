// Hits of sixteen table rows at a time, with AVX-512: a square of entries is transposed, so that a tap's entries lie in
// one vector, from which the hits are compressed. No branch depends on the entries. Part of gemm_kernels_impl.h, so of
// internal linkage.
#ifndef SHIPLAP_SPARSE3D_HIT_COLUMNS_H_
#define SHIPLAP_SPARSE3D_HIT_COLUMNS_H_

#include "gemm_kernels.h"

#if defined(__AVX512F__)
#include <immintrin.h>

namespace shiplap::sparse3d {
namespace {

constexpr int64_t kSquare = 16;  // rows and columns of a square of entries
// All lanes: GCC 12 warns of what it leaves undefined in the forms without a mask.
constexpr __mmask16 kAll = 0xffff;

// A square of entries, by rows or by columns.
struct Square {
  __m512i lines[kSquare];
};

// Returns the square with rows and columns exchanged.
inline Square transpose(const Square& rows) {
  Square pairs, fours, columns;
  SHIPLAP_UNROLL
  for (int i = 0; i < 16; i += 2) {
    pairs.lines[i] = _mm512_maskz_unpacklo_epi32(kAll, rows.lines[i], rows.lines[i + 1]);
    pairs.lines[i + 1] = _mm512_maskz_unpackhi_epi32(kAll, rows.lines[i], rows.lines[i + 1]);
  }
  SHIPLAP_UNROLL
  for (int i = 0; i < 16; i += 4) {
    SHIPLAP_UNROLL
    for (int j = 0; j < 2; ++j) {
      const __m512i low = pairs.lines[i + j], high = pairs.lines[i + j + 2];
      fours.lines[i + 2 * j] = _mm512_maskz_unpacklo_epi64(0xff, low, high);
      fours.lines[i + 2 * j + 1] = _mm512_maskz_unpackhi_epi64(0xff, low, high);
    }
  }
  // Quarter q of fours[4 * i + j] has column 4 * q + j of rows 4 * i to 4 * i + 3.
  SHIPLAP_UNROLL
  for (int j = 0; j < 4; ++j) {
    const __m512i *f = fours.lines + j;
    const __m512i even = _mm512_maskz_shuffle_i32x4(kAll, f[0], f[4], 0x88);
    const __m512i odd = _mm512_maskz_shuffle_i32x4(kAll, f[0], f[4], 0xdd);
    const __m512i last_even = _mm512_maskz_shuffle_i32x4(kAll, f[8], f[12], 0x88);
    const __m512i last_odd = _mm512_maskz_shuffle_i32x4(kAll, f[8], f[12], 0xdd);
    columns.lines[j] = _mm512_maskz_shuffle_i32x4(kAll, even, last_even, 0x88);
    columns.lines[j + 4] = _mm512_maskz_shuffle_i32x4(kAll, odd, last_odd, 0x88);
    columns.lines[j + 8] = _mm512_maskz_shuffle_i32x4(kAll, even, last_even, 0xdd);
    columns.lines[j + 12] = _mm512_maskz_shuffle_i32x4(kAll, odd, last_odd, 0xdd);
  }
  return columns;
}

// Appends the hits among the entries of one tap to its list. Sixteen are stored, of which the hits count: the list's
// room is a whole number of squares.
inline void append_hits(__m512i entries, __m512i rows, Hit* list, int32_t* count) {
  const __m512i none = _mm512_setzero_si512();
  const __mmask16 hits = _mm512_cmpge_epi32_mask(entries, none);
  const __m512i from = _mm512_maskz_compress_epi32(hits, entries);
  const __m512i to = _mm512_maskz_compress_epi32(hits, rows);
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  _mm512_storeu_si512(list + *count, _mm512_permutex2var_epi32(from, first, to));
  _mm512_storeu_si512(list + *count + 8, _mm512_permutex2var_epi32(from, second, to));
  *count += __builtin_popcount(hits);
}

bool collect_hit_columns(const CollectHits& c) {
  const __m512i one = _mm512_set1_epi32(1);
  __m512i largest = _mm512_setzero_si512();  // entry + 1 modulo 2^32, as in EntryRange
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t row = 0; row < c.rows; row += kSquare) {
    const __m512i rows = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int32_t>(row)));
    const int64_t present = c.rows - row < kSquare ? c.rows - row : kSquare;
    for (int64_t tap = 0; tap < c.taps; tap += kSquare) {
      const int64_t width = c.taps - tap < kSquare ? c.taps - tap : kSquare;
      const __mmask16 mask = static_cast<__mmask16>((1u << width) - 1);
      const int32_t* from = c.table + row * c.table_stride + tap;
      Square square;
      SHIPLAP_UNROLL
      for (int i = 0; i < 16; ++i) {
        const __mmask16 read = i < present ? mask : 0;
        const __m512i missing = _mm512_set1_epi32(-1);
        square.lines[i] = _mm512_mask_loadu_epi32(missing, read, from + (read ? i * c.table_stride : 0));
        largest = _mm512_maskz_max_epu32(kAll, largest, _mm512_add_epi32(square.lines[i], one));
      }
      square = transpose(square);
      Hit* list = c.lists + tap * c.list_stride;
      for (int64_t v = 0; v < width; ++v, list += c.list_stride) {
        append_hits(square.lines[v], rows, list, c.counts + tap + v);
      }
    }
  }
  uint32_t lanes[kSquare], most = 0;
  _mm512_storeu_si512(lanes, largest);
  for (const uint32_t value : lanes) most = value > most ? value : most;
  return most <= static_cast<uint64_t>(c.limit);
}

}  // namespace
}  // namespace shiplap::sparse3d
#endif  // __AVX512F__

#endif  // SHIPLAP_SPARSE3D_HIT_COLUMNS_H_
