#include "testing.h"

#include "dot.h"

using namespace shiplap::slidesparse;

extern "C" int slidesparse_dot_int8_isa(const int8_t* left, int64_t rows, const int8_t* right, int64_t columns,
                                        int64_t depth, int32_t* out, int32_t isa) {
  const Kernels* kernels = isa_kernels(isa);
  if (kernels == nullptr) return SL_UNSUPPORTED;
  kernels->dot_int8({left, depth, rows, right, depth, columns, depth, out});
  return SL_OK;
}

extern "C" int slidesparse_dot_symmetric_isa(const int8_t* left, int64_t rows, const int8_t* right, int64_t columns,
                                             int64_t depth, int32_t* out, int32_t isa) {
  const Kernels* kernels = isa_kernels(isa);
  if (kernels == nullptr) return SL_UNSUPPORTED;
  kernels->dot_symmetric({left, depth, rows, right, depth, columns, depth, out});
  return SL_OK;
}

extern "C" int slidesparse_dot_float_isa(const float* left, int64_t rows, const float* right, int64_t columns,
                                         int64_t depth, float* out, int32_t isa) {
  const Kernels* kernels = isa_kernels(isa);
  if (kernels == nullptr) return SL_UNSUPPORTED;
  kernels->dot_float({left, depth, rows, right, depth, columns, depth, out});
  return SL_OK;
}

extern "C" int slidesparse_widen_isa(const void* from, int32_t element, float* to, int64_t count, int32_t isa) {
  const Kernels* kernels = isa_kernels(isa);
  if (kernels == nullptr || element < 0 || element >= kElementCount) return SL_UNSUPPORTED;
  kernels->widen[element](from, to, count);
  return SL_OK;
}

extern "C" int slidesparse_narrow_isa(const float* row, int64_t count, float inverse, int32_t float8, void* out,
                                      float* largest, int32_t isa) {
  const Kernels* kernels = isa_kernels(isa);
  if (kernels == nullptr) return SL_UNSUPPORTED;
  *largest = kernels->largest(row, count);
  (float8 != 0 ? kernels->to_float8 : kernels->to_int8)({row, count, inverse, out});
  return SL_OK;
}
