// The function of the declaration, in C++: nvcc compiles lookup_kernel.cu, and links both.
#include "lookup.h"
#include <cstdio>

int lookup(const sl_context* ctx, const DLTensor* table, const DLTensor* rows, DLTensor* out) {
  const cudaError_t status =
      launch_lookup(static_cast<const float*>(table->data), static_cast<const int64_t*>(rows->data),
                    static_cast<float*>(out->data), rows->shape[0], table->shape[0], table->shape[1],
                    static_cast<cudaStream_t>(ctx->stream));
  if (status == cudaSuccess) return SL_OK;
  snprintf(ctx->error, ctx->error_size, "%s", cudaGetErrorString(status));
  return SL_INTERNAL;
}
