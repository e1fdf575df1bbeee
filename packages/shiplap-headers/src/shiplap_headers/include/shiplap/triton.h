// What a generated launcher of Triton kernels is made of: the CUDA driver, opened at run time, the compiled forms of a
// kernel by what Triton specialises on, and the arguments of one launch. No CUDA header, no torch, no Python.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>

#include "shiplap/base.h"

namespace shiplap::triton {

// ------------------------------------------------------------------------------------------------------------- driver

using Status = int;
using Handle = void*;  // of a context, a module, a function or a stream

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn, gnu::cold, gnu::noinline]] inline void fail(const std::string& text) { throw Failure(text); }

// The functions of libcuda.so.1 that a launch needs.
class Driver {
 public:
  Status (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**, void**);
  Status (*load)(Handle*, const void*);
  Status (*function)(Handle*, Handle, const char*);
  Status (*set_function)(Handle, int, int);
  Status (*current)(Handle*);
  Status (*make_current)(Handle);
  Status (*device)(int*, int);
  Status (*device_fact)(int*, int, int);
  Status (*primary)(Handle*, int);
  Status (*exchange_capture_mode)(int*);
  Status (*name_of)(Status, const char**);
  Status (*fill8)(uint64_t, unsigned char, size_t, Handle);
  Status (*fill32)(uint64_t, unsigned, size_t, Handle);
  Status (*host_memory)(void**, size_t, unsigned);

  // The driver of this process. Throws Failure where there is none.
  static const Driver& get() {
    static const Driver found;
    return found;
  }
  void check(Status status, const char* what) const {
    if (status == 0) [[likely]] return;
    const char* name = nullptr;
    name_of(status, &name);
    fail(std::string(what) + " failed with " + (name != nullptr ? name : std::to_string(status)));
  }

 private:
  Driver() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) fail(std::string("the CUDA driver cannot be opened: ") + dlerror());
    find(launch, "cuLaunchKernel");
    find(load, "cuModuleLoadData");
    find(function, "cuModuleGetFunction");
    find(set_function, "cuFuncSetAttribute");
    find(current, "cuCtxGetCurrent");
    find(make_current, "cuCtxSetCurrent");
    find(device, "cuDeviceGet");
    find(device_fact, "cuDeviceGetAttribute");
    find(primary, "cuDevicePrimaryCtxRetain");
    find(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
    find(name_of, "cuGetErrorName");
    find(fill8, "cuMemsetD8Async");
    find(fill32, "cuMemsetD32Async");
    find(host_memory, "cuMemHostAlloc");
  }
  template <class T>
  void find(T& pointer, const char* name) {
    pointer = reinterpret_cast<T>(dlsym(library_, name));
    if (pointer == nullptr) fail(std::string("the CUDA driver has no ") + name);
  }
  void* library_ = nullptr;
};

// A thread that has made no call of the CUDA runtime has no context: torch's is the primary one of the device.
inline void need_context(const Driver& driver, int index) {
  Handle context = nullptr;
  driver.check(driver.current(&context), "cuCtxGetCurrent");
  if (context != nullptr) [[likely]] return;
  int device = 0;
  driver.check(driver.device(&device, index), "cuDeviceGet");
  driver.check(driver.primary(&context, device), "cuDevicePrimaryCtxRetain");
  driver.check(driver.make_current(context), "cuCtxSetCurrent");
}

// 90 for a device of compute capability 9.0.
inline int architecture(const Driver& driver, int index) {
  int device = 0, major = 0, minor = 0;
  driver.check(driver.device(&device, index), "cuDeviceGet");
  driver.check(driver.device_fact(&major, 75, device), "cuDeviceGetAttribute");
  driver.check(driver.device_fact(&minor, 76, device), "cuDeviceGetAttribute");
  return 10 * major + minor;
}

// ------------------------------------------------------------------------------------------------------ compiled forms

// A cubin with what a launch needs to know of it. `key` is what it was compiled for, without the device.
struct Cubin {
  size_t launch;
  int architecture;
  const int64_t* key;
  size_t keys;
  const void* image;
  const char* name;
  unsigned threads, shared;
};

// The first number of a key: a device, and which declaration of the kernels is in force, since a kernel may be declared
// again in the life of a process.
inline int64_t place_of(int64_t device, int64_t declaration) { return declaration << 16 | device; }
inline int device_of(int64_t place) { return static_cast<int>(place & 0xffff); }

// A form that is loaded on a device: never changed, never freed, since launches of other threads may be looking.
struct Form {
  List key;  // the place, then what Triton specialises on
  Handle function;
  unsigned threads, shared;
  Form* next;
};

