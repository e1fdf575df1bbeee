#include "common.h"

namespace shiplap::sparse3d {

int check_int32(const sl_context* ctx, const char* name, const DLTensor* tensor, int ndim) {
  SL_TRY(check_layout(ctx, name, tensor, ndim, true));
  if (!has_dtype(tensor, 0, 32)) return fail(ctx, SL_UNSUPPORTED, "%s is not int32", name);
  // Rows are numbered in int32 by the tables.
  if (tensor->shape[0] > INT32_MAX) {
    return fail(ctx, SL_INVALID_ARGUMENT, "%s has %lld rows, more than int32 can number", name,
                static_cast<long long>(tensor->shape[0]));
  }
  return SL_OK;
}

int check_int64(const sl_context* ctx, const char* name, const DLTensor* tensor, int ndim) {
  SL_TRY(check_layout(ctx, name, tensor, ndim, true));
  return has_dtype(tensor, 0, 64) ? static_cast<int>(SL_OK)
                                  : fail(ctx, SL_UNSUPPORTED, "%s is not int64", name);
}

int check_coords(const sl_context* ctx, const char* name, const DLTensor* tensor) {
  SL_TRY(check_int32(ctx, name, tensor, 2));
  return check_extent(ctx, name, tensor, 1, 4);
}

int check_float(const sl_context* ctx, const char* name, const DLTensor* tensor, int ndim) {
  SL_TRY(check_layout(ctx, name, tensor, ndim, true));
  if (!has_dtype(tensor, 2, 32) && !has_dtype(tensor, 2, 64)) {
    return fail(ctx, SL_UNSUPPORTED, "%s is neither float32 nor float64", name);
  }
  return SL_OK;
}

int check_number(const sl_context* ctx, const char* name, const DLTensor* tensor, int ndim) {
  if (tensor == nullptr || (!has_dtype(tensor, 2, 16) && !has_dtype(tensor, 4, 16))) {
    return check_float(ctx, name, tensor, ndim);
  }
  return check_layout(ctx, name, tensor, ndim, true);
}

int check_same_float(const sl_context* ctx, const char* name, const DLTensor* tensor, int ndim,
                     const DLTensor* like, bool contiguous) {
  SL_TRY(check_layout(ctx, name, tensor, ndim, contiguous));
  if (!has_dtype(tensor, like->dtype.code, like->dtype.bits)) {
    return fail(ctx, SL_INVALID_ARGUMENT, "%s is not %sfloat%d like feats", name,
                like->dtype.code == 4 ? "b" : "", static_cast<int>(like->dtype.bits));
  }
  return SL_OK;
}

int check_groups(const sl_context* ctx, int64_t groups, int64_t in_channels,
                 int64_t out_channels) {
  if (groups >= 1 && in_channels % groups == 0 && out_channels % groups == 0) return SL_OK;
  return fail(ctx, SL_INVALID_ARGUMENT, "%lld groups do not divide %lld and %lld channels",
              static_cast<long long>(groups), static_cast<long long>(in_channels),
              static_cast<long long>(out_channels));
}

int read_int3(const sl_context* ctx, const char* name, const int64_t* values, int64_t length,
              int64_t lowest, Int3* out) {
  if (length != 3) {
    return fail(ctx, SL_INVALID_ARGUMENT, "%s has %lld values, expected 3", name,
                static_cast<long long>(length));
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (values[axis] < lowest || values[axis] > INT32_MAX) {
      return fail(ctx, SL_INVALID_ARGUMENT, "%s[%d] = %lld, expected a value in [%lld, 2^31)",
                  name, axis, static_cast<long long>(values[axis]),
                  static_cast<long long>(lowest));
    }
    out->v[axis] = values[axis];
  }
  return SL_OK;
}

int Arena::require(const sl_context* ctx, int64_t bytes) { return shiplap::Arena::require(ctx, bytes); }

}  // namespace shiplap::sparse3d
