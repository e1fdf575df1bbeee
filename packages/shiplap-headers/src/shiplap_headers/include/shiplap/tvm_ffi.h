// What a generated tvm-ffi export is made of: DLPack views that the caller owns, in and out. It allocates scratch only.
#pragma once

#include <dlfcn.h>
#include <tvm/ffi/tvm_ffi.h>

#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <optional>

#include "shiplap/base.h"

namespace shiplap {

// A view with the questions that the checks ask. It owns nothing.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(const DLTensor* tensor) : tensor_(tensor) {
    if (tensor->ndim > kMaxRank) throw std::runtime_error("shiplap: more than 8 dims");
    // Before DLPack 1.2 a contiguous tensor may come without strides.
    if (tensor->strides == nullptr) fill_canonical(tensor->shape, tensor->ndim, strides_.data());
    else std::copy_n(tensor->strides, tensor->ndim, strides_.begin());
  }

  explicit operator bool() const { return tensor_ != nullptr; }
  int64_t dim() const { return tensor_->ndim; }
  const int64_t* sizes() const { return tensor_->shape; }
  const int64_t* strides() const { return strides_.data(); }
  int32_t device_type() const { return static_cast<int32_t>(tensor_->device.device_type); }
  int32_t device_index() const { return tensor_->device.device_id; }
  void* data() const { return static_cast<char*>(tensor_->data) + tensor_->byte_offset; }
  // As torch numbers it; -1 for what it has no number for.
  int32_t dtype() const { return number_of(tensor_->dtype); }
  bool is_contiguous() const {
    int64_t step = 1;
    for (int64_t axis = dim() - 1; axis >= 0; --axis) {
      if (sizes()[axis] == 0) return true;
    }
    for (int64_t axis = dim() - 1; axis >= 0; --axis) {
      if (sizes()[axis] != 1 && strides_[axis] != step) return false;
      step *= sizes()[axis];
    }
    return true;
  }

 private:
  const DLTensor* tensor_ = nullptr;
  std::array<int64_t, kMaxRank> strides_{};
};

// Of DLDeviceType.
inline std::string device_name(Device device) {
  if (device.type == kDLCPU) return "cpu";
  const std::string name = device.type == kDLCUDA ? "cuda" : "device type " + std::to_string(device.type);
  return name + ":" + std::to_string(device.index);
}

inline DLDeviceType dl_device(int32_t device_type) { return static_cast<DLDeviceType>(device_type); }

}  // namespace shiplap

#include "shiplap/checks.h"

namespace shiplap {

constexpr const char* kKind = "an argument has the wrong type";
constexpr const char* kDeclared = "pass a value of the type under 'expected'";

// The arguments of a call, in declared order, then its outputs.
class Arguments {
 public:
  Arguments(const char* op, const char* signature, const TVMFFIAny* values, int32_t got, int32_t want)
      : op_(op), values_(values) {
    if (got != want) refuse("SL209", kKind, "{}", "{} arguments", "{}", kDeclared, {op, got, signature});
  }

  Tensor tensor(int i, const char* name) const { return Tensor(as<DLTensor*>(i, name, "a tensor")); }
  Tensor optional_tensor(int i, const char* name) const { return any(i) == nullptr ? Tensor() : tensor(i, name); }
  template <class T>
  T scalar(int i, const char* name) const {
    if constexpr (std::is_same_v<T, std::string>) {
      return as<tvm::ffi::String>(i, name, "str");
    } else if constexpr (std::is_same_v<T, List>) {
      const auto list = as<tvm::ffi::Array<int64_t>>(i, name, "a list of int");
      return List(list.begin(), list.end());
    } else if constexpr (std::is_same_v<T, std::vector<double>>) {
      const auto list = as<tvm::ffi::Array<double>>(i, name, "a list of float");
      return std::vector<double>(list.begin(), list.end());
    } else {
      return as<T>(i, name, "a number");
    }
  }

 private:
  tvm::ffi::AnyView any(int i) const { return tvm::ffi::AnyView::CopyFromTVMFFIAny(values_[i]); }
  template <class T>
  T as(int i, const char* name, const char* want) const {
    const tvm::ffi::AnyView value = any(i);
    std::optional<T> found;
    if (value != nullptr) found = value.try_cast<T>();
    if (!found) {
      refuse("SL209", kKind, "{}, argument '{}'", "{}", "{}", kDeclared, {op_, name, std::string(value.GetTypeKey()), want});
    }
    return *std::move(found);
  }

  const char* op_;
  const TVMFFIAny* values_;
};

inline std::atomic<int32_t> threads{1};

// 64-byte aligned, freed with the call.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : bytes_(bytes > 0 ? static_cast<size_t>(bytes) : 0) {
    data_.reset(std::aligned_alloc(64, (bytes_ / 64 + 1) * 64));
    if (!data_) throw std::bad_alloc();
  }
  void* data() const { return data_.get(); }
  size_t size() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  size_t bytes_;
  std::unique_ptr<void, Free> data_;
};

// The kernel, from the library that the declaration names.
inline void* open_kernel(const char* library, const char* symbol) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  void* found = handle == nullptr ? nullptr : dlsym(handle, symbol);
  if (found == nullptr) throw std::runtime_error(dlerror());
  return found;
}

// Runs `body` as one call of tvm-ffi: 0, or -1 with the error kept where tvm-ffi looks for it.
template <class Body>
int safely(Body&& body) {
  try {
    body();
    return 0;
  } catch (const tvm::ffi::Error& e) {
    tvm::ffi::detail::SetSafeCallRaised(e);
  } catch (const std::exception& e) {
    tvm::ffi::detail::SetSafeCallRaised(tvm::ffi::Error("RuntimeError", e.what(), ""));
  }
  return -1;
}

}  // namespace shiplap
