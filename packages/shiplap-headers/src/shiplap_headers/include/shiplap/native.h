// What a generated native binding is made of besides tensors: the boxed call, checks that name op and argument, the C
// context, the way back to Python, registration. Only torch's stable C ABI: no ATen headers.
#pragma once

#include <dlfcn.h>

#include <memory>

#include "shiplap/choices.h"
#include "shiplap/native_tensor.h"

namespace shiplap {

// ----------------------------------------------------------------------------------------------------- the boxed call

// Arguments arrive owned: every one is taken, also when a check throws half way.
class Stack {
 public:
  Stack(StableIValue* values, uint64_t count) : values_(values), count_(count) {}

  Tensor tensor(int i) { return Tensor(to<AtenTensorHandle>(values_[i])); }
  [[gnu::noinline]] Tensor optional_tensor(int i) {
    auto value = to<std::optional<torch::stable::Tensor>>(values_[i]);
    if (!value) return Tensor();
    AtenTensorHandle handle = nullptr;
    check(aoti_torch_new_tensor_handle(value->get(), &handle), "optional tensor");
    return Tensor(handle);
  }
  template <class T>
  T scalar(int i) { return to<T>(values_[i]); }
  void put(int i, Tensor&& result) { values_[i] = torch::stable::detail::from(result.release()); }

 private:
  StableIValue* values_;
  uint64_t count_;
};

// ------------------------------------------------------------------------------------------------------- the C context

inline int32_t thread_count() {
  uint32_t threads = 1;
  check(torch_get_num_threads(&threads), "thread count");
  return threads > 0 ? static_cast<int32_t>(threads) : 1;
}

// Makes the device of the tensors current, if it is not: kernels launch on the current one.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device) {
    int32_t current = -1;
    check(aoti_torch_get_current_device_index(&current), "current device");
    if (current != device.index) check(aoti_torch_create_device_guard(device.index, &guard_), "device guard");
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
  }

 private:
  DeviceGuardHandle guard_ = nullptr;
};

using StreamOf = AOTITorchError (*)(int32_t, void**);

// torch's own answer, from its CUDA library: no CUDA header is needed. Null where this torch has no CUDA.
inline StreamOf stream_function() {
  static const StreamOf found = [] {
    for (const char* name : {"libtorch_cuda.so", "libtorch_hip.so"}) {
      void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
      void* function = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
      if (function != nullptr) return reinterpret_cast<StreamOf>(function);
    }
    return StreamOf{nullptr};
  }();
  return found;
}

inline void* current_stream(Device device) {
  void* stream = nullptr;
  check(stream_function()(device.index, &stream), "current stream");
  return stream;
}

// Whether the current stream of the current device is recorded in a graph. The runtime that torch has loaded knows; where
// its symbols are not visible, nobody does.
inline bool is_capturing() {
  using Asked = int (*)(void* stream, int* status);
  static const Asked asked = [] {
    for (const char* name : {"cudaStreamIsCapturing", "hipStreamIsCapturing"}) {
      if (void* function = dlsym(RTLD_DEFAULT, name); function != nullptr) return reinterpret_cast<Asked>(function);
    }
    return Asked{nullptr};
  }();
  if (asked == nullptr) return false;
  int32_t index = -1;
  check(aoti_torch_get_current_device_index(&index), "current device");
  int status = 0;
  return asked(current_stream({0, index}), &status) == 0 && status != 0;
}

inline Tensor workspace(int64_t bytes, Device device) { return empty({bytes}, aoti_torch_dtype_uint8(), device); }

inline sl_context make_context(int32_t threads, void* stream, const Tensor& scratch, char (&message)[1024],
                               const int64_t* config, size_t config_size) {
  void* data = scratch ? scratch.data() : nullptr;
  const size_t bytes = scratch ? static_cast<size_t>(scratch.sizes()[0]) : 0;
  return sl_context{SL_ABI_VERSION, threads, stream, data, bytes, message, sizeof message, config, config_size};
}

// ------------------------------------------------------------------------------------- what Python does in our place

// Looks at an argument without taking it. The dispatcher takes None for any tensor, and hands over one without anything.
inline bool peek_defined(StableIValue value) {
  bool defined = false;
  check(aoti_torch_is_defined(to<AtenTensorHandle>(value), &defined), "is_defined");
  return defined;
}
inline int32_t peek_dtype(StableIValue value) {
  int32_t dtype = -1;
  check(aoti_torch_get_dtype(to<AtenTensorHandle>(value), &dtype), "dtype");
  return dtype;
}
inline bool peek_contiguous(StableIValue value) {
  bool contiguous = false;
  check(aoti_torch_is_contiguous(to<AtenTensorHandle>(value), &contiguous), "is_contiguous");
  return contiguous;
}
inline bool peek_aligned(StableIValue value, uintptr_t bytes) {
  void* data = nullptr;
  check(aoti_torch_get_data_ptr(to<AtenTensorHandle>(value), &data), "data_ptr");
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}
// -1 where there is no such axis: the checks will say so.
inline int64_t peek_size(StableIValue value, int axis) {
  int64_t rank = 0, *sizes = nullptr;
  check(aoti_torch_get_dim(to<AtenTensorHandle>(value), &rank), "dim");
  check(aoti_torch_get_sizes(to<AtenTensorHandle>(value), &sizes), "sizes");
  return axis < rank ? sizes[axis] : -1;
}
inline int64_t peek_int(StableIValue value) { return to<int64_t>(value); }
inline int64_t peek_bool(StableIValue value) { return to<bool>(value) ? 1 : 0; }
inline bool peek_present(StableIValue value) { return to<void*>(value) != nullptr; }
inline bool peek_contiguous_or_absent(StableIValue value) {
  return !peek_present(value) || peek_contiguous(*to<StableIValue*>(value));
}

