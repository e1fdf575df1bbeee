"""Kernels in CUDA C++ as strings, of the forms in which authors write them, and broken ones.

``shiplap audit`` is given this file: ``SOUND`` ops are proven, and each op of ``BROKEN`` fails for its cause.
"""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float16, Float32, Int8, Int32, Int64
from torch import Tensor

import shiplap as sl

HEAD = r"""
#include <cstdio>
static int status(const sl_context* ctx) {
  const cudaError_t e = cudaGetLastError();
  if (e == cudaSuccess) return SL_OK;
  snprintf(ctx->error, ctx->error_size, "%s", cudaGetErrorString(e));
  return SL_INTERNAL;
}
#define STREAM static_cast<cudaStream_t>(ctx->stream)
template <typename T> T* data(const DLTensor* t) { return static_cast<T*>(t->data); }
"""
SOUND: list[sl.Op] = []
BROKEN: dict[str, str] = {}  # op → the check whose finding comes first


def bind(op: sl.Op, code: str, broken: str = "", **options: Any) -> None:
    """Bind ``code`` as the CUDA kernel of ``op``, and list the op as sound, or as broken for a check."""
    compiler = {k: options.pop(k) for k in ("align", "strided", "architectures", "flags", "libraries") if k in options}
    name = op.spec.name.partition("::")[2]
    op.kernel("cuda", sl.source(symbol=name, code=HEAD + code, language="cuda", **compiler), **options)
    if broken:
        BROKEN[op.spec.name] = broken
    else:
        SOUND.append(op)


