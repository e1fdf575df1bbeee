// The largest integer of each row, by one warp: in one instruction from compute capability 8.0 on, else by shuffles.
#include <climits>
#include <cstdio>

__device__ int warp_max(int value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, value);
#else
  for (int step = 16; step > 0; step /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
#endif
}

__global__ void row_max_kernel(const int* x, int* out, int64_t columns) {
  int best = INT_MIN;
  for (int64_t j = threadIdx.x; j < columns; j += 32) best = max(best, x[blockIdx.x * columns + j]);
  best = warp_max(best);
  if (threadIdx.x == 0) out[blockIdx.x] = best;
}

int row_max(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  if (x->shape[0] == 0) return SL_OK;
  row_max_kernel<<<static_cast<unsigned>(x->shape[0]), 32, 0, static_cast<cudaStream_t>(ctx->stream)>>>(
      static_cast<const int*>(x->data), static_cast<int*>(out->data), x->shape[1]);
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return SL_OK;
  snprintf(ctx->error, ctx->error_size, "%s", cudaGetErrorString(status));
  return SL_INTERNAL;
}
