// What every generated binding shares before it has tensors, whatever carries them: texts of errors, dim expressions, views.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "shiplap/abi.h"

namespace shiplap {

// The text of the catalogue's errors: id, what, where, got, expected.
[[noreturn]] inline void refuse(const char* id, const char* what, const std::string& where, const std::string& got,
                                const std::string& expected) {
  throw std::runtime_error(std::string(id) + ": " + what + "\n  where    " + where + "\n  got      " + got +
                           (expected.empty() ? "" : "\n  expected " + expected));
}

// ---------------------------------------------------------------------------------------------------- dim expressions

using List = std::vector<int64_t>;

// An expression without a value, such as n // 0: Python's checker has the full text.
[[noreturn]] inline void no_value(const char* got) { refuse("SL208", "precondition", "a dim expression", got, "a value"); }

inline int64_t floordiv(int64_t a, int64_t b) {
  if (b == 0) no_value("division by zero");
  const int64_t q = a / b;
  return q * b != a && ((a < 0) != (b < 0)) ? q - 1 : q;
}
inline int64_t floormod(int64_t a, int64_t b) { return a - floordiv(a, b) * b; }
inline int64_t cdiv(int64_t a, int64_t b) { return floordiv(a + b - 1, b); }
inline int64_t gcd(int64_t a, int64_t b) { return std::gcd(a, b); }
inline int64_t pow2ceil(int64_t a) {
  int64_t p = 1;
  while (p < a) p *= 2;
  return p;
}
inline int64_t item(const List& v, int64_t i) {
  const int64_t size = static_cast<int64_t>(v.size());
  if (i < -size || i >= size) no_value("an index outside its list");
  return v[static_cast<size_t>(i < 0 ? i + size : i)];
}
inline int64_t len(const List& v) { return static_cast<int64_t>(v.size()); }
inline int64_t prod(const List& v) { return std::accumulate(v.begin(), v.end(), int64_t{1}, std::multiplies<int64_t>()); }
inline int64_t min(const List& v) {
  if (v.empty()) no_value("the least of an empty list");
  return *std::min_element(v.begin(), v.end());
}
inline int64_t max(const List& v) {
  if (v.empty()) no_value("the greatest of an empty list");
  return *std::max_element(v.begin(), v.end());
}
template <class... T>
int64_t prod(int64_t a, T... rest) { return (a * ... * rest); }
template <class... T>
int64_t min(int64_t a, T... rest) { return std::min({a, static_cast<int64_t>(rest)...}); }
template <class... T>
int64_t max(int64_t a, T... rest) { return std::max({a, static_cast<int64_t>(rest)...}); }

// -------------------------------------------------------------------------------------------------------------- views

constexpr int kMaxRank = 8;

// The scratch and the DLTensor that a kernel sees of one tensor. Lives on the caller's stack.
struct View {
  DLTensor tensor{};
  std::array<int64_t, kMaxRank> shape{}, strides{};
};

struct ElementType {
  uint8_t code, bits;
};

// Dtypes are numbers of torch's ScalarType, which its stable ABI fixes.
inline ElementType element_type(int32_t dtype) {
  switch (dtype) {
    case 0: return {1, 8};
    case 1: return {0, 8};
    case 2: return {0, 16};
    case 3: return {0, 32};
    case 4: return {0, 64};
    case 5: return {2, 16};
    case 6: return {2, 32};
    case 7: return {2, 64};
    case 9: return {5, 64};
    case 10: return {5, 128};
    case 11: return {6, 8};
    case 15: return {4, 16};
    case 23: return {12, 8};
    case 24: return {10, 8};
    case 25: return {13, 8};
    case 26: return {11, 8};
    default: throw std::runtime_error("shiplap: a dtype that the C ABI does not carry");
  }
}

constexpr const char* kNames[] = {"uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
                                  "complex32", "complex64", "complex128", "bool", "", "", "", "bfloat16",
                                  "", "", "", "", "", "", "", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz",
                                  "float8_e4m3fnuz"};

inline std::string dtype_name(int32_t dtype) {
  const bool known = dtype >= 0 && dtype < static_cast<int32_t>(std::size(kNames)) && *kNames[dtype] != 0;
  return known ? std::string("torch.") + kNames[dtype] : "dtype code " + std::to_string(dtype);
}

// Bytes of an element of the widest of `dtypes`.
inline int64_t widest(std::initializer_list<int32_t> dtypes) {
  int64_t bytes = 1;
  for (const int32_t dtype : dtypes) bytes = std::max<int64_t>(bytes, element_type(dtype).bits / 8);
  return bytes;
}

inline int64_t fill_canonical(const int64_t* shape, int64_t rank, int64_t* strides) {
  int64_t step = 1;
  for (int64_t axis = rank - 1; axis >= 0; --axis) {
    strides[axis] = step;
    step *= shape[axis] > 1 ? shape[axis] : 1;
  }
  return step;
}

struct Device {
  int32_t type = 0, index = 0;
  bool operator!=(const Device& other) const { return type != other.type || index != other.index; }
};

}  // namespace shiplap