@sl.op("cuda_sources::softmax")
def softmax(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:
    """Softmax of rows, by shuffles in a warp."""
    return torch.softmax(x, 1)


bind(
    softmax,
    r"""
#include <cmath>
namespace {
template <typename Op> __device__ float reduced(float value, Op op) {
  for (int step = 16; step > 0; step /= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}
template <typename T> __global__ void rows(const T* __restrict__ x, T* __restrict__ out, int64_t n, int64_t c) {
  const int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  if (row >= n) return;
  x += row * c;
  out += row * c;
  float top = -INFINITY;
  bool nan = false;
  for (int64_t j = threadIdx.x; j < c; j += 32) { top = fmaxf(top, x[j]); nan = nan || isnan(x[j]); }
  top = __any_sync(0xffffffffu, nan) ? NAN : reduced(top, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0;
  for (int64_t j = threadIdx.x; j < c; j += 32) sum += expf(x[j] - top);
  sum = reduced(sum, [](float a, float b) { return a + b; });
  for (int64_t j = threadIdx.x; j < c; j += 32) out[j] = expf(x[j] - top) / sum;
}
}  // namespace
int softmax(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0];
  if (n == 0) return SL_OK;
  rows<float><<<static_cast<unsigned>((n + 3) / 4), dim3(32, 4), 0, STREAM>>>(data<float>(x), data<float>(out), n, x->shape[1]);
  return status(ctx);
}
""",
)


@sl.op("cuda_sources::transpose")
def transpose(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "m n"]:
    """The transposed matrix, by tiles in shared memory. The input may have any strides."""
    return x.t().contiguous()


bind(
    transpose,
    r"""
__global__ void tiles(const float* x, int64_t sn, int64_t sm, float* out, int64_t n, int64_t m) {
  __shared__ float tile[32][33];
  const int64_t i0 = int64_t{blockIdx.y} * 32, j0 = int64_t{blockIdx.x} * 32;
  for (int r = threadIdx.y; r < 32; r += 8)
    if (i0 + r < n && j0 + threadIdx.x < m) tile[r][threadIdx.x] = x[(i0 + r) * sn + (j0 + threadIdx.x) * sm];
  __syncthreads();
  for (int r = threadIdx.y; r < 32; r += 8)
    if (j0 + r < m && i0 + threadIdx.x < n) out[(j0 + r) * n + i0 + threadIdx.x] = tile[threadIdx.x][r];
}
int transpose(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0], m = x->shape[1];
  if (n == 0 || m == 0) return SL_OK;
  tiles<<<dim3((m + 31) / 32, (n + 31) / 32), dim3(32, 8), 0, STREAM>>>(data<float>(x), x->strides[0], x->strides[1],
                                                                        data<float>(out), n, m);
  return status(ctx);
}
""",
    strided=["x"],
)


@sl.op("cuda_sources::histogram", requires="bins >= 0")
def histogram(index: Int64[Tensor, "n"], bins: int = 7) -> Int64[Tensor, "bins"]:
    """How often each number occurs, by atomics. Numbers that are no bin are left out."""
    known = index[(index >= 0) & (index < bins)]
    return torch.bincount(known, minlength=bins)


bind(
    histogram,
    r"""
__global__ void count(const int64_t* index, unsigned long long* out, int64_t n, int64_t bins) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
    if (index[i] >= 0 && index[i] < bins) atomicAdd(out + index[i], 1ull);
}
int histogram(const sl_context* ctx, const DLTensor* index, DLTensor* out, int64_t bins) {
  if (bins == 0) return SL_OK;
  cudaMemsetAsync(out->data, 0, bins * sizeof(int64_t), STREAM);
  count<<<64, 256, 0, STREAM>>>(data<int64_t>(index), data<unsigned long long>(out), index->shape[0], bins);
  return status(ctx);
}
""",
)


@sl.op("cuda_sources::half_axpy")
def half_axpy(x: Float16[Tensor, "n"], y: Float16[Tensor, "n"], a: float = 2.0) -> Float16[Tensor, "n"]:
    """a * x + y, rounded once, in vectors of two halves and a tail."""
    return (a * x.float() + y.float()).half()


bind(
    half_axpy,
    r"""
#include <cuda_fp16.h>
__global__ void pairs(const __half* x, const __half* y, __half* out, int64_t n, float a) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (2 * i + 1 < n) {
    const float2 u = __half22float2(reinterpret_cast<const __half2*>(x)[i]);
    const float2 v = __half22float2(reinterpret_cast<const __half2*>(y)[i]);
    reinterpret_cast<__half2*>(out)[i] = __floats2half2_rn(a * u.x + v.x, a * u.y + v.y);
  } else if (2 * i < n) {
    out[2 * i] = __float2half(a * __half2float(x[2 * i]) + __half2float(y[2 * i]));
  }
}
int half_axpy(const sl_context* ctx, const DLTensor* x, const DLTensor* y, DLTensor* out, double a) {
  const int64_t n = x->shape[0];
  if (n == 0) return SL_OK;
  pairs<<<static_cast<unsigned>((n / 2 + 256) / 256), 256, 0, STREAM>>>(data<__half>(x), data<__half>(y), data<__half>(out), n,
                                                                static_cast<float>(a));
  return status(ctx);
}
""",
    align=4,
)


@sl.op("cuda_sources::centered")
def centered(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """x less its mean, by one launch whose blocks wait for each other (cooperative groups)."""
    return x - x.mean()


bind(
    centered,
    r"""
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
__global__ void center(const float* x, float* out, int64_t n, float* parts) {
  const cg::grid_group grid = cg::this_grid();
  const cg::thread_block block = cg::this_thread_block();
  const auto warp = cg::tiled_partition<32>(block);
  __shared__ float sums[8];
  float sum = 0;
  for (int64_t i = grid.thread_rank(); i < n; i += grid.size()) sum += x[i];
  sum = cg::reduce(warp, sum, cg::plus<float>());
  if (warp.thread_rank() == 0) sums[warp.meta_group_rank()] = sum;
  block.sync();
  if (block.thread_rank() == 0) {
    float total = 0;
    for (int w = 0; w < 8; ++w) total += sums[w];
    parts[blockIdx.x] = total;
  }
  grid.sync();
  float total = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) total += parts[b];
  const float mean = total / n;
  for (int64_t i = grid.thread_rank(); i < n; i += grid.size()) out[i] = x[i] - mean;
}
int centered(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  int64_t n = x->shape[0];
  if (n == 0) return SL_OK;
  const float* in = data<float>(x);
  float *to = data<float>(out), *parts = static_cast<float*>(ctx->workspace);
  void* args[] = {&in, &to, &n, &parts};
  cudaLaunchCooperativeKernel(reinterpret_cast<void*>(center), dim3(16), dim3(256), args, 0, STREAM);
  return status(ctx);
}
""",
    workspace="16*4",
)


@sl.op("cuda_sources::sorted_rows")
def sorted_rows(x: Int32[Tensor, "n"]) -> Int32[Tensor, "n"]:
    """The sorted numbers, by CUB's radix sort."""
    return x.sort().values


bind(
    sorted_rows,
    r"""
#include <cub/device/device_radix_sort.cuh>
int sorted_rows(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0];
  if (n == 0) return SL_OK;
  size_t size = 0;
  cudaError_t e = cub::DeviceRadixSort::SortKeys(nullptr, size, data<int>(x), data<int>(out), n, 0, 32, STREAM);
  if (e == cudaSuccess && size > ctx->workspace_size) {
    snprintf(ctx->error, ctx->error_size, "%zu bytes of workspace are too few: %zu", ctx->workspace_size, size);
    return SL_INTERNAL;
  }
  cub::DeviceRadixSort::SortKeys(ctx->workspace, size, data<int>(x), data<int>(out), n, 0, 32, STREAM);
  return status(ctx);
}
""",
    workspace="8*n+1048576",
)


@sl.op("cuda_sources::increase", mutates="x")
def increase(x: Float32[Tensor, "n c"], by: Float32[Tensor, "c"] | None = None, twice: bool = False) -> None:
    """Add a row, or one, to each row of x in place, once or twice."""
    x += (1.0 if by is None else by) * (2 if twice else 1)


bind(
    increase,
    r"""
__global__ void add(float* x, const float* by, int64_t n, int64_t c, float times) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < n * c) x[i] += (by ? by[i % c] : 1.0f) * times;
}
int increase(const sl_context* ctx, DLTensor* x, const DLTensor* by, int32_t twice) {
  const int64_t n = x->shape[0], c = x->shape[1];
  add<<<static_cast<unsigned>(n * c / 128 + 1), 128, 0, STREAM>>>(data<float>(x), by ? data<float>(by) : nullptr, n, c, twice ? 2 : 1);
  return status(ctx);
}
""",
)


@sl.op("cuda_sources::silu_grad")
def silu_grad(grad: Float32[Tensor, "n"], x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """The gradient of silu with respect to its argument."""
    s = torch.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


@sl.op("cuda_sources::silu")
def silu(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """x * sigmoid(x), with a gradient that is a kernel, too."""
    return torch.nn.functional.silu(x)


bind(
    silu_grad,
    r"""
__global__ void backward(const float* grad, const float* x, float* out, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= n) return;
  const float s = 1 / (1 + expf(-x[i]));
  out[i] = grad[i] * s * (1 + x[i] * (1 - s));
}
int silu_grad(const sl_context* ctx, const DLTensor* grad, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0];
  backward<<<static_cast<unsigned>(n / 256 + 1), 256, 0, STREAM>>>(data<float>(grad), data<float>(x), data<float>(out), n);
  return status(ctx);
}
""",
)
bind(
    silu,
    r"""
__global__ void forward(const float* x, float* out, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < n) out[i] = x[i] / (1 + expf(-x[i]));
}
int silu(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0];
  forward<<<static_cast<unsigned>(n / 256 + 1), 256, 0, STREAM>>>(data<float>(x), data<float>(out), n);
  return status(ctx);
}
""",
)


@silu.backward
def _(grad: Tensor, saved: Any, needs: Any) -> dict[str, Tensor]:
    return {"x": silu_grad(grad, saved.x)}


@sl.op("cuda_sources::blurred")
def blurred(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """A filter of five taps whose factors lie in constant memory, with a halo in shared memory."""
    taps = torch.tensor([0.0625, 0.25, 0.375, 0.25, 0.0625], dtype=x.dtype, device=x.device)
    padded = torch.nn.functional.pad(x, (2, 2))
    return (padded.unfold(0, 5, 1) * taps).sum(1) if x.numel() else x.clone()


bind(
    blurred,
    r"""
__constant__ const float TAPS[5] = {0.0625f, 0.25f, 0.375f, 0.25f, 0.0625f};
__global__ void blur(const float* x, float* out, int64_t n) {
  extern __shared__ float tile[];
  const int64_t first = int64_t{blockIdx.x} * blockDim.x - 2;
  for (int t = threadIdx.x; t < blockDim.x + 4; t += blockDim.x)
    tile[t] = first + t >= 0 && first + t < n ? x[first + t] : 0.0f;
  __syncthreads();
  const int64_t i = first + 2 + threadIdx.x;
  if (i >= n) return;
  float sum = 0;
#pragma unroll
  for (int t = 0; t < 5; ++t) asm("fma.rn.f32 %0, %1, %2, %0;" : "+f"(sum) : "f"(TAPS[t]), "f"(tile[threadIdx.x + t]));
  out[i] = sum;
}
int blurred(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0];
  if (n == 0) return SL_OK;
  blur<<<static_cast<unsigned>((n + 127) / 128), 128, 132 * sizeof(float), STREAM>>>(data<float>(x), data<float>(out), n);
  return status(ctx);
}
""",
)


@sl.op("cuda_sources::positive", bounds={"m": "n"})
def positive(x: Float32[Tensor, "n"]) -> Float32[Tensor, "m"]:
    """The positive numbers, in their order: a size that only the kernel knows."""
    return x[x > 0]


bind(
    positive,
    r"""
#include <cub/device/device_select.cuh>
struct Positive { __device__ bool operator()(float v) const { return v > 0; } };
int positive(const sl_context* ctx, const DLTensor* x, DLTensor* out, int64_t* m) {
  const int64_t n = x->shape[0];
  *m = 0;
  if (n == 0) return SL_OK;
  int64_t* count = static_cast<int64_t*>(ctx->workspace);
  char* scratch = static_cast<char*>(ctx->workspace) + 64;
  size_t size = 0;
  cudaError_t e = cub::DeviceSelect::If(nullptr, size, data<float>(x), data<float>(out), count, n, Positive(), STREAM);
  if (e == cudaSuccess && size + 64 > ctx->workspace_size) {
    snprintf(ctx->error, ctx->error_size, "%zu bytes of workspace are too few: %zu", ctx->workspace_size, size);
    return SL_INTERNAL;
  }
  cub::DeviceSelect::If(scratch, size, data<float>(x), data<float>(out), count, n, Positive(), STREAM);
  cudaMemcpyAsync(m, count, sizeof(int64_t), cudaMemcpyDeviceToHost, STREAM);
  cudaStreamSynchronize(STREAM);
  return status(ctx);
}
""",
    workspace="n+65536",
)


@sl.op("cuda_sources::dequantized")
def dequantized(x: Int8[Tensor, "n c"], scales: Float32[Tensor, "n"]) -> Float32[Tensor, "n c"]:
    """Rows of eight-bit integers times a scale for each row, with 64 KiB of shared memory a block."""
    return x.float() * scales[:, None]


bind(
    dequantized,
    r"""
__global__ void rows(const int8_t* x, const float* scales, float* out, int64_t n, int64_t c) {
  extern __shared__ float staged[];
  for (int64_t start = 0; start < c; start += 16384) {
    const int64_t count = c - start < 16384 ? c - start : 16384;
    for (int64_t j = threadIdx.x; j < count; j += blockDim.x) staged[j] = x[blockIdx.x * c + start + j];
    __syncthreads();
    for (int64_t j = threadIdx.x; j < count; j += blockDim.x)
      out[blockIdx.x * c + start + j] = staged[j] * scales[blockIdx.x];
    __syncthreads();
  }
}
int dequantized(const sl_context* ctx, const DLTensor* x, const DLTensor* scales, DLTensor* out) {
  const int64_t n = x->shape[0];
  if (n == 0) return SL_OK;
  // More shared memory than a launch gets without asking.
  cudaFuncSetAttribute(rows, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 * 1024);
  rows<<<static_cast<unsigned>(n), 64, 64 * 1024, STREAM>>>(data<int8_t>(x), data<float>(scales), data<float>(out), n, x->shape[1]);
  return status(ctx);
}
""",
)


@sl.op("cuda_sources::cluster_sum")
def cluster_sum(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n"]:
    """Sums of rows by two blocks that read each other's shared memory, which compute capability 9.0 has."""
    return x.sum(1)


bind(
    cluster_sum,
    r"""
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
__global__ void __cluster_dims__(2, 1, 1) sums(const float* x, float* out, int64_t c) {
#if __CUDA_ARCH__ >= 900
  __shared__ float part;
  const cg::cluster_group cluster = cg::this_cluster();
  const unsigned rank = cluster.block_rank();
  const float* row = x + blockIdx.x / 2 * c;
  float sum = 0;
  for (int64_t j = rank * 32 + threadIdx.x; j < c; j += 64) sum += row[j];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x == 0) part = sum;
  cluster.sync();
  if (rank == 0 && threadIdx.x == 0) out[blockIdx.x / 2] = part + *cluster.map_shared_rank(&part, 1);
  cluster.sync();
#endif
}
int cluster_sum(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  if (x->shape[0] == 0) return SL_OK;
  sums<<<static_cast<unsigned>(2 * x->shape[0]), 32, 0, STREAM>>>(data<float>(x), data<float>(out), x->shape[1]);
  return status(ctx);
}
""",
    architectures=["90a"],
)


def doubled(name: str) -> Callable[[Any], sl.Op]:
    """Return the decorator of an op that doubles a vector, for kernels that are wrong in some way."""
    return sl.op(f"cuda_sources::{name}")


DOUBLE = r"""
__global__ void twice(const float* x, float* out, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < n) out[i] = 2 * x[i];
}
"""


@doubled("tail")
def tail(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """Wrong: the last block is left out unless it is full."""
    return 2 * x


bind(
    tail,
    DOUBLE
    + r"""
int tail(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0];
  if (n >= 128) twice<<<static_cast<unsigned>(n / 128), 128, 0, STREAM>>>(data<float>(x), data<float>(out), n);
  return status(ctx);
}
""",
    broken="numerics",
)


@doubled("other_stream")
def other_stream(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """Wrong: it is launched on stream 0, whatever the current stream is."""
    return 2 * x


bind(
    other_stream,
    DOUBLE
    + r"""
int other_stream(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0];
  twice<<<static_cast<unsigned>(n / 128 + 1), 128>>>(data<float>(x), data<float>(out), n);
  return status(ctx);
}
""",
    broken="cuda_graph",
)


@doubled("device_buffer")
def device_buffer(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """Wrong: a static buffer on the device is shared by all calls."""
    return 2 * x


bind(
    device_buffer,
    r"""
__device__ float scratch[1 << 20];
__global__ void first(const float* x, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < n) scratch[i & ((1 << 20) - 1)] = 2 * x[i];
}
__global__ void second(float* out, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < n) out[i] = scratch[i & ((1 << 20) - 1)];
}
int device_buffer(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0];
  first<<<static_cast<unsigned>(n / 128 + 1), 128, 0, STREAM>>>(data<float>(x), n);
  second<<<static_cast<unsigned>(n / 128 + 1), 128, 0, STREAM>>>(data<float>(out), n);
  return status(ctx);
}
""",
    broken="stateless",
)


@doubled("beyond_the_end")
def beyond_the_end(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """Wrong: threads of the last block write behind the result."""
    return 2 * x


bind(
    beyond_the_end,
    DOUBLE.replace("if (i < n) ", "")
    + r"""
int beyond_the_end(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0];
  if (n == 0) return SL_OK;
  twice<<<static_cast<unsigned>((n + 31) / 32), 32, 0, STREAM>>>(data<float>(x), data<float>(out), n);
  return status(ctx);
}
""",
    broken="kernels",
)


@doubled("waits")
def waits(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """Wrong: it waits for the device, which no CUDA graph can capture."""
    return 2 * x


bind(
    waits,
    DOUBLE
    + r"""
int waits(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0];
  twice<<<static_cast<unsigned>(n / 128 + 1), 128, 0, STREAM>>>(data<float>(x), data<float>(out), n);
  cudaDeviceSynchronize();
  return status(ctx);
}
""",
    broken="cuda_graph",
)


@doubled("unset_workspace")
def unset_workspace(x: Float32[Tensor, "n"]) -> Float32[Tensor, "1"]:
    """Wrong: it adds to a workspace that it has not set to zero."""
    return x.sum().reshape(1)


bind(
    unset_workspace,
    r"""
__global__ void add(const float* x, int64_t n, float* sum) {
  for (int64_t i = threadIdx.x; i < n; i += 32) atomicAdd(sum, x[i]);
}
__global__ void copy(const float* sum, float* out) { *out = *sum; }
int unset_workspace(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  float* sum = static_cast<float*>(ctx->workspace);
  add<<<1, 32, 0, STREAM>>>(data<float>(x), x->shape[0], sum);
  copy<<<1, 1, 0, STREAM>>>(sum, data<float>(out));
  return status(ctx);
}
""",
    broken="workspace",
    workspace="4",
)
