// The launch of lookup_kernel.cu, which lookup.cpp calls.
#pragma once
#include <cstdint>
#include <cuda_runtime_api.h>

cudaError_t launch_lookup(const float* table, const int64_t* rows, float* out, int64_t count, int64_t entries,
                          int64_t columns, cudaStream_t stream);
