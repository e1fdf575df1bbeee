// a @ b in float16 on tensor cores, with sums in float32: one warp computes a tile of 16 x 16.
#include <cstdio>
#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;

constexpr int TILE = 16;

__device__ __half element(const __half* p, int64_t i, int64_t j, int64_t rows, int64_t columns) {
  return i < rows && j < columns ? p[i * columns + j] : __float2half(0.0f);
}

__global__ void half_matmul_kernel(const __half* a, const __half* b, __half* out, int64_t m, int64_t k, int64_t n) {
  __shared__ __half a_tile[TILE * TILE], b_tile[TILE * TILE];
  __shared__ float sums[TILE * TILE];
  const int64_t row = int64_t{blockIdx.y} * TILE, column = int64_t{blockIdx.x} * TILE;
  wmma::fragment<wmma::accumulator, TILE, TILE, TILE, float> total;
  wmma::fill_fragment(total, 0.0f);
  for (int64_t step = 0; step < k; step += TILE) {
    // A tile that reaches over the edge of the matrix is filled up with zeros.
    for (int e = threadIdx.x; e < TILE * TILE; e += warpSize) {
      a_tile[e] = element(a, row + e / TILE, step + e % TILE, m, k);
      b_tile[e] = element(b, step + e / TILE, column + e % TILE, k, n);
    }
    __syncwarp();
    wmma::fragment<wmma::matrix_a, TILE, TILE, TILE, __half, wmma::row_major> a_part;
    wmma::fragment<wmma::matrix_b, TILE, TILE, TILE, __half, wmma::row_major> b_part;
    wmma::load_matrix_sync(a_part, a_tile, TILE);
    wmma::load_matrix_sync(b_part, b_tile, TILE);
    wmma::mma_sync(total, a_part, b_part, total);
    __syncwarp();
  }
  wmma::store_matrix_sync(sums, total, TILE, wmma::mem_row_major);
  __syncwarp();
  for (int e = threadIdx.x; e < TILE * TILE; e += warpSize) {
    const int64_t i = row + e / TILE, j = column + e % TILE;
    if (i < m && j < n) out[i * n + j] = __float2half(sums[e]);
  }
}

int half_matmul(const sl_context* ctx, const DLTensor* a, const DLTensor* b, DLTensor* out) {
  const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[1];
  if (m == 0 || n == 0) return SL_OK;
  const dim3 blocks(static_cast<unsigned>((n + TILE - 1) / TILE), static_cast<unsigned>((m + TILE - 1) / TILE));
  half_matmul_kernel<<<blocks, 32, 0, static_cast<cudaStream_t>(ctx->stream)>>>(
      static_cast<const __half*>(a->data), static_cast<const __half*>(b->data), static_cast<__half*>(out->data), m, k,
      n);
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return SL_OK;
  snprintf(ctx->error, ctx->error_size, "%s", cudaGetErrorString(status));
  return SL_INTERNAL;
}
