// The element types of features and weights. Sums of the 16-bit ones are float.
//
// Part of gemm_kernels_impl.h too, so the functions are of internal linkage (see gemm_kernels.h).
#ifndef SHIPLAP_SPARSE3D_NUMBER_H_
#define SHIPLAP_SPARSE3D_NUMBER_H_

#include <cstdint>

namespace shiplap::sparse3d {

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

template <class S>
struct SumOf {
  using type = S;
};
template <>
struct SumOf<Half> {
  using type = float;
};
template <>
struct SumOf<Bfloat16> {
  using type = float;
};
template <class S>
using Sum = typename SumOf<S>::type;

namespace {

inline float as_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(Bfloat16 value) { return as_float(static_cast<uint32_t>(value.bits) << 16); }
inline float widen(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t shifted = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  // Moving the exponent's bias by a product takes subnormal numbers along.
  uint32_t bits = as_bits(as_float(shifted) * 0x1p112f);
  if (shifted >= 0x7c00u << 13) bits |= 0x7f800000;
  return as_float(bits | sign);
}

// To the nearest, ties to even; a NaN stays one.
inline void narrow(float value, float* to) { *to = value; }
inline void narrow(double value, double* to) { *to = value; }
inline void narrow(float value, Bfloat16* to) {
  const uint32_t bits = as_bits(value);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float value, Half* to) {
  const uint32_t signed_bits = as_bits(value), sign = signed_bits >> 16 & 0x8000;
  const uint32_t bits = signed_bits & 0x7fffffff;
  uint32_t result;
  if (bits >= 0x47800000) {  // 2^16 and more
    result = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (bits < 0x38800000) {  // below 2^-14: the addition rounds
    result = as_bits(as_float(bits) + 0.5f) - as_bits(0.5f);
  } else {
    result = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
  }
  to->bits = static_cast<uint16_t>(result | sign);
}

}  // namespace
}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_NUMBER_H_
