// --8<-- [start:file]
// RMS norm of float rows, one block a row.
// sl.source compiles this with the header of the declaration in front.
#include <cstdio>
#include <cuda_runtime.h>

constexpr int THREADS = 256;

__global__ void scale_rows(const float* x, const float* weight, float* out,
                           int64_t columns, float eps) {
  const float* row = x + blockIdx.x * columns;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < columns; i += THREADS) sum += row[i] * row[i];
  __shared__ float partial[THREADS];
  partial[threadIdx.x] = sum;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  __syncthreads();
  const float scale = rsqrtf(partial[0] / columns + eps);
  float* result = out + blockIdx.x * columns;
  for (int64_t i = threadIdx.x; i < columns; i += THREADS)
    result[i] = row[i] * scale * weight[i];
}

// The prototype follows from the declaration: a tensor is a DLTensor, a float is a
// double, the stream is in ctx.
int rms_norm_cuda(const sl_context* ctx, const DLTensor* x, const DLTensor* weight,
                  DLTensor* out, double eps) {
  const int64_t rows = x->shape[0], columns = x->shape[1];
  if (rows == 0 || columns == 0) return SL_OK;
  cudaStream_t stream = static_cast<cudaStream_t>(ctx->stream);
  scale_rows<<<static_cast<unsigned>(rows), THREADS, 0, stream>>>(
      static_cast<const float*>(x->data), static_cast<const float*>(weight->data),
      static_cast<float*>(out->data), columns, static_cast<float>(eps));
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return SL_OK;
  snprintf(ctx->error, ctx->error_size, "%s", cudaGetErrorString(status));
  return SL_INTERNAL;
}
// --8<-- [end:file]
