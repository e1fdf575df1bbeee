// Rows of a table, with zeros for a number that is no row.
#include "lookup.h"

__global__ void lookup_kernel(const float* table, const int64_t* rows, float* out, int64_t count, int64_t entries,
                              int64_t columns) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count * columns;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = rows[i / columns];
    out[i] = row >= 0 && row < entries ? table[row * columns + i % columns] : 0.0f;
  }
}

cudaError_t launch_lookup(const float* table, const int64_t* rows, float* out, int64_t count, int64_t entries,
                          int64_t columns, cudaStream_t stream) {
  lookup_kernel<<<256, 256, 0, stream>>>(table, rows, out, count, entries, columns);
  return cudaGetLastError();
}
