// x divided by its Euclidean norm, in three launches: sums of squares of parts, their sum, and the division.
#include <cstdio>

constexpr int THREADS = 256, PARTS = 128;  // PARTS floats of workspace, and one for the sum

__device__ float block_sum(float value) {
  __shared__ float partial[THREADS];
  partial[threadIdx.x] = value;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  __syncthreads();
  return partial[0];
}

__global__ void square_parts(const float* x, int64_t count, float* parts) {
  float sum = 0;
  const int64_t step = int64_t{gridDim.x} * THREADS;
  for (int64_t i = blockIdx.x * int64_t{THREADS} + threadIdx.x; i < count; i += step) sum += x[i] * x[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void add_parts(float* parts) {
  const float sum = block_sum(threadIdx.x < PARTS ? parts[threadIdx.x] : 0.0f);
  if (threadIdx.x == 0) parts[PARTS] = sum;
}

__global__ void divide(const float* x, int64_t count, const float* parts, float eps, float* out) {
  const float root = sqrtf(parts[PARTS]);
  const float norm = root < eps ? eps : root;  // fmaxf would return eps for NaN
  const int64_t step = int64_t{gridDim.x} * THREADS;
  for (int64_t i = blockIdx.x * int64_t{THREADS} + threadIdx.x; i < count; i += step) out[i] = x[i] / norm;
}

// --8<-- [start:workspace]
int unit_norm(const sl_context* ctx, const DLTensor* x, DLTensor* out, double eps) {
  const int64_t count = x->shape[0];
  if (count == 0) return SL_OK;
  const float* in = static_cast<const float*>(x->data);
  float* parts = static_cast<float*>(ctx->workspace);
  cudaStream_t stream = static_cast<cudaStream_t>(ctx->stream);
  square_parts<<<PARTS, THREADS, 0, stream>>>(in, count, parts);
  add_parts<<<1, THREADS, 0, stream>>>(parts);
  divide<<<PARTS, THREADS, 0, stream>>>(in, count, parts, static_cast<float>(eps),
                                        static_cast<float*>(out->data));
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return SL_OK;
  snprintf(ctx->error, ctx->error_size, "%s", cudaGetErrorString(status));
  return SL_INTERNAL;
}
// --8<-- [end:workspace]
