// Included by dot_<isa>.cpp only, after they define SHIPLAP_VECTOR_BYTES (16, 32 or 64), and compiled with that instruction
// set's flags. Uses no library code (see dot.h).
#include "dot.h"
#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Every loop over a register block is unrolled whole: one that is not would keep the sums in memory.
#define SHIPLAP_UNROLL _Pragma("GCC unroll 16")

namespace shiplap::slidesparse {
namespace {

// Sums of a block of rows x columns stay in registers: 12 and 4 operands fill the 16 of AVX2, whose integer products need
// one more before they are added.
constexpr int kRows = 3, kColumns = 4;
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr int kInt8Rows = 2;
#else
constexpr int kInt8Rows = 3;
#endif

typedef float Floats __attribute__((vector_size(SHIPLAP_VECTOR_BYTES)));
typedef float UnalignedFloats __attribute__((vector_size(SHIPLAP_VECTOR_BYTES), aligned(4), may_alias));
constexpr int64_t kFloats = SHIPLAP_VECTOR_BYTES / 4;

// ---------------------------------------------------------------------------------------------------------------- int8

// Unsigned, since the offset may wrap on the way; the difference does not.
#if defined(__AVX2__)
inline uint32_t total(__m256i sums) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1))));
}
#endif

#if defined(__AVX512VNNI__)

inline uint32_t total(__m512i sums) {
  __m256i halves[2];
  __builtin_memcpy(halves, &sums, sizeof(sums));
  return total(_mm256_add_epi32(halves[0], halves[1]));
}

// vpdpbusd multiplies unsigned by signed bytes: the left side goes in with 128 added (its sign bit turned), and 128 times
// the sum of the right row comes off again, in 32 bits, where wrapping is exact.
struct Int8 {
  typedef __m512i Operand;
  typedef __m512i Sums;
  static constexpr int64_t kStep = 64;
  static Operand load(const int8_t* from) { return _mm512_loadu_si512(from); }
  static Operand some(const int8_t* from, int64_t count) {
    return _mm512_maskz_loadu_epi8((__mmask64{1} << count) - 1, from);
  }
  static Operand left(Operand row) { return _mm512_xor_si512(row, _mm512_set1_epi8(static_cast<char>(0x80))); }
  static void add(Sums& sums, const Operand& left, const Operand& right) {
    sums = _mm512_dpbusd_epi32(sums, left, right);
  }
  static void excess(const int8_t* row, int64_t depth, Sums& sums) {
    const Operand offset = _mm512_set1_epi8(static_cast<char>(0x80));
    int64_t k = 0;
    for (; k + kStep <= depth; k += kStep) add(sums, offset, load(row + k));
    if (k < depth) add(sums, offset, some(row + k, depth - k));
  }
};

#elif defined(__AVX2__)

