// Tensors of a generated native binding: owned handles, memory from PyTorch's allocator. Only torch's stable C ABI: no
// ATen headers.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "shiplap/base.h"

namespace shiplap {

using torch::stable::detail::to;

[[noreturn, gnu::cold, gnu::noinline]] inline void failed(const char* what) {
  throw std::runtime_error(std::string("shiplap native: ") + what + " failed");
}
inline void check(AOTITorchError status, const char* what) {
  if (status != AOTI_TORCH_SUCCESS) [[unlikely]] failed(what);
}

// ------------------------------------------------------------------------------------------------------------ tensors

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

// Of c10::DeviceType, whose numbers the stable ABI fixes.
inline std::string device_name(Device device) {
  if (device.type == aoti_torch_device_type_cpu()) return "cpu";
  const std::string index = device.index < 0 ? "" : ":" + std::to_string(device.index);
  if (device.type == aoti_torch_device_type_cuda()) return "cuda" + index;
  if (device.type == aoti_torch_device_type_meta()) return "meta";
  return "device type " + std::to_string(device.type) + index;
}

// DLPack's numbers: 1 CPU, 2 CUDA.
inline int32_t dl_device(int32_t device_type) { return device_type == aoti_torch_device_type_cpu() ? 1 : 2; }

}  // namespace shiplap

#include "shiplap/checks.h"

namespace shiplap {

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
  std::array<int64_t, kMaxRank> strides{};
  fill_canonical(shape.begin(), static_cast<int64_t>(shape.size()), strides.data());
  AtenTensorHandle handle = nullptr;
  check(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.begin(), strides.data(), dtype, device.type,
                                 device.index, &handle), "allocation");
  if (poison.load(std::memory_order_relaxed) < 0) [[likely]] return Tensor(handle);
  Tensor fresh(handle);
  const int64_t bytes = numel(fresh) * bytes_of(dtype);
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

// Replaces `tensor` by a contiguous copy in fresh memory where a kernel does not take it as it lies: with these strides, or
// at an address that is no multiple of `align`. The original comes back for writing back.
inline Tensor pack(Tensor& tensor, bool strided, uintptr_t align) {
  if (!tensor || ((strided || tensor.is_contiguous()) && address(tensor) % align == 0)) return Tensor();
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
