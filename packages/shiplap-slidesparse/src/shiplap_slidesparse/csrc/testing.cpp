#include "testing.h"

#include <algorithm>
#include <vector>

#include "dot.h"

using namespace shiplap::slidesparse;

extern "C" int slidesparse_dot_int8_isa(const int8_t* left, int64_t rows, const int8_t* right, int64_t columns,
                                        int64_t depth, int32_t* out, int32_t isa) {
  const Kernels* kernels = isa_kernels(isa);
  if (kernels == nullptr) return SL_UNSUPPORTED;
  kernels->dot_int8({left, depth, rows, right, depth, columns, depth, out});
  return SL_OK;
}

extern "C" int slidesparse_dot_panel_isa(const int8_t* left, int64_t rows, const int8_t* right, int64_t columns,
                                         int64_t depth, int32_t* out, int32_t isa) {
  const Kernels* kernels = isa_kernels(isa);
  if (kernels == nullptr || kernels->panels.dot == nullptr) return SL_UNSUPPORTED;
  const size_t stride = static_cast<size_t>(depth + 31) / 32 * 32, count = static_cast<size_t>(rows);
  std::vector<int8_t> bytes(count * stride);
  std::vector<uint8_t> panel(stride * kTileColumns);
  std::vector<Carried> carried(count * stride / 4);
  std::vector<int32_t> carries(count), excess(count), sums(kTileRows * kTileColumns);
  const PanelRows taken{static_cast<int64_t>(stride), bytes.data(), carried.data(), carries.data(), excess.data()};
  for (int64_t row = 0; row < rows; ++row) kernels->panels.take_row(left + row * depth, depth, row, taken);
  kernels->panels.fill(right, columns, depth, panel.data());
  kernels->panels.dot(taken, depth, 0, rows, panel.data(), right, sums.data());
  for (int64_t row = 0; row < rows; ++row) std::copy_n(&sums[row * kTileColumns], columns, out + row * kTileColumns);
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