// What Python said last on this thread of a call it refused: torch 2.11 loses the text on its way.
inline std::string& last_error() {
  thread_local std::string text;
  return text;
}

// Calls `op` with arguments that nobody has taken; its results replace them.
inline void redispatch(const char* op, const char* overload, StableIValue* values) {
  last_error().clear();
  refusal()[6].clear();
  if (torch_call_dispatcher(op, overload, values, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS) return;
  if (!last_error().empty()) throw std::runtime_error(std::exchange(last_error(), std::string()));
  if (!refusal()[6].empty()) throw std::runtime_error(refusal()[6]);  // native code refused, and torch 2.11 lost that
  // Declared by newer headers than those we build for; torch 2.13 has it.
  const auto what = reinterpret_cast<const char* (*)()>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  throw std::runtime_error(what != nullptr ? what() : std::string(op) + " failed");
}

// Calls `op`, the Python implementation.
inline void defer(const char* op, StableIValue* values) { redispatch(op, "", values); }

// Where there is no Python.
[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_alone(const char* where, const char* why) {
  refuse("SL409", "no native kernel of the deployed library takes the call", "{}", "{}", "a call that the kernel takes",
         "pass contiguous tensors of dtypes that the kernel takes. If the op writes to its arguments, call it under torch.no_grad()", {where, why});
}

// Calls the op that writes, then returns arguments beside its own results. `results`: the number of the argument that a
// result is, or -1 for the next result of the op that writes.
inline void return_arguments(const char* op, const char* overload, StableIValue* values, std::initializer_list<int> results) {
  std::vector<Tensor> returned;
  for (const int argument : results) {
    AtenTensorHandle handle = nullptr;
    if (argument >= 0) check(aoti_torch_new_tensor_handle(to<AtenTensorHandle>(values[argument]), &handle), "returned tensor");
    returned.emplace_back(handle);
  }
  redispatch(op, overload, values);
  int made = 0;
  for (size_t i = 0; i < returned.size(); ++i) {
    if (results.begin()[i] < 0) returned[i] = Tensor(to<AtenTensorHandle>(values[made++]));
  }
  for (size_t i = 0; i < returned.size(); ++i) values[i] = torch::stable::detail::from(returned[i].release());
}

// ------------------------------------------------------------------------------------------------------- registration

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

// Code that serves torch ops, and what their entries jump to: this code, that of another binding, or null for Python.
struct Route {
  Boxed code;
  std::atomic<Boxed>* target;
};

// One op of a binding library. Its entries are registered once and never removed: torch frees what it removes while other
// threads may be calling it. What changes is where the entries lead, one pointer each.
class Registration {
 public:
  using Entry = std::pair<const char*, Boxed>;
  using Symbol = std::pair<const char*, std::atomic<void*>*>;  // a function of the kernel library, and where it goes
  Registration(const char* ns, const char* key, std::vector<Entry> entries, std::vector<Route> routes,
               std::vector<Symbol> symbols)
      : ns_(ns), key_(key), entries_(std::move(entries)), routes_(std::move(routes)), symbols_(std::move(symbols)) {}

  const char* key() const { return key_; }

  // Looks for the kernels. Empty on success, else the reason.
  const char* find(const char* library) {
    if (std::strcmp(key_, "CUDA") == 0 && stream_function() == nullptr) return "this torch has no CUDA";
    if (symbols_.empty()) return "";  // the kernel is part of this library
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    for (const auto& [symbol, kernel] : symbols_) {
      void* found = handle == nullptr ? nullptr : dlsym(handle, symbol);
      if (found == nullptr) return dlerror();
      kernel->store(found);
    }
    return "";
  }
  // Registers the entries, which lead to this code. Empty on success, else the reason.
  const char* attach(const char* library) {
    if (const char* refused = find(library); *refused != 0) return refused;
    for (const Route& route : routes_) route.target->store(route.code);
    if (library_) return "";
    using torch::stable::detail::StableLibrary;
    library_ = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, ns_, key_, "shiplap", 0);
    for (const auto& [name, call] : entries_) library_->impl(name, call);
    return "";
  }
  // The entries lead to the code of `other`, or to Python without one.
  void lead_to(const Registration* other) {
    for (size_t i = 0; i < routes_.size(); ++i) routes_[i].target->store(other == nullptr ? nullptr : other->routes_[i].code);
  }

 private:
  const char *ns_, *key_;
  std::vector<Entry> entries_;
  std::vector<Route> routes_;
  std::vector<Symbol> symbols_;
  std::unique_ptr<torch::stable::detail::StableLibrary> library_;
};

}  // namespace shiplap
