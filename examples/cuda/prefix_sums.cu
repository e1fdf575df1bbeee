// The sums of all prefixes of a row of integers, by CUB.
#include <cstdio>
#include <cub/cub.cuh>

// --8<-- [start:cub]
int prefix_sums(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t* in = static_cast<const int64_t*>(x->data);
  int64_t* sums = static_cast<int64_t*>(out->data);
  cudaStream_t stream = static_cast<cudaStream_t>(ctx->stream);
  if (x->shape[0] == 0) return SL_OK;
  // With a null pointer, CUB only computes how much scratch memory it needs.
  size_t size = 0;
  cudaError_t status =
      cub::DeviceScan::InclusiveSum(nullptr, size, in, sums, x->shape[0], stream);
  if (status == cudaSuccess && size > ctx->workspace_size) {
    snprintf(ctx->error, ctx->error_size, "CUB needs a workspace of %zu bytes", size);
    return SL_INTERNAL;
  }
  if (status == cudaSuccess)
    status = cub::DeviceScan::InclusiveSum(ctx->workspace, size, in, sums,
                                           x->shape[0], stream);
  if (status == cudaSuccess) return SL_OK;
  snprintf(ctx->error, ctx->error_size, "%s", cudaGetErrorString(status));
  return SL_INTERNAL;
}
// --8<-- [end:cub]
