// out = gelu(x + bias) for rows of three dtypes, with one thread for each element.
#include <cstdio>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T>
__global__ void bias_gelu_kernel(const T* x, const T* bias, T* out, int64_t count, int64_t columns) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const float v = static_cast<float>(x[i]) + static_cast<float>(bias[i % columns]);
    out[i] = static_cast<T>(0.5f * v * erfcf(-v * 0.70710678118654752f));
  }
}

// --8<-- [start:dtypes]
template <typename T>
void launch(const sl_context* ctx, const DLTensor* x, const DLTensor* bias,
            DLTensor* out) {
  const int64_t count = x->shape[0] * x->shape[1];
  const int blocks = static_cast<int>(count / 256 < 4096 ? count / 256 + 1 : 4096);
  bias_gelu_kernel<<<blocks, 256, 0, static_cast<cudaStream_t>(ctx->stream)>>>(
      static_cast<const T*>(x->data), static_cast<const T*>(bias->data),
      static_cast<T*>(out->data), count, x->shape[1]);
}

int bias_gelu(const sl_context* ctx, const DLTensor* x, const DLTensor* bias,
              DLTensor* out) {
  constexpr int FLOAT = 2, BFLOAT = 4;  // the codes of DLPack
  if (x->dtype.code == FLOAT && x->dtype.bits == 32) launch<float>(ctx, x, bias, out);
  if (x->dtype.code == FLOAT && x->dtype.bits == 16) launch<__half>(ctx, x, bias, out);
  if (x->dtype.code == BFLOAT) launch<__nv_bfloat16>(ctx, x, bias, out);
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return SL_OK;
  snprintf(ctx->error, ctx->error_size, "%s", cudaGetErrorString(status));
  return SL_INTERNAL;
}
// --8<-- [end:dtypes]