struct Int8 {
  typedef __m256i Operand;
  typedef __m256i Sums;
  static constexpr int64_t kStep = 16;
  static Operand load(const int8_t* from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Operand some(const int8_t* from, int64_t count) {
    int8_t padded[kStep] = {};
    __builtin_memcpy(padded, from, static_cast<unsigned long>(count));
    return load(padded);
  }
  static Operand left(Operand row) { return row; }
  // In assembly: GCC orders a whole block by kind of instruction, and has too few registers for that.
  static void add(Sums& sums, const Operand& left, const Operand& right) {
    __m256i pairs;
    __asm__("vpmaddwd %[left], %[right], %[pairs]\n\tvpaddd %[pairs], %[sums], %[sums]"
            : [sums] "+x"(sums), [pairs] "=&x"(pairs)
            : [left] "x"(left), [right] "x"(right));
  }
  static void excess(const int8_t*, int64_t, Sums&) {}
};

#else

inline uint32_t total(int32_t __attribute__((vector_size(16))) sums) {
  return static_cast<uint32_t>(sums[0]) + static_cast<uint32_t>(sums[1]) + static_cast<uint32_t>(sums[2]) +
         static_cast<uint32_t>(sums[3]);
}

struct Int8 {
  typedef int16_t Operand __attribute__((vector_size(8)));
  typedef int32_t Sums __attribute__((vector_size(16)));
  typedef int8_t Bytes __attribute__((vector_size(4)));
  static constexpr int64_t kStep = 4;
  static Operand load(const int8_t* from) { return some(from, kStep); }
  static Operand some(const int8_t* from, int64_t count) {
    Bytes bytes = {};
    __builtin_memcpy(&bytes, from, static_cast<unsigned long>(count));
    return __builtin_convertvector(bytes, Operand);
  }
  static Operand left(Operand row) { return row; }
  static void add(Sums& sums, const Operand& left, const Operand& right) {
    sums += __builtin_convertvector(left, Sums) * __builtin_convertvector(right, Sums);
  }
  static void excess(const int8_t*, int64_t, Sums&) {}
};

#endif

// One vector of each row: all of it, or `count` elements.
template <int R, int C, class Load>
inline void step_int8(const Dots<int8_t, int32_t>& d, const int8_t* left, const int8_t* right, const Load& load,
                      Int8::Sums (&sums)[R][C]) {
  Int8::Operand rows[R];
  SHIPLAP_UNROLL
  for (int r = 0; r < R; ++r) rows[r] = Int8::left(load(left + r * d.left_stride));
  SHIPLAP_UNROLL
  for (int c = 0; c < C; ++c) {
    const Int8::Operand weights = load(right + c * d.right_stride);
    SHIPLAP_UNROLL
    for (int r = 0; r < R; ++r) Int8::add(sums[r][c], rows[r], weights);
  }
}

template <int R, int C>
void block_int8(const Dots<int8_t, int32_t>& d, int64_t row, int64_t column, const uint32_t* excess) {
  const int8_t* left = d.left + row * d.left_stride;
  const int8_t* right = d.right + column * d.right_stride;
  const auto whole = [](const int8_t* from) { return Int8::load(from); };
  Int8::Sums sums[R][C] = {};
  int64_t k = 0;
  for (; k + Int8::kStep <= d.depth; k += Int8::kStep) {
    __builtin_prefetch(right + C * (d.right_stride + k));  // rows of the weight mostly lie one behind the other
    step_int8<R, C>(d, left + k, right + k, whole, sums);
  }
  if (k < d.depth) {
    const auto some = [count = d.depth - k](const int8_t* from) { return Int8::some(from, count); };
    step_int8<R, C>(d, left + k, right + k, some, sums);
  }
  SHIPLAP_UNROLL
  for (int r = 0; r < R; ++r) {
    SHIPLAP_UNROLL
    for (int c = 0; c < C; ++c) {
      d.out[(row + r) * kTileColumns + column + c] = static_cast<int32_t>(total(sums[r][c]) - excess[column + c]);
    }
  }
}

// --------------------------------------------------------------------------------------------------------------- float

inline Floats load_floats(const float* from) { return *reinterpret_cast<const UnalignedFloats*>(from); }

template <int R, int C>
void block_float(const Dots<float, float>& d, int64_t row, int64_t column, const uint32_t*) {
  const float* left = d.left + row * d.left_stride;
  const float* right = d.right + column * d.right_stride;
  Floats sums[R][C] = {};
  int64_t k = 0;
  for (; k + kFloats <= d.depth; k += kFloats) {
    Floats rows[R];
    SHIPLAP_UNROLL
    for (int r = 0; r < R; ++r) rows[r] = load_floats(left + r * d.left_stride + k);
    SHIPLAP_UNROLL
    for (int c = 0; c < C; ++c) {
      const Floats weights = load_floats(right + c * d.right_stride + k);
      SHIPLAP_UNROLL
      for (int r = 0; r < R; ++r) sums[r][c] += rows[r] * weights;
    }
  }
  SHIPLAP_UNROLL
  for (int r = 0; r < R; ++r) {
    SHIPLAP_UNROLL
    for (int c = 0; c < C; ++c) {
      float total = 0;
      for (int64_t lane = 0; lane < kFloats; ++lane) total += sums[r][c][lane];
      for (int64_t rest = k; rest < d.depth; ++rest) {
        total += left[r * d.left_stride + rest] * right[c * d.right_stride + rest];
      }
      d.out[(row + r) * kTileColumns + column + c] = total;
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- blocking

template <class D>
using Block = void (*)(const D&, int64_t row, int64_t column, const uint32_t* excess);

// The block of `rows` x `columns` at a place; fewer than a whole block at the edges.
template <class D, int Rows>
void fill(const D& d, const Block<D> (&blocks)[Rows][kColumns], const uint32_t* excess) {
  for (int64_t column = 0; column < d.columns; column += kColumns) {
    const int64_t wide = d.columns - column < kColumns ? d.columns - column : kColumns;
    for (int64_t row = 0; row < d.rows; row += Rows) {
      const int64_t high = d.rows - row < Rows ? d.rows - row : Rows;
      blocks[high - 1][wide - 1](d, row, column, excess);
    }
  }
}

constexpr Block<Dots<int8_t, int32_t>> kInt8Blocks[kInt8Rows][kColumns] = {
    {block_int8<1, 1>, block_int8<1, 2>, block_int8<1, 3>, block_int8<1, 4>},
    {block_int8<2, 1>, block_int8<2, 2>, block_int8<2, 3>, block_int8<2, 4>},
#if !defined(__AVX2__) || defined(__AVX512VNNI__)
    {block_int8<3, 1>, block_int8<3, 2>, block_int8<3, 3>, block_int8<3, 4>},
#endif
};
constexpr Block<Dots<float, float>> kFloatBlocks[kRows][kColumns] = {
    {block_float<1, 1>, block_float<1, 2>, block_float<1, 3>, block_float<1, 4>},
    {block_float<2, 1>, block_float<2, 2>, block_float<2, 3>, block_float<2, 4>},
    {block_float<3, 1>, block_float<3, 2>, block_float<3, 3>, block_float<3, 4>}};

void dot_int8(const Dots<int8_t, int32_t>& d) {
  uint32_t excess[kTileColumns];
  for (int64_t c = 0; c < d.columns; ++c) {
    Int8::Sums sums = {};
    Int8::excess(d.right + c * d.right_stride, d.depth, sums);
    excess[c] = total(sums);
  }
  fill(d, kInt8Blocks, excess);
}

void dot_float(const Dots<float, float>& d) { fill(d, kFloatBlocks, nullptr); }

// -------------------------------------------------------------------------------------------------------------- panels

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

// vpmaddubsw adds the products of two unsigned and two signed bytes in 16 bits, and saturates. With 128 added to the weights
// (and 128 times the sum of the row taken off the result) a pair of a row stays exact if its numbers of one sign add up to
// at most 128. Of other pairs half is kept in the row, and the rest is carried: multiplied apart, with the same panel.
inline __m256i load_bytes(const int8_t* from, int64_t count, int filler) {
  if (count >= 32) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  __m256i padded = _mm256_set1_epi8(static_cast<char>(filler));
  __builtin_memcpy(&padded, from, static_cast<unsigned long>(count));
  return padded;
}

void take_row(const int8_t* from, int64_t depth, int64_t row, const PanelRows& rows) {
  const __m256i ones = _mm256_set1_epi8(1), most = _mm256_set1_epi16(128), zero = _mm256_setzero_si256();
  Carried* carried = rows.carried + row * rows.stride / 4;
  __m256i sums = zero;
  int32_t count = 0;
  for (int64_t k = 0; k < depth; k += 32) {
    const __m256i bytes = load_bytes(from + k, depth - k, 0);
    const __m256i above = _mm256_maddubs_epi16(ones, _mm256_max_epi8(bytes, zero));
    const __m256i below = _mm256_maddubs_epi16(ones, _mm256_min_epi8(bytes, zero));
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_add_epi16(above, below), _mm256_set1_epi16(1)));
    const __m256i under = _mm256_cmpgt_epi16(_mm256_sub_epi16(zero, most), below);
    const __m256i large = _mm256_or_si256(_mm256_cmpgt_epi16(above, most), under);
    __m256i kept = bytes;
    if (!_mm256_testz_si256(large, large)) {
      // An arithmetic shift of bytes: the sign is put back by the sum with 64 in the seventh bit.
      const __m256i sign = _mm256_set1_epi8(0x40);
      const __m256i shifted = _mm256_and_si256(_mm256_srli_epi16(bytes, 1), _mm256_set1_epi8(0x7f));
      const __m256i half = _mm256_sub_epi8(_mm256_xor_si256(shifted, sign), sign);
      kept = _mm256_blendv_epi8(bytes, half, large);
      const __m256i rest = _mm256_sub_epi8(bytes, kept);
      int32_t fours[8];
      __builtin_memcpy(fours, &rest, sizeof(rest));
      for (int four = 0; four < 8; ++four) {
        if (fours[four] != 0) carried[count++] = {static_cast<int32_t>(k / 4 + four), fours[four]};
      }
    }
    __builtin_memcpy(rows.bytes + row * rows.stride + k, &kept, sizeof(kept));
  }
  rows.carries[row] = count;
  rows.excess[row] = static_cast<int32_t>(128 * total(sums));
}

// Four bytes of each of 8 rows side by side, from 32 bytes of each.
inline void store_fours(const __m256i (&rows)[8], uint8_t* to) {
  __m256i pairs[8], fours[8];
  SHIPLAP_UNROLL
  for (int j = 0; j < 8; j += 2) {
    pairs[j] = _mm256_unpacklo_epi32(rows[j], rows[j + 1]);
    pairs[j + 1] = _mm256_unpackhi_epi32(rows[j], rows[j + 1]);
  }
  SHIPLAP_UNROLL
  for (int j = 0; j < 4; ++j) {  // two of pairs 0 and 2, two of 1 and 3, and the same four places behind
    const int from = j / 2 * 4 + j % 2;
    fours[j / 2 * 4 + j % 2 * 2] = _mm256_unpacklo_epi64(pairs[from], pairs[from + 2]);
    fours[j / 2 * 4 + j % 2 * 2 + 1] = _mm256_unpackhi_epi64(pairs[from], pairs[from + 2]);
  }
  SHIPLAP_UNROLL
  for (int j = 0; j < 4; ++j) {
    const __m256i first = _mm256_permute2x128_si256(fours[j], fours[j + 4], 0x20);
    const __m256i second = _mm256_permute2x128_si256(fours[j], fours[j + 4], 0x31);
    __builtin_memcpy(to + j * 4 * kTileColumns, &first, sizeof(first));
    __builtin_memcpy(to + (j + 4) * 4 * kTileColumns, &second, sizeof(second));
  }
}

// A column that is not there gets the numbers of the last one.
void fill_panel(const int8_t* right, int64_t columns, int64_t depth, uint8_t* panel) {
  const __m256i offset = _mm256_set1_epi8(static_cast<char>(0x80));
  for (int64_t half = 0; half < kTileColumns; half += 8) {
    const int8_t* from[8];
    for (int64_t j = 0; j < 8; ++j) from[j] = right + (half + j < columns ? half + j : columns - 1) * depth;
    uint8_t* to = panel + 4 * half;
    int64_t k = 0;
    __m256i rows[8];
    for (; k + 32 <= depth; k += 32, to += 32 * kTileColumns) {
      SHIPLAP_UNROLL
      for (int j = 0; j < 8; ++j) {
        rows[j] = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[j] + k)), offset);
      }
      store_fours(rows, to);
    }
    if (k == depth) continue;
    SHIPLAP_UNROLL
    for (int j = 0; j < 8; ++j) rows[j] = _mm256_xor_si256(load_bytes(from[j] + k, depth - k, 0x80), offset);
    store_fours(rows, to);
  }
}

