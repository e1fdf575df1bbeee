// What CPU kernels behind the C ABI share: error messages, checks of tensors, workspace, threads.
//
// The rules of the ABI shape it: no state, no heap memory that grows with the data (scratch comes from
// ctx->workspace), no exception across the boundary. Everything is of internal linkage, so that a file may be built for
// another instruction set than its neighbours.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <thread>

#include "shiplap/abi.h"

#define SL_TRY(expression)                            \
  do {                                                \
    const int sl_try_status = (expression);           \
    if (sl_try_status != SL_OK) return sl_try_status; \
  } while (0)

namespace shiplap {
namespace {

// Writes a printf-style message to ctx->error and returns `status`.
[[gnu::format(printf, 3, 4), maybe_unused]] int fail(const sl_context* ctx, int status, const char* format, ...) {
  if (ctx->error == nullptr || ctx->error_size == 0) return status;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(ctx->error, ctx->error_size, format, arguments);
  va_end(arguments);
  return status;
}

// ------------------------------------------------------------------------------------------------------------ tensors

struct Dtype {
  int code, bits;
  bool operator==(Dtype other) const { return code == other.code && bits == other.bits; }
};

[[maybe_unused]] inline Dtype dtype_of(const DLTensor* tensor) {
  return {tensor->dtype.code, tensor->dtype.lanes == 1 ? tensor->dtype.bits : 0};
}

template <class T>
T* data(const DLTensor* tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor->data) + tensor->byte_offset);
}

[[maybe_unused]] inline bool is_contiguous(const DLTensor* tensor) {
  if (tensor->strides == nullptr) return true;
  for (int dim = 0; dim < tensor->ndim; ++dim) {
    if (tensor->shape[dim] == 0) return true;
  }
  int64_t expected = 1;
  for (int dim = tensor->ndim - 1; dim >= 0; --dim) {
    if (tensor->shape[dim] != 1 && tensor->strides[dim] != expected) return false;
    expected *= tensor->shape[dim];
  }
  return true;
}

// Refuses NULL, a device other than the CPU, a wrong rank and, unless any will do, strides.
[[maybe_unused]] inline int check_layout(const sl_context* ctx, const char* name, const DLTensor* tensor, int ndim,
                                         bool contiguous = true) {
  constexpr int kCpu = 1;
  if (tensor == nullptr) return fail(ctx, SL_INVALID_ARGUMENT, "%s is missing", name);
  if (tensor->device.device_type != kCpu) return fail(ctx, SL_UNSUPPORTED, "%s is not on the CPU", name);
  if (tensor->ndim != ndim) {
    return fail(ctx, SL_INVALID_ARGUMENT, "%s has %d dims, expected %d", name, static_cast<int>(tensor->ndim), ndim);
  }
  if (contiguous && !is_contiguous(tensor)) return fail(ctx, SL_UNSUPPORTED, "%s is not contiguous", name);
  return SL_OK;
}

[[maybe_unused]] inline int check_tensor(const sl_context* ctx, const char* name, const DLTensor* tensor, int ndim,
                                         Dtype dtype) {
  SL_TRY(check_layout(ctx, name, tensor, ndim));
  if (dtype_of(tensor) == dtype) return SL_OK;
  return fail(ctx, SL_UNSUPPORTED, "%s is of dtype code %d with %d bits, expected code %d with %d", name,
              static_cast<int>(tensor->dtype.code), static_cast<int>(tensor->dtype.bits), dtype.code, dtype.bits);
}

[[maybe_unused]] inline int check_extent(const sl_context* ctx, const char* name, const DLTensor* tensor, int dim,
                                         int64_t expected) {
  if (tensor->shape[dim] == expected) return SL_OK;
  return fail(ctx, SL_INVALID_ARGUMENT, "%s has size %lld in dim %d, expected %lld", name,
              static_cast<long long>(tensor->shape[dim]), dim, static_cast<long long>(expected));
}

inline int64_t cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return cdiv(a, b) * b; }

// ---------------------------------------------------------------------------------------------------------- workspace

// A bump allocator over ctx->workspace. A kernel states its need as one formula and checks it first with `require`, so
// `take` cannot run over; it still refuses rather than trusts.
class Arena {
 public:
  explicit Arena(const sl_context* ctx)
      : next_(static_cast<char*>(ctx->workspace)), left_(static_cast<int64_t>(ctx->workspace_size)) {}

  static int require(const sl_context* ctx, int64_t bytes) {
    if (static_cast<int64_t>(ctx->workspace_size) >= bytes) return SL_OK;
    return fail(ctx, SL_INTERNAL, "workspace of %lld bytes, needs %lld", static_cast<long long>(ctx->workspace_size),
                static_cast<long long>(bytes));
  }

  // Uninitialised room for `count` values, 64-byte aligned.
  template <class T>
  T* take(int64_t count) {
    const int64_t bytes = round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    if (bytes > left_) return nullptr;
    T* taken = reinterpret_cast<T*>(next_);
    next_ += bytes;
    left_ -= bytes;
    return taken;
  }

 private:
  char* next_;
  int64_t left_;
};

// ------------------------------------------------------------------------------------------------------------ threads

constexpr int kMaxThreads = 256;

[[maybe_unused]] inline int thread_count(const sl_context* ctx) {
  return std::clamp<int>(ctx->num_threads, 1, kMaxThreads);
}

// Calls body(worker, task) for every task in [0, tasks); tasks go to whichever worker is free, so a body may only write
// what belongs to its task (or scratch that belongs to its worker). `body` must not throw. Starting and joining a thread
// costs 25 us (2026-11, 2-core EPYC), so callers pass threads = 1 for work below a few hundred microseconds.
template <class Body>
void parallel_for(int threads, int64_t tasks, const Body& body) {
  const int workers = static_cast<int>(std::min<int64_t>(threads, tasks));
  std::atomic<int64_t> next{0};
  const auto run = [&](int worker) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(worker, task);
  };
  std::array<std::thread, kMaxThreads> pool;
  int started = 1;
  try {
    for (; started < workers; ++started) pool[started] = std::thread(run, started);
  } catch (...) {
    // No more threads to be had: the ones that run, and this one, take all the tasks.
  }
  run(0);
  for (int worker = 1; worker < started; ++worker) pool[worker].join();
}

// Runs a kernel's body and turns an exception into a status: none may cross the C boundary.
template <class Body>
int guarded(const sl_context* ctx, const Body& body) {
  try {
    return body();
  } catch (...) {
    return fail(ctx, SL_INTERNAL, "unexpected C++ exception");
  }
}

}  // namespace
}  // namespace shiplap
