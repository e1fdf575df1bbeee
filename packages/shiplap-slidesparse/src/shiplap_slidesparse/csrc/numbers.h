// Elements as they are stored, to and from float. Part of dot_impl.h too, so of internal linkage (see dot.h).
#pragma once

#include <cstdint>

namespace shiplap::slidesparse {

struct Float8 {  // e4m3fn: no infinities, 0x7f and 0xff are NaN
  uint8_t bits;
};
struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

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
inline float widen(double value) { return static_cast<float>(value); }
inline float widen(Bfloat16 value) { return as_float(static_cast<uint32_t>(value.bits) << 16); }

// Moving the exponent's bias by a product takes subnormal numbers along.
inline float widen(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t shifted = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  uint32_t bits = as_bits(as_float(shifted) * 0x1p112f);
  bits |= shifted >= 0x7c00u << 13 ? 0x7f800000u : 0u;
  return as_float(bits | sign);
}
inline float widen(Float8 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x80) << 24;
  const uint32_t magnitude = value.bits & 0x7f;
  const uint32_t bits = as_bits(as_float(magnitude << 20) * 0x1p120f);
  return as_float(bits | sign | (magnitude == 0x7f ? 0x7fc00000u : 0u));
}

// To the nearest, ties to even; a NaN stays one.
[[maybe_unused]] inline void narrow(float value, float* to) { *to = value; }
[[maybe_unused]] inline void narrow(float value, Bfloat16* to) {
  const uint32_t bits = as_bits(value);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
[[maybe_unused]] inline void narrow(float value, Half* to) {
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

// Magnitudes up to 448.
inline uint8_t narrow_float8(float value) {
  const uint32_t signed_bits = as_bits(value), sign = signed_bits >> 24 & 0x80;
  const uint32_t bits = signed_bits & 0x7fffffff;
  const uint32_t small = as_bits(as_float(bits) + 0x1p14f) - as_bits(0x1p14f);  // below 2^-6: the addition rounds
  const uint32_t normal = (bits - (120u << 23) + 0x7ffff + ((bits >> 20) & 1)) >> 20;
  const uint32_t tiny = bits < 0x3c800000 ? ~0u : 0u;  // a mask: a choice would be a branch around the addition
  return static_cast<uint8_t>((small & tiny) | (normal & ~tiny) | sign);
}

}  // namespace
}  // namespace shiplap::slidesparse
