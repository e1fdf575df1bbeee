// What sparse3d kernels check beside what all kernels do (shiplap/cpu/kernel.h). Results do not depend on the number of
// threads.
#ifndef SHIPLAP_SPARSE3D_COMMON_H_
#define SHIPLAP_SPARSE3D_COMMON_H_

#include <cstring>

#include "shiplap/cpu/kernel.h"
#include "sparse3d.h"

namespace shiplap::sparse3d {

using shiplap::cdiv, shiplap::check_extent, shiplap::data, shiplap::fail, shiplap::guarded;
using shiplap::kMaxThreads, shiplap::parallel_for, shiplap::round_up, shiplap::thread_count;

inline bool has_dtype(const DLTensor* tensor, int code, int bits) { return dtype_of(tensor) == Dtype{code, bits}; }

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

// -------------------------------------------------------------------------------- workspace

// As shiplap::Arena, over any memory, and of external linkage: files hand it to each other. (The one that all kernels
// share is of internal linkage, since they may be built for several instruction sets.)
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

}  // namespace shiplap::sparse3d

#endif  // SHIPLAP_SPARSE3D_COMMON_H_
