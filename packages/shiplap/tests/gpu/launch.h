// What the kernels of more_cuda_sources.py share.
#pragma once
#include <cstdio>
#include "shiplap/abi.h"

inline int launched(const sl_context* ctx) {
  const cudaError_t e = cudaGetLastError();
  if (e == cudaSuccess) return SL_OK;
  snprintf(ctx->error, ctx->error_size, "%s", cudaGetErrorString(e));
  return SL_INTERNAL;
}
inline cudaStream_t stream_of(const sl_context* ctx) { return static_cast<cudaStream_t>(ctx->stream); }
template <typename T> T* data(const DLTensor* t) { return static_cast<T*>(t->data); }
inline unsigned blocks(int64_t count, int64_t size) { return static_cast<unsigned>((count + size - 1) / size); }