// Adds the products of four bytes of a row with those of 8 columns.
inline void add_four(__m256i& sums, __m256i weights, __m256i bytes) {
  __m256i pairs;
  __asm__("vpmaddubsw %[bytes], %[weights], %[pairs]\n\t"
          "vpmaddwd %[ones], %[pairs], %[pairs]\n\t"
          "vpaddd %[pairs], %[sums], %[sums]"
          : [sums] "+x"(sums), [pairs] "=&x"(pairs)
          : [bytes] "x"(bytes), [weights] "x"(weights), [ones] "x"(_mm256_set1_epi16(1)));
}

template <int R>
void panel_rows(const PanelRows& rows, int64_t depth, int64_t row, const uint8_t* panel, const char* next, int32_t* out) {
  const auto half = [panel](int64_t four, int which) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + 4 * kTileColumns * four + 32 * which));
  };
  const int8_t* bytes = rows.bytes + row * rows.stride;
  __m256i sums[R][2] = {};
  for (int64_t four = 0; 4 * four < depth; ++four) {
    const __m256i low = half(four, 0), high = half(four, 1);
    __builtin_prefetch(next + 16 * four);
    SHIPLAP_UNROLL
    for (int r = 0; r < R; ++r) {
      int32_t values;
      __builtin_memcpy(&values, bytes + r * rows.stride + 4 * four, 4);
      const __m256i four_bytes = _mm256_set1_epi32(values);
      add_four(sums[r][0], low, four_bytes);
      add_four(sums[r][1], high, four_bytes);
    }
  }
  SHIPLAP_UNROLL
  for (int r = 0; r < R; ++r) {
    const Carried* carried = rows.carried + (row + r) * rows.stride / 4;
    for (const Carried* end = carried + rows.carries[row + r]; carried != end; ++carried) {
      const __m256i rest = _mm256_set1_epi32(carried->bytes);
      add_four(sums[r][0], half(carried->four, 0), rest);
      add_four(sums[r][1], half(carried->four, 1), rest);
    }
    const __m256i excess = _mm256_set1_epi32(rows.excess[row + r]);
    SHIPLAP_UNROLL
    for (int c = 0; c < 2; ++c) {
      const __m256i exact = _mm256_sub_epi32(sums[r][c], excess);
      __builtin_memcpy(out + r * kTileColumns + 8 * c, &exact, sizeof(exact));
    }
  }
}

