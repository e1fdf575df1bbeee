// Checked weights, dense or packed.
#pragma once

#include "operands.h"

namespace shiplap::slidesparse {

constexpr Dtype kFloat8Type{10, 8}, kFloat16Type{2, 16}, kBfloat16Type{4, 16};
constexpr int64_t kPortable = 0;  // layout of a packed weight

inline int check_depth(const sl_context* ctx, int64_t rows, int64_t depth) {
  constexpr int64_t kMost = int64_t{1} << 40;  // what products of the two with small factors leave room for
  if (rows >= 0 && depth >= 0 && rows < kMost && depth < kMost && (depth == 0 || rows <= kMost / depth)) return SL_OK;
  return fail(ctx, SL_INVALID_ARGUMENT, "a weight of %lld rows of %lld", static_cast<long long>(rows),
              static_cast<long long>(depth));
}

template <class T>
void take_element(Dtype dtype, Weight<T>* weight) {
  weight->itemsize = dtype.bits / 8;
  if constexpr (sizeof(T) != 1) weight->widen = best_kernels().widen[element_of(dtype)];
}

template <class T>
int dense_weight(const sl_context* ctx, const DLTensor* dense, int64_t rows, int64_t depth, Dtype dtype,
                 Weight<T>* weight) {
  SL_TRY(check_tensor(ctx, "the dense weight", dense, 2, dtype));
  SL_TRY(check_extent(ctx, "the dense weight", dense, 0, rows));
  SL_TRY(check_extent(ctx, "the dense weight", dense, 1, depth));
  weight->values = data<const char>(dense);
  weight->depth = depth;
  take_element(dtype, weight);
  return SL_OK;
}

template <class T>
int packed_weight(const sl_context* ctx, const DLTensor* packed, int64_t layout, int64_t rows, int64_t depth,
                  Dtype dtype, Weight<T>* weight) {
  SL_TRY(check_tensor(ctx, "the packed weight", packed, 1, kUint8Type));
  if (layout != kPortable) {
    return fail(ctx, SL_INVALID_ARGUMENT, "a weight packed in layout %lld, expected the portable one; pack it on the CPU",
                static_cast<long long>(layout));
  }
  SL_TRY(check_depth(ctx, rows, depth));
  if (depth % 8 != 0) return fail(ctx, SL_INVALID_ARGUMENT, "a packed depth that is no multiple of 8");
  const int64_t itemsize = dtype.bits / 8, wanted = packed_bytes(rows, depth, itemsize);
  if (packed->shape[0] != wanted) {
    return fail(ctx, SL_INVALID_ARGUMENT, "the packed weight has %lld bytes, expected %lld for %lld rows of %lld",
                static_cast<long long>(packed->shape[0]), static_cast<long long>(wanted), static_cast<long long>(rows),
                static_cast<long long>(depth));
  }
  weight->values = data<const char>(packed);
  weight->meta = reinterpret_cast<const uint8_t*>(weight->values) + rows * depth / 2 * itemsize;
  weight->depth = depth;
  weight->packed = true;
  take_element(dtype, weight);
  return SL_OK;
}

}  // namespace shiplap::slidesparse
