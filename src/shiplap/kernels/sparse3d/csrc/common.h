// What every sparse3d kernel needs: error messages, tensor checks, the workspace, threads.
//
// Rules of the C ABI that shape this file: no state, no heap memory that grows with the data (all
// scratch comes from ctx->workspace), no exception across the boundary, and results that do not
// depend on the number of threads.
#ifndef SHIPLAP_SPARSE3D_COMMON_H_
#define SHIPLAP_SPARSE3D_COMMON_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>

#include "sparse3d.h"

namespace shiplap::sparse3d {

// Writes a printf-style message to ctx->error and returns `status`.
[[gnu::format(printf, 3, 4)]] int fail(const sl_context* ctx, int status, const char* format, ...);

#define SL_TRY(expression)                   \
  do {                                       \
    const int sl_try_status = (expression);  \
    if (sl_try_status != SL_OK) return sl_try_status; \
  } while (0)

// ---------------------------------------------------------------------------------- tensors

template <class T>
T* data(const DLTensor* tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor->data) + tensor->byte_offset);
}

inline bool has_dtype(const DLTensor* tensor, int code, int bits) {
  return tensor->dtype.code == code && tensor->dtype.bits == bits && tensor->dtype.lanes == 1;
}

// The checks below refuse NULL, a device other than the CPU, a wrong rank, dtype or layout.
int check_int32(const sl_context* ctx, const char* name, const DLTensor* tensor, int ndim);
int check_int64(const sl_context* ctx, const char* name, const DLTensor* tensor, int ndim);
int check_coords(const sl_context* ctx, const char* name, const DLTensor* tensor);
int check_float(const sl_context* ctx, const char* name, const DLTensor* tensor, int ndim);
// check_float, or one of the 16-bit types.
int check_number(const sl_context* ctx, const char* name, const DLTensor* tensor, int ndim);
// float like `like`; any strides when `contiguous` is false.
int check_same_float(const sl_context* ctx, const char* name, const DLTensor* tensor, int ndim,
                     const DLTensor* like, bool contiguous = true);
int check_extent(const sl_context* ctx, const char* name, const DLTensor* tensor, int dim,
                 int64_t expected);

int check_groups(const sl_context* ctx, int64_t groups, int64_t in_channels, int64_t out_channels);

// ---------------------------------------------------------------------------------- scalars

struct Int3 {
  int64_t v[3];
  int64_t operator[](int axis) const { return v[axis]; }
  int64_t prod() const { return v[0] * v[1] * v[2]; }
};

// Reads a list[int] of three values in [lowest, 2^31), the range in which no index product of
// two of them leaves int64.
int read_int3(const sl_context* ctx, const char* name, const int64_t* values, int64_t length,
              int64_t lowest, Int3* out);

inline int64_t cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return cdiv(a, b) * b; }

// -------------------------------------------------------------------------------- workspace

// A bump allocator over ctx->workspace. Every op states its need as one formula and checks it
// first with `require`, so `take` cannot run over; it still refuses rather than trusts.
class Arena {
 public:
  explicit Arena(const sl_context* ctx)
      : Arena(static_cast<char*>(ctx->workspace), static_cast<int64_t>(ctx->workspace_size)) {}
  Arena(char* start, int64_t size) : next_(start), left_(size) {}  // `start` 64-byte aligned

  static int require(const sl_context* ctx, int64_t bytes);

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

// ---------------------------------------------------------------------------------- threads

constexpr int kMaxThreads = 256;

inline int thread_count(const sl_context* ctx) {
  return std::clamp<int>(ctx->num_threads, 1, kMaxThreads);
}

// Calls body(worker, task) for every task in [0, tasks); tasks go to whichever worker is free, so
// a body may only write what belongs to its task (or scratch that belongs to its worker). `body`
// must not throw. Starting and joining a thread costs 25 us (2026-11, 2-core EPYC), so callers pass
// threads = 1 for work below a few hundred microseconds.
template <class Body>
void parallel_for(int threads, int64_t tasks, const Body& body) {
  const int workers = static_cast<int>(std::min<int64_t>(threads, tasks));
  std::atomic<int64_t> next{0};
  const auto run = [&](int worker) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      body(worker, task);
    }
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

// Runs an op's body and turns an exception into a status: none may cross the C boundary.
template <class Body>
int guarded(const sl_context* ctx, const Body& body) {
  try {
    return body();
  } catch (...) {
    return fail(ctx, SL_INTERNAL, "unexpected C++ exception");
  }
}

}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_COMMON_H_
