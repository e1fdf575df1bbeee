// What every generated binding shares before it has tensors, whatever carries them: texts of errors, dim expressions, views.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shiplap/abi.h"
#include "shiplap/dtypes.h"

namespace shiplap {

// --------------------------------------------------------------------------------------------------- what is refused

using List = std::vector<int64_t>;

struct Device {
  int32_t type = 0, index = 0;
  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
  bool operator!=(const Device& other) const { return !(*this == other); }
};
std::string device_name(Device device);  // by the header that knows whose numbers these are
std::string dtype_name(int32_t dtype);

struct Dtype {
  int32_t number;
};

// Sizes as an error shows them: (3, 4) and (3). A Tuple has Python's comma: (3,).
struct Sizes {
  const int64_t* data;
  int64_t count;
  Sizes(const int64_t* data, int64_t count) : data(data), count(count) {}
  Sizes(std::initializer_list<int64_t> sizes) : Sizes(sizes.begin(), static_cast<int64_t>(sizes.size())) {}  // seen, not kept
};
struct Tuple : Sizes {
  using Sizes::Sizes;
};

// A double as Python writes it: the shortest digits that read back, with a point or an exponent.
[[gnu::cold, gnu::noinline]] inline std::string shown(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char digits[64];
  const auto end = std::to_chars(digits, digits + sizeof digits, value, std::chars_format::scientific).ptr;
  const std::string scientific(digits, end);
  const int exponent = std::stoi(scientific.substr(scientific.find('e') + 1));
  if (exponent < -4 || exponent >= 16) return scientific;
  const std::string text(digits, std::to_chars(digits, digits + sizeof digits, value, std::chars_format::fixed).ptr);
  return text.find('.') == std::string::npos ? text + ".0" : text;
}

template <class Range>
[[gnu::cold, gnu::noinline]] std::string shown(const Range& values, const char* open, const char* close) {
  std::string text = open;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i) text += ", ";
    if constexpr (std::is_floating_point_v<typename Range::value_type>) text += shown(values[i]);
    else text += std::to_string(values[i]);
  }
  return text + close;
}

// A part of an error's text: what it shows, and how. It holds nothing of its own, so that a check is a few stores of code
// besides what it compares; a refused call writes the text before whatever is shown goes away.
class Part {
 public:
  using Write = std::string (*)(const Part&);
  Part(const char* given) : pointer_(given), write_([](const Part& p) { return std::string(p.as<char>()); }) {}
  Part(const std::string& given) : pointer_(&given), write_([](const Part& p) { return *p.as<std::string>(); }) {}
  Part(int64_t value) : value_(value), write_([](const Part& p) { return std::to_string(p.value_); }) {}
  Part(int32_t value) : Part(int64_t{value}) {}
  Part(uintptr_t value) : value_(static_cast<int64_t>(value)), write_(unsigned_number) {}
  Part(bool value) : Part(value ? "True" : "False") {}
  Part(double value) : number_(value), write_([](const Part& p) { return shown(p.number_); }) {}
  Part(const List& values) : pointer_(&values), write_([](const Part& p) { return shown(*p.as<List>(), "[", "]"); }) {}
  Part(const std::vector<double>& values) : pointer_(&values), write_(numbers) {}
  Part(const Sizes& sizes) : pointer_(sizes.data), value_(sizes.count), write_([](const Part& p) { return p.sizes(")"); }) {}
  Part(const Tuple& sizes) : pointer_(sizes.data), value_(sizes.count), write_(tuple) {}
  Part(Dtype dtype) : value_(dtype.number), write_([](const Part& p) { return dtype_name(static_cast<int32_t>(p.value_)); }) {}
  Part(Device device) : value_(device.type), index_(device.index), write_(device_text) {}
  std::string text() const { return write_(*this); }

 private:
  template <class T>
  const T* as() const { return static_cast<const T*>(pointer_); }
  std::string sizes(const char* close) const {
    const int64_t* const first = as<int64_t>();
    return shown(List(first, first + value_), "(", close);
  }
  static std::string tuple(const Part& p) { return p.sizes(p.value_ == 1 ? ",)" : ")"); }
  static std::string numbers(const Part& p) { return shown(*p.as<std::vector<double>>(), "[", "]"); }
  static std::string unsigned_number(const Part& p) { return std::to_string(static_cast<uintptr_t>(p.value_)); }
  static std::string device_text(const Part& p) { return device_name({static_cast<int32_t>(p.value_), p.index_}); }

