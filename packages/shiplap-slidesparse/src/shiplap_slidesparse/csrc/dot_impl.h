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

// Sums of a block of rows x columns stay in registers: 12 and 7 operands fill the 16 of AVX2.
constexpr int kRows = 3, kColumns = 4;

typedef float Floats __attribute__((vector_size(SHIPLAP_VECTOR_BYTES)));
typedef float UnalignedFloats __attribute__((vector_size(SHIPLAP_VECTOR_BYTES), aligned(4), may_alias));
constexpr int64_t kFloats = SHIPLAP_VECTOR_BYTES / 4;

// ---------------------------------------------------------------------------------------------------------------- int8

#if defined(__AVX512VNNI__)

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
  static void add(Sums& sums, const Operand& left, const Operand& right) {
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(left, right));
  }
  static void excess(const int8_t*, int64_t, Sums&) {}
};

#else

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

// Unsigned, since the offset may wrap on the way; the difference does not.
inline uint32_t total(const Int8::Sums& sums) {
  uint32_t lanes[sizeof(sums) / 4], total = 0;
  __builtin_memcpy(lanes, &sums, sizeof(sums));
  for (const uint32_t lane : lanes) total += lane;
  return total;
}

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
  for (; k + Int8::kStep <= d.depth; k += Int8::kStep) step_int8<R, C>(d, left + k, right + k, whole, sums);
  if (k < d.depth) {
    const auto some = [count = d.depth - k](const int8_t* from) { return Int8::some(from, count); };
    step_int8<R, C>(d, left + k, right + k, some, sums);
  }
  for (int r = 0; r < R; ++r) {
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
  for (int r = 0; r < R; ++r) {
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
template <class D>
void fill(const D& d, const Block<D> (&blocks)[kRows][kColumns], const uint32_t* excess) {
  for (int64_t column = 0; column < d.columns; column += kColumns) {
    const int64_t wide = d.columns - column < kColumns ? d.columns - column : kColumns;
    for (int64_t row = 0; row < d.rows; row += kRows) {
      const int64_t high = d.rows - row < kRows ? d.rows - row : kRows;
      blocks[high - 1][wide - 1](d, row, column, excess);
    }
  }
}

constexpr Block<Dots<int8_t, int32_t>> kInt8Blocks[kRows][kColumns] = {
    {block_int8<1, 1>, block_int8<1, 2>, block_int8<1, 3>, block_int8<1, 4>},
    {block_int8<2, 1>, block_int8<2, 2>, block_int8<2, 3>, block_int8<2, 4>},
    {block_int8<3, 1>, block_int8<3, 2>, block_int8<3, 3>, block_int8<3, 4>}};
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
    dot_int8, dot_float,
    {widen_row<Float8>, widen_row<Half>, widen_row<Bfloat16>, widen_row<float>, widen_row<double>},
    largest, to_int8, to_float8};

}  // namespace
}  // namespace shiplap::slidesparse