void dot_panel(const PanelRows& rows, int64_t depth, int64_t row, int64_t count, const uint8_t* panel, const void* next,
               int32_t* out) {
  const char* part = static_cast<const char*>(next);  // four blocks of rows read it into the cache
  for (; count >= 4; count -= 4, row += 4, out += 4 * kTileColumns, part += 4 * depth) {
    panel_rows<4>(rows, depth, row, panel, part, out);
  }
  if (count == 3) panel_rows<3>(rows, depth, row, panel, part, out);
  if (count == 2) panel_rows<2>(rows, depth, row, panel, part, out);
  if (count == 1) panel_rows<1>(rows, depth, row, panel, part, out);
}

constexpr Panels kPanels{take_row, fill_panel, dot_panel};

#else
constexpr Panels kPanels{};
#endif

// ---------------------------------------------------------------------------------------------------------------- rows

template <class S>
void widen_row(const void* from, float* to, int64_t count) {
  const S* row = static_cast<const S*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = widen(row[i]);
}

float largest(const float* row, int64_t count) {
  // As integers magnitudes compare like numbers, with infinity above them and NaN above that: no branch, any order.
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t bits = static_cast<int32_t>(as_bits(row[i]) & 0x7fffffff);
    most = bits > most ? bits : most;
  }
  return as_float(static_cast<uint32_t>(most));
}