  const void* pointer_ = nullptr;
  int64_t value_ = 0;
  double number_ = 0;
  int32_t index_ = 0;
  Write write_;
};
using Parts = std::initializer_list<Part>;

// `text` with a part for each {}, from `part` on; {{ stands for one brace. Moves `part` behind those it took.
[[gnu::cold, gnu::noinline]] inline std::string filled(const char* text, const Part*& part) {
  std::string result;
  for (; *text != 0; ++text) {
    if (*text == '{' && text[1] == '}') result += (part++)->text(), ++text;
    else if (result += *text; *text == '{') ++text;
  }
  return result;
}
inline std::string filled(const char* text, Parts values) {
  const Part* next = values.begin();
  return filled(text, next);
}

// What was refused last on this thread: id, what, where, got, expected, fix, and all of it as text. Who turns the
// exception into an error of another language finds the parts here, and the text tells whether they are of his exception.
using Refusal = std::array<std::string, 7>;
inline Refusal& refusal() {
  thread_local Refusal last;
  return last;
}

// Throws the catalogue's error `id`. `where`, `got` and `expected` have {} for the values, in this order.
[[noreturn, gnu::cold, gnu::noinline]] inline void refuse(const char* id, const char* what, const char* where,
                                                          const char* got, const char* expected, const char* fix,
                                                          Parts values) {
  Refusal& last = refusal();
  const Part* next = values.begin();
  last = {id, what, "", "", "", fix, ""};
  last[2] = filled(where, next);
  last[3] = filled(got, next);
  last[4] = filled(expected, next);
  std::string& text = last[6];
  text = last[0] + ": " + last[1];
  const char* const names[] = {"where    ", "got      ", "expected ", "fix      "};
  for (size_t row = 0; row < 4; ++row) {
    if (!last[2 + row].empty()) text += std::string("\n  ") + names[row] + last[2 + row];
  }
  throw std::runtime_error(text);
}

// ---------------------------------------------------------------------------------------------------- dim expressions

// An expression without a value: n // 0, or a number beyond 64 bits on the way. The check whose expression it is says
// which. Python computes with numbers of any length; no value here is one that differs from its.
struct NoValue : std::runtime_error {
  using std::runtime_error::runtime_error;
};
[[noreturn, gnu::cold, gnu::noinline]] inline void no_value(const char* why) { throw NoValue(why); }
inline int64_t fits(bool beyond, int64_t value) {
  if (beyond) [[unlikely]] no_value("a number beyond 64 bits");
  return value;
}