// The forms of one kernel. A lookup takes no lock and allocates nothing.
class Forms {
 public:
  const Form* find(const int64_t* key, size_t count) const {
    for (const Form* form = heads_[slot(key, count)].load(std::memory_order_acquire); form != nullptr; form = form->next) {
      if (form->key.size() == count && std::memcmp(form->key.data(), key, count * sizeof(int64_t)) == 0) return form;
    }
    return nullptr;
  }

  // Load `cubin` for `key` on the current context. Safe while a stream is captured.
  void add(const int64_t* key, size_t count, const Cubin& cubin) {
    const Driver& driver = Driver::get();
    need_context(driver, device_of(key[0]));
    const std::lock_guard<std::mutex> alone(adding_);
    if (find(key, count) != nullptr) return;
    int mode = 2;  // relaxed: loading a module belongs to no graph
    driver.check(driver.exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
    Handle module = nullptr, function = nullptr;
    Status status = driver.load(&module, cubin.image);
    if (status == 0) status = driver.function(&function, module, cubin.name);
    if (status == 0 && cubin.shared > 48 * 1024) status = driver.set_function(function, 8, static_cast<int>(cubin.shared));
    driver.exchange_capture_mode(&mode);
    driver.check(status, "loading a cubin");
    std::atomic<Form*>& head = heads_[slot(key, count)];
    kept_.push_back(std::make_unique<Form>(Form{List(key, key + count), function, cubin.threads, cubin.shared, head.load()}));
    head.store(kept_.back().get(), std::memory_order_release);
  }

 private:
  static size_t slot(const int64_t* key, size_t count) {
    uint64_t hash = 0x9E3779B97F4A7C15u;
    for (size_t i = 0; i < count; ++i) {
      hash = (hash ^ static_cast<uint64_t>(key[i])) * 0xFF51AFD7ED558CCDu;
      hash ^= hash >> 32;
    }
    return hash % kSlots;
  }
  static constexpr size_t kSlots = 256;
  std::atomic<Form*> heads_[kSlots]{};
  std::mutex adding_;
  std::vector<std::unique_ptr<Form>> kept_;
};

// Compiles what is missing and adds it: Python, where there is one. 0, or another number after writing `message`.
using Compiler = int (*)(uint64_t launch, int32_t architecture, const int64_t* key, uint64_t keys, char* message, uint64_t size);

// One op's kernels: their forms, the cubins that the library carries, and who compiles others.
template <size_t Launches>
struct Program {
  Program(const char* op, const Cubin* carried, size_t count) : where(op), cubins(carried), cubin_count(count) {}
  const char* where;
  const Cubin* cubins;
  size_t cubin_count;
  Forms forms[Launches];
  std::atomic<Compiler> compiler{nullptr};
  std::atomic<int64_t> declaration{0};

  const Form& form(size_t launch, const int64_t* key, size_t count) {
    if (const Form* found = forms[launch].find(key, count); found != nullptr) [[likely]] return *found;
    return missing(launch, key, count);
  }