// `value` within +-limit. In integers, since the choice between two floats is a branch to the compiler.
inline float within(float value, float limit) {
  const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffff, most = as_bits(limit);
  return as_float((magnitude < most ? magnitude : most) | (bits & 0x80000000));
}

// Bytes may alias anything, so what the loops read is said to lie elsewhere.
void to_int8(const Quantise& q) {
  const float* __restrict row = q.row;
  int8_t* __restrict out = static_cast<int8_t*>(q.out);
  const float inverse = q.inverse;
  const int64_t count = q.count;
  // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<int8_t>(as_bits(within(row[i] * inverse, 127.0f) + 0x1.8p23f));
  }
}

void to_float8(const Quantise& q) {
  const float* __restrict row = q.row;
  uint8_t* __restrict out = static_cast<uint8_t*>(q.out);
  const float inverse = q.inverse;
  const int64_t count = q.count;
  for (int64_t i = 0; i < count; ++i) out[i] = narrow_float8(within(row[i] * inverse, 448.0f));
}

constexpr Kernels kKernels{
    dot_int8, kPanels, dot_float,
    {widen_row<Float8>, widen_row<Half>, widen_row<Bfloat16>, widen_row<float>, widen_row<double>},
    largest, to_int8, to_float8};

}  // namespace
}  // namespace shiplap::slidesparse
