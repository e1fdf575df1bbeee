// Tensors and dim expressions of a generated native binding: owned handles, DLTensor views on the stack, memory from
// PyTorch's allocator. Only torch's stable C ABI: no ATen headers.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "shiplap/abi.h"

namespace shiplap {

using torch::stable::detail::to;

// The text of the catalogue's errors: id, what, where, got, expected.
[[noreturn]] inline void refuse(const char* id, const char* what, const std::string& where, const std::string& got,
                                const std::string& expected) {
  throw std::runtime_error(std::string(id) + ": " + what + "\n  where    " + where + "\n  got      " + got +
                           (expected.empty() ? "" : "\n  expected " + expected));
}

inline void check(AOTITorchError status, const char* what) {
  if (status != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("shiplap native: ") + what + " failed");
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

// ------------------------------------------------------------------------------------------------------------ tensors

constexpr int kMaxRank = 8;

// An owned tensor handle, and the view of it that kernels get.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  int64_t dim() const {
    int64_t value;
    check(aoti_torch_get_dim(handle_, &value), "dim");
    return value;
  }
  int64_t* sizes() const {
    int64_t* value;
    check(aoti_torch_get_sizes(handle_, &value), "sizes");
    return value;
  }
  int64_t* strides() const {
    int64_t* value;
    check(aoti_torch_get_strides(handle_, &value), "strides");
    return value;
  }
  int32_t dtype() const {
    int32_t value;
    check(aoti_torch_get_dtype(handle_, &value), "dtype");
    return value;
  }
  int32_t device_type() const {
    int32_t value;
    check(aoti_torch_get_device_type(handle_, &value), "device type");
    return value;
  }
  int32_t device_index() const {
    int32_t value;
    check(aoti_torch_get_device_index(handle_, &value), "device index");
    return value;
  }
  bool is_contiguous() const {
    bool value;
    check(aoti_torch_is_contiguous(handle_, &value), "is_contiguous");
    return value;
  }
  void* data() const {
    void* value;
    check(aoti_torch_get_data_ptr(handle_, &value), "data_ptr");
    return value;
  }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// The scratch and the DLTensor that a kernel sees of one tensor. Lives on the caller's stack.
struct View {
  DLTensor tensor{};
  std::array<int64_t, kMaxRank> shape{}, strides{};
};

struct ElementType {
  uint8_t code, bits;
};

inline ElementType element_type(int32_t dtype) {
  using torch::headeronly::ScalarType;
  switch (static_cast<ScalarType>(dtype)) {
    case ScalarType::Byte: return {1, 8};
    case ScalarType::Char: return {0, 8};
    case ScalarType::Short: return {0, 16};
    case ScalarType::Int: return {0, 32};
    case ScalarType::Long: return {0, 64};
    case ScalarType::Half: return {2, 16};
    case ScalarType::Float: return {2, 32};
    case ScalarType::Double: return {2, 64};
    case ScalarType::ComplexFloat: return {5, 64};
    case ScalarType::ComplexDouble: return {5, 128};
    case ScalarType::Bool: return {6, 8};
    case ScalarType::BFloat16: return {4, 16};
    default: throw std::runtime_error("shiplap native: a dtype that the C ABI does not carry");
  }
}

inline std::string dtype_name(int32_t dtype) {
  static constexpr const char* kNames[] = {"uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
                                           "complex32", "complex64", "complex128", "bool", "", "", "", "bfloat16"};
  const bool known = dtype >= 0 && dtype < 16 && *kNames[dtype] != 0;
  return known ? std::string("torch.") + kNames[dtype] : "dtype code " + std::to_string(dtype);
}

// Bytes of an element of the widest of `dtypes`.
inline int64_t widest(std::initializer_list<int32_t> dtypes) {
  int64_t bytes = 1;
  for (const int32_t dtype : dtypes) bytes = std::max<int64_t>(bytes, element_type(dtype).bits / 8);
  return bytes;
}

// DLPack's numbers: 1 CPU, 2 CUDA.
inline int32_t dl_device(int32_t device_type) { return device_type == aoti_torch_device_type_cpu() ? 1 : 2; }

inline int64_t fill_canonical(const int64_t* shape, int64_t rank, int64_t* strides) {
  int64_t step = 1;
  for (int64_t axis = rank - 1; axis >= 0; --axis) {
    strides[axis] = step;
    step *= shape[axis] > 1 ? shape[axis] : 1;
  }
  return step;
}

// Fill `view` from `tensor`. A contiguous tensor gets the canonical strides, also in dims of size 0 or 1.
inline DLTensor* look(View& view, const Tensor& tensor) {
  const int64_t rank = tensor.dim();
  if (rank > kMaxRank) throw std::runtime_error("shiplap native: more than 8 dims");
  std::copy_n(tensor.sizes(), rank, view.shape.begin());
  if (tensor.is_contiguous()) {
    fill_canonical(view.shape.data(), rank, view.strides.data());
  } else {
    std::copy_n(tensor.strides(), rank, view.strides.begin());
  }
  const ElementType element = element_type(tensor.dtype());
  view.tensor = DLTensor{tensor.data(), {dl_device(tensor.device_type()), std::max(tensor.device_index(), 0)},
                         static_cast<int32_t>(rank), {element.code, element.bits, 1}, view.shape.data(),
                         view.strides.data(), 0};
  return &view.tensor;
}

struct Device {
  int32_t type = 0, index = 0;
  bool operator!=(const Device& other) const { return type != other.type || index != other.index; }
};

inline int64_t numel(const Tensor& t) {
  return std::accumulate(t.sizes(), t.sizes() + t.dim(), int64_t{1}, std::multiplies<int64_t>());
}

// Whether the address ranges of two tensors meet.
inline bool overlap(const Tensor& a, const Tensor& b) {
  const auto range = [](const Tensor& t) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(t.data());
    int64_t last = 0;
    for (int64_t axis = t.dim(); axis-- > 0;) last += (t.sizes()[axis] - 1) * t.strides()[axis];
    return std::pair<uintptr_t, uintptr_t>(start, start + static_cast<size_t>((last + 1) * element_type(t.dtype()).bits / 8));
  };
  if (numel(a) == 0 || numel(b) == 0) return false;
  const auto [a0, a1] = range(a);
  const auto [b0, b1] = range(b);
  return a0 < b1 && b0 < a1;
}