 private:
  [[gnu::cold, gnu::noinline]] const Form& missing(size_t launch, const int64_t* key, size_t count) {
    const Driver& driver = Driver::get();
    need_context(driver, device_of(key[0]));
    const int target = architecture(driver, device_of(key[0]));
    for (size_t i = 0; i < cubin_count; ++i) {
      const Cubin& cubin = cubins[i];
      const bool same = cubin.launch == launch && cubin.architecture == target && cubin.keys + 1 == count;
      if (same && std::memcmp(cubin.key, key + 1, cubin.keys * sizeof(int64_t)) == 0) forms[launch].add(key, count, cubin);
    }
    const Form* found = forms[launch].find(key, count);
    const Compiler compile = compiler.load();
    if (found == nullptr && compile != nullptr) {
      char message[1024] = "";
      if (compile(launch, target, key, count, message, sizeof message) != 0) fail(message);
      found = forms[launch].find(key, count);
    }
    if (found != nullptr) return *found;
    std::string text = "no cubin for sm_" + std::to_string(target) + ", launch " + std::to_string(launch) + ", key";
    for (size_t i = 1; i < count; ++i) text += " " + std::to_string(key[i]);
    fail(std::string(where) + ": " + text + ", and nobody here compiles: package the op with a call of this kind");
  }
};

// ---------------------------------------------------------------------------------------------------------- one launch

inline int64_t bits_of(double value) {
  int64_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline int64_t numel(const DLTensor* tensor) {
  int64_t count = tensor != nullptr ? 1 : 0;
  for (int32_t axis = 0; tensor != nullptr && axis < tensor->ndim; ++axis) count *= tensor->shape[axis];
  return count;
}
inline int64_t size_of(const DLTensor* tensor, int32_t axis) {
  return tensor != nullptr && axis < tensor->ndim ? tensor->shape[axis] : 0;
}
inline int64_t stride_of(const DLTensor* tensor, int32_t axis) {
  return tensor != nullptr && axis < tensor->ndim ? tensor->strides[axis] : 0;
}

// The arguments of a launch, and the key of all that the kernel is compiled for. Lives on the caller's stack.
template <size_t Keys, size_t Parameters>
class Launch {
 public:
  explicit Launch(int64_t place) { key_[keys_++] = place; }

  void constant(int64_t value) { key_[keys_++] = value; }
  void tensor(const DLTensor* tensor, bool aligns) {
    if (tensor == nullptr) return constant(-1);
    const uintptr_t address = reinterpret_cast<uintptr_t>(tensor->data) + tensor->byte_offset;
    const int64_t type = tensor->dtype.code << 16 | tensor->dtype.bits << 8 | tensor->dtype.lanes;
    constant(type << 1 | (aligns && address % 16 == 0 ? 1 : 0));
    put(static_cast<int64_t>(address));
  }
  void scratch(const void* workspace, int64_t offset, bool aligns) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(workspace) + static_cast<uintptr_t>(offset);
    constant(aligns && address % 16 == 0 ? 1 : 0);
    put(static_cast<int64_t>(address));
  }
  // An integer of a width that its value decides, or of a declared one: 1 and multiples of 16 may compile another form.
  void integer(int64_t value, bool declared, bool specialises, bool aligns) {
    const bool one = specialises && value == 1;
    const int64_t width = declared || (value >= INT32_MIN && value <= INT32_MAX) ? 0 : 32;
    constant(one ? 1 : (specialises && aligns && value % 16 == 0 ? 16 : 0) + width);
    if (!one || declared) put(value);
  }
  void real32(double value) {
    const float narrow = static_cast<float>(value);
    int64_t bits = 0;
    std::memcpy(&bits, &narrow, sizeof narrow);
    put(bits);
  }
  void real64(double value) { put(bits_of(value)); }
  void boolean(bool value) { put(value ? 1 : 0); }

  // Launch on the stream of `context`. Programs of no blocks launch nothing.
  template <class Program>
  void go(Program& program, size_t number, const sl_context* context, int64_t x, int64_t y, int64_t z) {
    if (x < 0 || y < 0 || z < 0 || x > INT32_MAX || y > 65535 || z > 65535) [[unlikely]] {
      fail("a grid of " + std::to_string(x) + " x " + std::to_string(y) + " x " + std::to_string(z) +
           " programs, a device takes 2147483647 x 65535 x 65535");
    }
    if (x == 0 || y == 0 || z == 0) return;
    const Form& form = program.form(number, key_, keys_);
    const Driver& driver = Driver::get();
    need_context(driver, device_of(key_[0]));
    put(0);  // Triton's own scratch memories, of which none is needed
    put(0);
    driver.check(driver.launch(form.function, static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z),
                               form.threads, 1, 1, form.shared, context->stream, parameters_, nullptr),
                 "cuLaunchKernel");
  }

 private:
  void put(int64_t value) {  // little-endian: the low bytes are the value in any narrower type
    values_[count_] = value;
    parameters_[count_] = &values_[count_];
    ++count_;
  }
  int64_t key_[Keys + 1];
  int64_t values_[Parameters + 2];
  void* parameters_[Parameters + 2];
  size_t keys_ = 0, count_ = 0;
};

// `size` bytes of the workspace become `byte`, on the stream of `context`.
inline void fill(const sl_context* context, int64_t offset, int64_t size, unsigned char byte) {
  if (offset < 0 || size < 0 || static_cast<uint64_t>(offset) + static_cast<uint64_t>(size) > context->workspace_size) {
    fail("bytes " + std::to_string(offset) + " to " + std::to_string(offset + size) + " of a workspace of " +
         std::to_string(context->workspace_size));
  }
  if (size == 0) return;
  const Driver& driver = Driver::get();
  const uint64_t at = reinterpret_cast<uint64_t>(context->workspace) + static_cast<uint64_t>(offset);
  const size_t bytes = static_cast<size_t>(size);
  const bool words = at % 4 == 0 && bytes % 4 == 0;
  driver.check(words ? driver.fill32(at, 0x01010101u * byte, bytes / 4, context->stream)
                     : driver.fill8(at, byte, bytes, context->stream),
               "cuMemsetAsync");
}

inline int conclude(const sl_context* context, const char* what) {
  if (context->error != nullptr && context->error_size > 0) std::snprintf(context->error, context->error_size, "%s", what);
  return SL_UNSUPPORTED;
}

}  // namespace shiplap::triton
