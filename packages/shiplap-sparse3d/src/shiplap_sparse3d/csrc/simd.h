// Vectors of sums, and elements as they are stored read into them. Part of gemm_kernels_impl.h, so of
// internal linkage and compiled once per instruction set.
#ifndef SHIPLAP_SPARSE3D_SIMD_H_
#define SHIPLAP_SPARSE3D_SIMD_H_

#include "number.h"

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

// Every loop over rows or vectors of a register block is unrolled whole: one that is not would
// index the sums at run time and so keep them in memory.
#define SHIPLAP_UNROLL _Pragma("GCC unroll 16")

namespace shiplap::sparse3d {
namespace {

template <class T>
struct Simd {
  typedef T Vector __attribute__((vector_size(SHIPLAP_VECTOR_BYTES)));
  typedef T Unaligned __attribute__((vector_size(SHIPLAP_VECTOR_BYTES), aligned(alignof(T)),
                                     may_alias));
  static constexpr int64_t kLanes = SHIPLAP_VECTOR_BYTES / sizeof(T);

  static Vector load(const T* from) { return *reinterpret_cast<const Unaligned*>(from); }
  static void store(T* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }
  static void add_to(T* to, Vector value) { store(to, load(to) + value); }
};

constexpr int64_t kFloats = Simd<float>::kLanes;
typedef uint16_t Shorts __attribute__((vector_size(2 * kFloats)));
typedef uint16_t UnalignedShorts __attribute__((vector_size(2 * kFloats), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(SHIPLAP_VECTOR_BYTES)));
using Floats = Simd<float>::Vector;

inline Simd<float>::Vector load_sums(const float* from) { return Simd<float>::load(from); }
inline Simd<double>::Vector load_sums(const double* from) { return Simd<double>::load(from); }
inline Floats load_sums(const Bfloat16* from) {
  const Shorts bits = *reinterpret_cast<const UnalignedShorts*>(from);
  return reinterpret_cast<Floats>(__builtin_convertvector(bits, Words) << 16);
}
inline Floats load_sums(const Half* from) {
#if defined(__AVX512F__)
  // Not the plain form: GCC 12 warns of what it leaves undefined in it.
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Floats sums;
  for (int64_t i = 0; i < kFloats; ++i) sums[i] = widen(from[i]);
  return sums;
#endif
}

inline void store_sums(float* to, Simd<float>::Vector sums) { Simd<float>::store(to, sums); }
inline void store_sums(double* to, Simd<double>::Vector sums) { Simd<double>::store(to, sums); }
inline void store_sums(Bfloat16* to, Floats sums) {
  const Words bits = reinterpret_cast<Words>(sums);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words nan = reinterpret_cast<Words>((bits & 0x7fffffff) > 0x7f800000);
  const Words chosen = (rounded & ~nan) | (nan & 0x7fc0);
  *reinterpret_cast<UnalignedShorts*>(to) = __builtin_convertvector(chosen, Shorts);
}
inline void store_sums(Half* to, Floats sums) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xffff, sums, 0));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(sums, 0));
#else
  for (int64_t i = 0; i < kFloats; ++i) narrow(sums[i], to + i);
#endif
}

#if defined(__AVX512BF16__)
// Two elements of a row in every lane, and two for each lane.
inline Words spread_pair(const Bfloat16* from) {
  uint32_t pair;
  __builtin_memcpy(&pair, from, sizeof(pair));
  return Words{} + pair;
}
inline Words load_pairs(const Bfloat16* from) {
  return reinterpret_cast<Words>(_mm512_loadu_si512(from));
}
// sums + the products of the pairs
inline Floats dot_pairs(Floats sums, Words left, Words right) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(right));
}
#endif

// The first `count` elements of a vector; the others are zero and are not stored.
template <class S>
typename Simd<Sum<S>>::Vector load_some(const S* from, int64_t count) {
  S padded[Simd<Sum<S>>::kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = from[i];
  return load_sums(padded);
}
template <class S>
void store_some(S* to, typename Simd<Sum<S>>::Vector sums, int64_t count) {
  S padded[Simd<Sum<S>>::kLanes];
  store_sums(padded, sums);
  for (int64_t i = 0; i < count; ++i) to[i] = padded[i];
}

}  // namespace
}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_SIMD_H_