inline Device device_of(const Tensor& t) { return {t.device_type(), t.device_index()}; }

// The audit fills memory with a byte before a kernel sees it; -1 leaves it as it comes.
inline std::atomic<int> poison{-1};

inline Tensor poisoned(Tensor fresh, int64_t bytes) {
  const int byte = poison.load(std::memory_order_relaxed);
  if (byte < 0 || bytes <= 0) return fresh;
  if (fresh.device_type() == aoti_torch_device_type_cpu()) {
    std::memset(fresh.data(), byte, static_cast<size_t>(bytes));
    return fresh;
  }
  const int64_t stride = 1;
  AtenTensorHandle view = nullptr;  // the same memory as bytes
  check(aoti_torch_create_tensor_from_blob(fresh.data(), 1, &bytes, &stride, 0, aoti_torch_dtype_uint8(), fresh.device_type(),
                                           fresh.device_index(), &view), "view");
  const Tensor all(view);
  check(aoti_torch_aten_fill__Scalar(view, byte), "fill");
  return fresh;
}

// A new contiguous tensor from the framework's allocator, on the current stream of its device.
inline Tensor empty(std::initializer_list<int64_t> shape, int32_t dtype, Device device) {
  for (const int64_t size : shape) {
    if (size < 0) refuse("SL208", "precondition", "an output", std::to_string(size), "a size");
  }
  std::array<int64_t, kMaxRank> strides{};
  fill_canonical(shape.begin(), static_cast<int64_t>(shape.size()), strides.data());
  AtenTensorHandle handle = nullptr;
  check(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.begin(), strides.data(), dtype, device.type,
                                 device.index, &handle), "allocation");
  if (poison.load(std::memory_order_relaxed) < 0) [[likely]] return Tensor(handle);
  Tensor fresh(handle);
  const int64_t bytes = numel(fresh) * element_type(dtype).bits / 8;
  return poisoned(std::move(fresh), bytes);
}

inline Tensor empty_as(const Tensor& like) {
  std::array<int64_t, kMaxRank> strides{};
  const int64_t rank = like.dim();
  fill_canonical(like.sizes(), rank, strides.data());
  AtenTensorHandle handle = nullptr;
  const Device device = device_of(like);
  check(aoti_torch_empty_strided(rank, like.sizes(), strides.data(), like.dtype(), device.type, device.index, &handle),
        "allocation");
  return Tensor(handle);
}

inline void copy(const Tensor& to, const Tensor& from) {
  check(aoti_torch_copy_(to.get(), from.get(), 0), "copy");
}

// Replaces `tensor` by a contiguous copy if it has to be one; the original comes back for writing back.
inline Tensor make_contiguous(Tensor& tensor) {
  if (!tensor || tensor.is_contiguous()) return Tensor();
  Tensor packed = empty_as(tensor);
  copy(packed, tensor);
  Tensor original = std::move(tensor);
  tensor = std::move(packed);
  return original;
}

// Cut a leading-dim output from its bound to what the kernel filled; a mostly empty one is copied to free its memory.
inline Tensor narrow(Tensor full, std::initializer_list<int64_t> shape) {
  const int64_t used = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
  const int64_t bound = std::accumulate(full.sizes(), full.sizes() + full.dim(), int64_t{1}, std::multiplies<int64_t>());
  const bool keep = 2 * used > bound;
  AtenTensorHandle handle = nullptr;
  check(aoti_torch__reinterpret_tensor(full.get(), static_cast<int64_t>(shape.size()), shape.begin(), full.strides(), 0,
                                       &handle), "narrow");
  Tensor part(handle);
  if (keep && part.is_contiguous()) return part;
  Tensor own = empty_as(part);
  copy(own, part);
  return own;
}

}  // namespace shiplap