inline int64_t add(int64_t a, int64_t b) {
  int64_t sum;
  const bool beyond = __builtin_add_overflow(a, b, &sum);
  return fits(beyond, sum);
}
inline int64_t sub(int64_t a, int64_t b) {
  int64_t difference;
  const bool beyond = __builtin_sub_overflow(a, b, &difference);
  return fits(beyond, difference);
}
inline int64_t mul(int64_t a, int64_t b) {
  int64_t product;
  const bool beyond = __builtin_mul_overflow(a, b, &product);
  return fits(beyond, product);
}
inline int64_t floordiv(int64_t a, int64_t b) {
  if (b == 0) no_value("division by zero");
  if (b == -1) return sub(0, a);  // the processor traps where a has no negative
  const int64_t q = a / b;
  return q * b != a && ((a < 0) != (b < 0)) ? q - 1 : q;
}
inline int64_t floormod(int64_t a, int64_t b) {
  if (b == 0) no_value("division by zero");
  if (b == -1) return 0;
  const int64_t r = a % b;
  return r != 0 && ((r < 0) != (b < 0)) ? r + b : r;
}
// (a + b - 1) // b
inline int64_t cdiv(int64_t a, int64_t b) {
  return b > 0 ? floordiv(a, b) + (floormod(a, b) != 0) : floordiv(sub(add(a, b), 1), b);
}
inline int64_t gcd(int64_t a, int64_t b) {
  const auto magnitude = [](int64_t v) { return v < 0 ? 0 - static_cast<uint64_t>(v) : static_cast<uint64_t>(v); };
  const uint64_t common = std::gcd(magnitude(a), magnitude(b));
  return fits(common >> 63 != 0, static_cast<int64_t>(common));
}
inline int64_t pow2(int64_t a) {
  if (a < 0 || a > 62) [[unlikely]] no_value("a power of two beyond 64 bits");
  return int64_t{1} << a;
}
inline int64_t where(bool condition, int64_t yes, int64_t no) { return condition ? yes : no; }
inline int64_t pow2ceil(int64_t a) {
  int64_t p = 1;
  while (p < a) p = mul(p, 2);
  return p;
}
inline int64_t item(const List& v, int64_t i) {
  const int64_t size = static_cast<int64_t>(v.size());
  if (i < -size || i >= size) no_value("an index outside its list");
  return v[static_cast<size_t>(i < 0 ? i + size : i)];
}
inline int64_t len(const List& v) { return static_cast<int64_t>(v.size()); }
template <class Values>
int64_t product(const Values& values) {
  int64_t made = 1;
  for (const int64_t v : values)
    if (v == 0) return 0;  // however large the others are
  for (const int64_t v : values) made = mul(made, v);
  return made;
}
inline int64_t prod(const List& v) { return product(v); }
inline int64_t min(const List& v) {
  if (v.empty()) no_value("an empty list");
  return *std::min_element(v.begin(), v.end());
}
inline int64_t max(const List& v) {
  if (v.empty()) no_value("an empty list");
  return *std::max_element(v.begin(), v.end());
}
inline int64_t broadcast(const List& v) {
  for (const int64_t size : v)
    if (size != 1) return size;
  return 1;
}
template <class... T>
int64_t broadcast(int64_t a, T... rest) { return broadcast(List{a, static_cast<int64_t>(rest)...}); }
template <class... T>
int64_t prod(int64_t a, T... rest) { return product(std::initializer_list<int64_t>{a, static_cast<int64_t>(rest)...}); }
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

// Dtypes are numbers of torch's ScalarType, which its stable ABI fixes.
inline DLDataType element_type(int32_t dtype) {
  switch (dtype) {
#define SL_CASE(NAME, NUMBER, CODE, BITS, LANES) \
  case NUMBER: return {CODE, BITS, LANES};
    SL_DTYPES(SL_CASE)
#undef SL_CASE
    default: break;
  }
  refuse("SL214", "the C ABI cannot carry this dtype", "the C ABI", "{}", "a dtype of shiplap/dtypes.h",
         "convert the tensor to a dtype with a DLPack code, such as torch.float32, or view its bytes as torch.uint8", {Dtype{dtype}});
}

inline std::string dtype_name(int32_t dtype) {
  switch (dtype) {
#define SL_CASE(NAME, NUMBER, CODE, BITS, LANES) \
  case NUMBER: return "torch." #NAME;
    SL_DTYPES(SL_CASE)
#undef SL_CASE
    default: return "dtype number " + std::to_string(dtype);
  }
}

// The number of a DLPack type; -1 for what torch has no number for.
inline int32_t number_of(DLDataType type) {
#define SL_CASE(NAME, NUMBER, CODE, BITS, LANES) \
  if (type.code == CODE && type.bits == BITS && type.lanes == LANES) return NUMBER;
  SL_DTYPES(SL_CASE)
#undef SL_CASE
  return -1;
}

inline int64_t bytes_of(int32_t dtype) {
  const DLDataType type = element_type(dtype);
  return type.bits * type.lanes / 8;
}

// Whether a dtype is in a bit set over the numbers.
constexpr bool among(int32_t dtype, uint64_t mask) { return dtype >= 0 && dtype < 64 && (mask >> dtype & 1); }

// Bytes of an element of the widest of `dtypes`; those of optional arguments may be none.
inline int64_t widest(std::initializer_list<int32_t> dtypes) {
  int64_t bytes = 1;
  for (const int32_t dtype : dtypes) bytes = std::max<int64_t>(bytes, dtype < 0 ? 1 : bytes_of(dtype));
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

}  // namespace shiplap
