"""Kernels in CUDA C++ of kinds that ``cuda_sources.py`` has not: each is declared, built and proven on a GPU.

``shiplap audit`` is given this file. The functions share a header, which ``include_dirs=`` finds beside it.
"""

# ruff: noqa: E501

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import BFloat16, Float16, Float32, Int8, Int32, Int64
from torch import Tensor

import shiplap as sl

SOUND: list[sl.Op] = []


def bind(op: sl.Op, code: str, dtypes: tuple[str, ...] = (), workspace: str = "", **options: Any) -> None:
    """Bind ``code``, which may use launch.h, as the CUDA kernel of ``op``. The other options are of ``sl.source``."""
    name = op.spec.name.partition("::")[2]
    made = sl.source(symbol=name, code='#include "launch.h"\n' + code, language="cuda", include_dirs=["."], **options)
    op.kernel("cuda", made, dtypes=dtypes, workspace=workspace)
    SOUND.append(op)


@sl.op("more_cuda::row_sums")
def row_sums(x: Int32[Tensor, "n c"]) -> Int32[Tensor, "n c"]:
    """Prefix sums of each row, by scans of cooperative groups. The input is read as four numbers at once."""
    return x.cumsum(1, dtype=torch.int32)


bind(
    row_sums,
    r"""
#include <cooperative_groups.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;
__global__ void scan(const int* x, int* out, int64_t c) {
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  x += blockIdx.x * c;
  out += blockIdx.x * c;
  int carry = 0;
  for (int64_t j = 0; j < c; j += 32) {
    const int64_t at = j + warp.thread_rank();
    const int sum = cg::inclusive_scan(warp, at < c ? x[at] : 0) + carry;
    if (at < c) out[at] = sum;
    carry = warp.shfl(sum, 31);
  }
}
int row_sums(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  if (x->shape[0] == 0) return SL_OK;
  scan<<<static_cast<unsigned>(x->shape[0]), 32, 0, stream_of(ctx)>>>(data<int>(x), data<int>(out), x->shape[1]);
  return launched(ctx);
}
""",
)


@sl.op("more_cuda::piped_matmul")
def piped_matmul(a: Float32[Tensor, "m k"], b: Float32[Tensor, "k n"]) -> Float32[Tensor, "m n"]:
    """a @ b. While one pair of tiles is multiplied, cp.async fetches the next pair."""
    return a @ b


bind(
    piped_matmul,
    r"""
#include <cuda_pipeline.h>
constexpr int T = 16;
__device__ void fetch(float* to, const float* from, bool inside) {
  if (inside) __pipeline_memcpy_async(to, from, sizeof(float));
  else *to = 0;
}
__global__ void multiply(const float* a, const float* b, float* out, int64_t m, int64_t k, int64_t n) {
  __shared__ float left[2][T][T], right[2][T][T];
  const int y = threadIdx.y, x = threadIdx.x;
  const int64_t i = int64_t{blockIdx.y} * T + y, j = int64_t{blockIdx.x} * T + x;
  const int64_t steps = (k + T - 1) / T;
  float sum = 0;
  for (int64_t step = 0; step <= steps; ++step) {
    if (step < steps) {
      const int64_t at = step * T;
      fetch(&left[step % 2][y][x], a + i * k + at + x, i < m && at + x < k);
      fetch(&right[step % 2][y][x], b + (at + y) * n + j, at + y < k && j < n);
    }
    __pipeline_commit();
    if (step > 0) {
      __pipeline_wait_prior(1);
      __syncthreads();
      for (int t = 0; t < T; ++t) sum += left[(step - 1) % 2][y][t] * right[(step - 1) % 2][t][x];
      __syncthreads();
    }
  }
  if (i < m && j < n) out[i * n + j] = sum;
}
int piped_matmul(const sl_context* ctx, const DLTensor* a, const DLTensor* b, DLTensor* out) {
  const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[1];
  if (m == 0 || n == 0) return SL_OK;
  multiply<<<dim3(blocks(n, T), blocks(m, T)), dim3(T, T), 0, stream_of(ctx)>>>(data<float>(a), data<float>(b), data<float>(out), m, k, n);
  return launched(ctx);
}
""",
)


@sl.op("more_cuda::add_at", requires="e >= 0")
def add_at(values: Int32[Tensor, "n"], at: Int64[Tensor, "n"], e: int = 5) -> Int32[Tensor, "e"]:
    """The sums of the values by place. Values of places that do not exist are left out. Atomics add integers."""
    known = (at >= 0) & (at < e)
    return values.new_zeros(e).index_add_(0, at[known], values[known])


bind(
    add_at,
    r"""
__global__ void add(const int* values, const int64_t* at, int* out, int64_t n, int64_t e) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < n && at[i] >= 0 && at[i] < e) atomicAdd(out + at[i], values[i]);
}
int add_at(const sl_context* ctx, const DLTensor* values, const DLTensor* at, DLTensor* out, int64_t e) {
  const int64_t n = values->shape[0];
  if (e) cudaMemsetAsync(out->data, 0, e * sizeof(int), stream_of(ctx));
  if (n) add<<<blocks(n, 256), 256, 0, stream_of(ctx)>>>(data<int>(values), data<int64_t>(at), data<int>(out), n, e);
  return launched(ctx);
}
""",
)


@sl.op("more_cuda::vendor_matmul")
def vendor_matmul(a: Float32[Tensor, "m k"], b: Float32[Tensor, "k n"]) -> Float32[Tensor, "m n"]:
    """a @ b, by cuBLASLt, which works in the scratch memory that it is given."""
    return a @ b


bind(
    vendor_matmul,
    r"""
#include <atomic>
#include <cublasLt.h>
// One for each device, made at the first call and kept. A handle that a call frees ends a capture of that call.
extern "C" __attribute__((visibility("hidden"))) std::atomic<cublasLtHandle_t> kept_handles[64];
std::atomic<cublasLtHandle_t> kept_handles[64];
extern "C" __attribute__((visibility("default"))) const char shiplap_keeps[];
const char shiplap_keeps[] = "kept_handles: one of cuBLASLt for each device, made once and never changed";
cublasLtHandle_t handle_of_device() {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return nullptr;
  cublasLtHandle_t found = kept_handles[device].load(), before = nullptr;
  if (found != nullptr || cublasLtCreate(&found) != CUBLAS_STATUS_SUCCESS) return found;
  if (kept_handles[device].compare_exchange_strong(before, found)) return found;
  cublasLtDestroy(found);
  return before;
}
int vendor_matmul(const sl_context* ctx, const DLTensor* a, const DLTensor* b, DLTensor* out) {
  const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[1];
  if (m == 0 || n == 0) return SL_OK;
  if (k == 0) { cudaMemsetAsync(out->data, 0, m * n * sizeof(float), stream_of(ctx)); return launched(ctx); }
  cublasLtHandle_t handle = handle_of_device();
  cublasLtMatmulDesc_t what;
  cublasLtMatrixLayout_t left, right, to;
  cublasLtMatmulPreference_t preference;
  if (handle == nullptr) { snprintf(ctx->error, ctx->error_size, "no handle of cuBLASLt"); return SL_INTERNAL; }
  cublasLtMatmulDescCreate(&what, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  // Rows of ours are columns of theirs: out' = b' a'.
  cublasLtMatrixLayoutCreate(&left, CUDA_R_32F, n, k, n);
  cublasLtMatrixLayoutCreate(&right, CUDA_R_32F, k, m, k);
  cublasLtMatrixLayoutCreate(&to, CUDA_R_32F, n, m, n);
  cublasLtMatmulPreferenceCreate(&preference);
  const size_t size = ctx->workspace_size;
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &size, sizeof size);
  const uint32_t aligned = 16;  // as align= below says; without it, cuBLASLt expects 256
  for (auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                     CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    cublasLtMatmulPreferenceSetAttribute(preference, which, &aligned, sizeof aligned);
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  cublasStatus_t s = cublasLtMatmulAlgoGetHeuristic(handle, what, left, right, to, to, preference, 1, &found, &count);
  const float one = 1, zero = 0;
  if (s == CUBLAS_STATUS_SUCCESS && count)
    s = cublasLtMatmul(handle, what, &one, data<float>(b), left, data<float>(a), right, &zero, data<float>(out), to,
                       data<float>(out), to, &found.algo, ctx->workspace, size, stream_of(ctx));
  cublasLtMatmulPreferenceDestroy(preference);
  cublasLtMatrixLayoutDestroy(left);
  cublasLtMatrixLayoutDestroy(right);
  cublasLtMatrixLayoutDestroy(to);
  cublasLtMatmulDescDestroy(what);
  if (s != CUBLAS_STATUS_SUCCESS || !count) { snprintf(ctx->error, ctx->error_size, "cublasLt: %d", s); return SL_INTERNAL; }
  return launched(ctx);
}
""",
    workspace="4194304",
    libraries=["cublasLt"],
    align=16,
)


def philox(seed: int, count: int, device: torch.device) -> Tensor:
    """Return ``count`` numbers of Philox 4x32-10 for the counters from 0, as int64. Torch has no unsigned products."""
    c = torch.zeros(4, -(-count // 4), dtype=torch.int64, device=device)
    c[0] = torch.arange(c.shape[1], device=device)
    low = (1 << 32) - 1
    keys = [seed & low, seed >> 32 & low]
    for _ in range(10):
        parts = []
        for m, x in ((0xD2511F53, c[0]), (0xCD9E8D57, c[2])):
            # m * x in 64 bits, by halves of x, so that no product is wider than 48 bits.
            lower, upper = m * (x & 0xFFFF), m * (x >> 16)
            mid = upper + (lower >> 16)
            parts += [mid >> 16, (mid & 0xFFFF) << 16 | lower & 0xFFFF]
        hi0, lo0, hi1, lo1 = parts
        c = torch.stack([hi1 ^ c[1] ^ keys[0], lo1, hi0 ^ c[3] ^ keys[1], lo0])
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return c.t().reshape(-1)[:count]


@sl.op("more_cuda::seeded_bits", requires="seed >= 0")
def seeded_bits(x: Int32[Tensor, "n"], seed: int = 7) -> Int32[Tensor, "n"]:
    """x xor random bits of cuRAND, which depend on the seed and the place alone."""
    return x ^ philox(seed, x.numel(), x.device).to(torch.int32)


bind(
    seeded_bits,
    r"""
#include <curand_kernel.h>
__global__ void flip(const int* x, int* out, int64_t n, unsigned long long seed) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (4 * i >= n) return;
  curandStatePhilox4_32_10_t state;
  curand_init(seed, 0, 4 * i, &state);
  const uint4 bits = curand4(&state);
  const unsigned four[4] = {bits.x, bits.y, bits.z, bits.w};
  for (int t = 0; t < 4; ++t) if (4 * i + t < n) out[4 * i + t] = x[4 * i + t] ^ static_cast<int>(four[t]);
}
int seeded_bits(const sl_context* ctx, const DLTensor* x, DLTensor* out, int64_t seed) {
  const int64_t n = x->shape[0];
  if (n) flip<<<blocks((n + 3) / 4, 128), 128, 0, stream_of(ctx)>>>(data<int>(x), data<int>(out), n, seed);
  return launched(ctx);
}
""",
)


@sl.op("more_cuda::edges", requires=("h > 0", "w > 0"))
def edges(x: Float32[Tensor, "h w"]) -> Float32[Tensor, "h w"]:
    """The size of the gradient of an image, by two stencils from constant memory. The rim is repeated."""
    (h, w), taps = x.shape, ((-1, -2, -1), (0, 0, 0), (1, 2, 1))
    padded = torch.nn.functional.pad(x[None], (1, 1, 1, 1), mode="replicate")[0]
    windows = [[padded[i : i + h, j : j + w] for j in range(3)] for i in range(3)]
    down = sum(taps[i][j] * windows[i][j] for i in range(3) for j in range(3))
    right = sum(taps[j][i] * windows[i][j] for i in range(3) for j in range(3))
    return (down * down + right * right).sqrt()


bind(
    edges,
    r"""
__constant__ const float ROWS[9] = {-1, -2, -1, 0, 0, 0, 1, 2, 1};
__global__ void sobel(const float* x, float* out, int64_t h, int64_t w) {
  __shared__ float tile[10][34];
  const int64_t i0 = int64_t{blockIdx.y} * 8, j0 = int64_t{blockIdx.x} * 32;
  for (int t = threadIdx.y * 32 + threadIdx.x; t < 340; t += 256) {
    const int64_t i = min(max(i0 + t / 34 - 1, int64_t{0}), h - 1), j = min(max(j0 + t % 34 - 1, int64_t{0}), w - 1);
    tile[t / 34][t % 34] = __ldg(x + i * w + j);
  }
  __syncthreads();
  if (i0 + threadIdx.y >= h || j0 + threadIdx.x >= w) return;
  float down = 0, right = 0;
#pragma unroll
  for (int t = 0; t < 9; ++t) {
    const float value = tile[threadIdx.y + t / 3][threadIdx.x + t % 3];
    down += ROWS[t] * value;
    right += ROWS[t % 3 * 3 + t / 3] * value;
  }
  out[(i0 + threadIdx.y) * w + j0 + threadIdx.x] = isnan(down) || isnan(right) ? NAN : hypotf(down, right);
}
int edges(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t h = x->shape[0], w = x->shape[1];
  sobel<<<dim3(blocks(w, 32), blocks(h, 8)), dim3(32, 8), 0, stream_of(ctx)>>>(data<float>(x), data<float>(out), h, w);
  return launched(ctx);
}
""",
)


# No float64: the kernels compute in float32.
Rows = Float16[Tensor, "n c"] | BFloat16[Tensor, "n c"] | Float32[Tensor, "n c"]
Columns = Float16[Tensor, "c"] | BFloat16[Tensor, "c"] | Float32[Tensor, "c"]


@sl.op("more_cuda::scaled_rows_grad")
def scaled_rows_grad(grad: Rows, x: Rows, weight: Columns, rates: Float32[Tensor, "n"]) -> tuple[Rows, Columns]:
    """The gradients of ``scaled_rows`` with respect to x and weight."""
    g, v = (grad * weight).float(), x.float()
    rate = rates[:, None]
    inner = (g * v).sum(1, keepdim=True) / max(x.shape[1], 1)
    return (rate * g - v * rate**3 * inner).to(x.dtype), (grad.float() * v * rate).sum(0).to(x.dtype)


@sl.op("more_cuda::scaled_rows", nondifferentiable=("rates",), outputs=("out", "rates"))
def scaled_rows(x: Rows, weight: Columns, eps: float = 1e-5) -> tuple[Rows, Float32[Tensor, "n"]]:
    """RMS norm of rows, and the factor of each row. One template serves three dtypes."""
    rates = torch.rsqrt(x.float().square().mean(1) + eps) if x.shape[1] else x.new_zeros(x.shape[0]).float()
    return (x.float() * rates[:, None]).to(x.dtype) * weight, rates


@scaled_rows.backward
def _(grads: Any, saved: Any, needs: Any) -> dict[str, Tensor]:
    dx, dw = scaled_rows_grad(grads[0], saved.x, saved.weight, saved.rates)
    return {"x": dx, "weight": dw}


DISPATCH = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "shiplap/dtypes.h"
__device__ float wide(float v) { return v; }
__device__ float wide(__half v) { return __half2float(v); }
__device__ float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
template <typename T> __device__ T narrow(float v) { return static_cast<T>(v); }
template <typename Call> int with_dtype(const DLTensor* x, const sl_context* ctx, Call call) {
  if (x->dtype.code == 2 && x->dtype.bits == 32) return call(float{});
  if (x->dtype.code == 2 && x->dtype.bits == 16) return call(__half{});
  if (x->dtype.code == 4 && x->dtype.bits == 16) return call(__nv_bfloat16{});
  snprintf(ctx->error, ctx->error_size, "no kernel for this dtype");
  return SL_UNSUPPORTED;
}
"""
bind(
    scaled_rows,
    DISPATCH
    + r"""
template <typename T> __global__ void norm(const T* x, const T* weight, T* out, float* rates, int64_t c, float eps) {
  extern __shared__ float parts[];
  x += blockIdx.x * c;
  out += blockIdx.x * c;
  float sum = 0;
  for (int64_t j = threadIdx.x; j < c; j += blockDim.x) sum += wide(x[j]) * wide(x[j]);
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  const float rate = c ? rsqrtf(parts[0] / c + eps) : 0.0f;
  if (threadIdx.x == 0) rates[blockIdx.x] = rate;
  for (int64_t j = threadIdx.x; j < c; j += blockDim.x)
    out[j] = narrow<T>(wide(narrow<T>(wide(x[j]) * rate)) * wide(weight[j]));
}
int scaled_rows(const sl_context* ctx, const DLTensor* x, const DLTensor* weight, DLTensor* out, DLTensor* rates, double eps) {
  if (x->shape[0] == 0) return SL_OK;
  return with_dtype(x, ctx, [&](auto zero) {
    using T = decltype(zero);
    norm<T><<<static_cast<unsigned>(x->shape[0]), 128, 128 * sizeof(float), stream_of(ctx)>>>(
        data<T>(x), data<T>(weight), data<T>(out), data<float>(rates), x->shape[1], static_cast<float>(eps));
    return launched(ctx);
  });
}
""",
    dtypes=("float32", "float16", "bfloat16"),
    flags=["--extended-lambda"],
)
bind(
    scaled_rows_grad,
    DISPATCH
    + r"""
template <typename T> __global__ void rows(const T* grad, const T* x, const T* weight, const float* rates, T* dx, int64_t c) {
  __shared__ float parts[4];
  const int64_t at = blockIdx.x * c;
  float sum = 0;
  for (int64_t j = threadIdx.x; j < c; j += 128) sum += wide(narrow<T>(wide(grad[at + j]) * wide(weight[j]))) * wide(x[at + j]);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  const float inner = (parts[0] + parts[1] + parts[2] + parts[3]) / (c ? c : 1), rate = rates[blockIdx.x];
  for (int64_t j = threadIdx.x; j < c; j += 128) {
    const float g = wide(narrow<T>(wide(grad[at + j]) * wide(weight[j])));
    dx[at + j] = narrow<T>(rate * g - wide(x[at + j]) * (rate * rate * rate) * inner);
  }
}
// Sums over rows in a fixed order: 64 parts in the workspace, then one sum of them.
template <typename T> __global__ void columns(const T* grad, const T* x, const float* rates, float* parts, int64_t n, int64_t c) {
  const int64_t j = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (j >= c) return;
  float sum = 0;
  for (int64_t i = blockIdx.y; i < n; i += gridDim.y) sum += wide(grad[i * c + j]) * wide(x[i * c + j]) * rates[i];
  parts[blockIdx.y * c + j] = sum;
}
template <typename T> __global__ void total(const float* parts, T* dw, int64_t c) {
  const int64_t j = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (j >= c) return;
  float sum = 0;
  for (int p = 0; p < 64; ++p) sum += parts[p * c + j];
  dw[j] = narrow<T>(sum);
}
int scaled_rows_grad(const sl_context* ctx, const DLTensor* grad, const DLTensor* x, const DLTensor* weight,
                     const DLTensor* rates, DLTensor* dx, DLTensor* dw) {
  const int64_t n = x->shape[0], c = x->shape[1];
  if (c == 0) return SL_OK;
  return with_dtype(x, ctx, [&](auto zero) {
    using T = decltype(zero);
    float* parts = static_cast<float*>(ctx->workspace);
    if (n) rows<T><<<static_cast<unsigned>(n), 128, 0, stream_of(ctx)>>>(data<T>(grad), data<T>(x), data<T>(weight), data<float>(rates), data<T>(dx), c);
    columns<T><<<dim3(blocks(c, 64), 64), 64, 0, stream_of(ctx)>>>(data<T>(grad), data<T>(x), data<float>(rates), parts, n, c);
    total<T><<<blocks(c, 64), 64, 0, stream_of(ctx)>>>(parts, data<T>(dw), c);
    return launched(ctx);
  });
}
""",
    dtypes=("float32", "float16", "bfloat16"),
    workspace="64*4*c",
    flags=["--extended-lambda"],
)


@sl.op("more_cuda::both_ends")
def both_ends(x: Float32[Tensor, "n"]) -> tuple[Float32[Tensor, "n"], Float32[Tensor, "n"]]:
    """exp(x) and exp(-x), on two streams that an event joins."""
    return torch.exp(x), torch.exp(-x)


bind(
    both_ends,
    r"""
__global__ void exponents(const float* x, float* out, int64_t n, float sign) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < n) out[i] = expf(sign * x[i]);
}
int both_ends(const sl_context* ctx, const DLTensor* x, DLTensor* up, DLTensor* down) {
  const int64_t n = x->shape[0];
  if (n == 0) return SL_OK;
  cudaStream_t side;
  cudaEvent_t begun, done;
  cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
  cudaEventCreateWithFlags(&begun, cudaEventDisableTiming);
  cudaEventCreateWithFlags(&done, cudaEventDisableTiming);
  cudaEventRecord(begun, stream_of(ctx));
  cudaStreamWaitEvent(side, begun, 0);
  exponents<<<blocks(n, 256), 256, 0, side>>>(data<float>(x), data<float>(down), n, -1.0f);
  exponents<<<blocks(n, 256), 256, 0, stream_of(ctx)>>>(data<float>(x), data<float>(up), n, 1.0f);
  cudaEventRecord(done, side);
  cudaStreamWaitEvent(stream_of(ctx), done, 0);
  cudaEventDestroy(begun);
  cudaEventDestroy(done);
  cudaStreamDestroy(side);
  return launched(ctx);
}
""",
)


@sl.op("more_cuda::adam_step", mutates=("p", "m", "v"))
def adam_step(
    p: Float32[Tensor, "n"], m: Float32[Tensor, "n"], v: Float32[Tensor, "n"], grad: Float32[Tensor, "n"],
    rate: float = 1e-2, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-4,
) -> None:  # fmt: skip
    """One step of Adam without corrections, in place. Squares that are below zero count as zero."""
    m.mul_(b1).add_((1 - b1) * grad)
    v.mul_(b2).add_((1 - b2) * grad * grad)
    p.sub_(rate * m / (v.clamp_min(0).sqrt() + eps))


@adam_step.samples
def _(rng: torch.Generator, sizes: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    p, m, v, grad = torch.randn(4, sizes["n"], generator=rng).to(device)
    decay, eps = sizes.get("b2", 0.99), sizes.get("eps", 1e-4)  # the root has to stay away from zero
    scalars = sizes.get("rate", 1e-2), sizes.get("b1", 0.9), decay if 0 <= decay <= 1 else 0.99, max(eps, 1e-4)
    return p.clone(), m.clone(), v.abs(), grad.clone(), *scalars


bind(
    adam_step,
    r"""
__global__ void step(float* p, float* m, float* v, const float* grad, int64_t n, float rate, float b1, float rest1, float b2,
                     float rest2, float eps) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= n) return;
  const float g = grad[i], first = m[i] * b1 + rest1 * g, second = v[i] * b2 + rest2 * g * g;
  m[i] = first;
  v[i] = second;
  p[i] -= rate * first / (sqrtf(second < 0 ? 0 : second) + eps);
}
int adam_step(const sl_context* ctx, DLTensor* p, DLTensor* m, DLTensor* v, const DLTensor* grad, double rate, double b1,
              double b2, double eps) {
  const int64_t n = p->shape[0];
  if (n)
    step<<<blocks(n, 128), 128, 0, stream_of(ctx)>>>(data<float>(p), data<float>(m), data<float>(v), data<float>(grad), n,
                                                     rate, b1, 1 - b1, b2, 1 - b2, eps);
  return launched(ctx);
}
""",
)


@sl.op("more_cuda::int8_matmul", requires="k % 4 == 0")
def int8_matmul(a: Int8[Tensor, "m k"], b: Int8[Tensor, "n k"]) -> Int32[Tensor, "m n"]:
    """a @ b.T in integers, four products at once by dp4a."""
    return (a.double() @ b.double().t()).to(torch.int32)


bind(
    int8_matmul,
    r"""
__global__ void products(const int* a, const int* b, int* out, int64_t m, int64_t n, int64_t words) {
  const int64_t j = blockIdx.x * int64_t{blockDim.x} + threadIdx.x, i = blockIdx.y * int64_t{blockDim.y} + threadIdx.y;
  if (i >= m || j >= n) return;
  int sum = 0;
  for (int64_t w = 0; w < words; ++w) sum = __dp4a(a[i * words + w], b[j * words + w], sum);
  out[i * n + j] = sum;
}
int int8_matmul(const sl_context* ctx, const DLTensor* a, const DLTensor* b, DLTensor* out) {
  const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[0];
  if (m && n) products<<<dim3(blocks(n, 32), blocks(m, 8)), dim3(32, 8), 0, stream_of(ctx)>>>(data<int>(a), data<int>(b), data<int>(out), m, n, k / 4);
  return launched(ctx);
}
""",
    align=4,
)


@sl.op("more_cuda::gated")
def gated(x: BFloat16[Tensor, "n"], gate: BFloat16[Tensor, "n"]) -> BFloat16[Tensor, "n"]:
    """x where the gate is above zero, otherwise 0, in vectors of eight bfloat16 and a tail."""
    return torch.where(gate > 0, x, torch.zeros_like(x))


bind(
    gated,
    r"""
#include <cuda_bf16.h>
__global__ void choose(const __nv_bfloat16* x, const __nv_bfloat16* gate, __nv_bfloat16* out, int64_t n) {
  const int64_t i = 8 * (blockIdx.x * int64_t{blockDim.x} + threadIdx.x);
  if (i + 8 <= n) {
    uint4 a = *reinterpret_cast<const uint4*>(x + i), b = *reinterpret_cast<const uint4*>(gate + i);
    auto* values = reinterpret_cast<__nv_bfloat16*>(&a);
    const auto* gates = reinterpret_cast<const __nv_bfloat16*>(&b);
#pragma unroll
    for (int t = 0; t < 8; ++t) if (!(__bfloat162float(gates[t]) > 0)) values[t] = __float2bfloat16(0);
    *reinterpret_cast<uint4*>(out + i) = a;
  } else {
    for (int64_t j = i; j < n; ++j) out[j] = __bfloat162float(gate[j]) > 0 ? x[j] : __float2bfloat16(0);
  }
}
int gated(const sl_context* ctx, const DLTensor* x, const DLTensor* gate, DLTensor* out) {
  const int64_t n = x->shape[0];
  if (n) choose<<<blocks(n, 8 * 128), 128, 0, stream_of(ctx)>>>(data<__nv_bfloat16>(x), data<__nv_bfloat16>(gate), data<__nv_bfloat16>(out), n);
  return launched(ctx);
}
""",
    align=16,
)


@sl.op("more_cuda::bag_sums", requires="e >= 1")
def bag_sums(x: Float32[Tensor, "n c"], offsets: Int64[Tensor, "e"]) -> Float32[Tensor, "e-1 c"]:
    """The sums of bags of rows. Bag b has the rows from offsets[b] to offsets[b + 1]; other rows do not exist."""
    ends = offsets.clamp(0, x.shape[0]).tolist()
    sums = [x[a:b].sum(0) for a, b in pairwise(ends)]
    return torch.stack(sums) if sums else x.new_zeros(0, x.shape[1])


@bag_sums.samples
def _(rng: torch.Generator, sizes: Any, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    n, e = sizes["n"], max(sizes["e"], 1)
    offsets = torch.randint(0, n + 1, (e,), generator=rng).sort().values
    return torch.randn(n, sizes["c"], generator=rng).to(device), offsets.to(device)


bind(
    bag_sums,
    r"""
__global__ void sums(const float* x, const int64_t* offsets, float* out, int64_t n, int64_t c) {
  const int64_t from = max(offsets[blockIdx.x], int64_t{0}), to = min(offsets[blockIdx.x + 1], n);
  for (int64_t j = threadIdx.x; j < c; j += blockDim.x) {
    float sum = 0;
    for (int64_t i = from; i < to; ++i) sum += x[i * c + j];
    out[blockIdx.x * c + j] = sum;
  }
}
int bag_sums(const sl_context* ctx, const DLTensor* x, const DLTensor* offsets, DLTensor* out) {
  const int64_t bags = out->shape[0];
  if (bags) sums<<<static_cast<unsigned>(bags), 64, 0, stream_of(ctx)>>>(data<float>(x), data<int64_t>(offsets), data<float>(out), x->shape[0], x->shape[1]);
  return launched(ctx);
}
""",
)


@sl.op("more_cuda::largest_two", requires="c >= 2", outputs=("values", "places"))
def largest_two(x: Int32[Tensor, "n c"]) -> tuple[Int32[Tensor, "n 2"], Int64[Tensor, "n 2"]]:
    """The two largest numbers of each row and their columns. Of equal numbers the first column counts."""
    values, places = x.sort(dim=1, descending=True, stable=True)
    return values[:, :2].contiguous(), places[:, :2].contiguous()


bind(
    largest_two,
    r"""
struct Best { int value[2]; int64_t place[2]; };
__device__ bool before(int a, int64_t i, int b, int64_t j) { return a > b || (a == b && i < j); }
__device__ void offer(Best& best, int value, int64_t place) {
  if (place < 0) return;
  if (best.place[0] < 0 || before(value, place, best.value[0], best.place[0])) {
    best.value[1] = best.value[0]; best.place[1] = best.place[0];
    best.value[0] = value; best.place[0] = place;
  } else if (best.place[1] < 0 || before(value, place, best.value[1], best.place[1])) {
    best.value[1] = value; best.place[1] = place;
  }
}
// A queue of rows: each warp takes the next one, until none is left.
__global__ void search(const int* x, int* values, int64_t* places, int64_t n, int64_t c, unsigned long long* next) {
  const int lane = threadIdx.x % 32;
  while (true) {
    unsigned long long row = lane == 0 ? atomicAdd(next, 1ull) : 0;
    row = __shfl_sync(0xffffffffu, row, 0);
    if (row >= n) return;
    Best best{{0, 0}, {-1, -1}};
    for (int64_t j = lane; j < c; j += 32) offer(best, x[row * c + j], j);
    for (int step = 16; step > 0; step /= 2) {
      const Best mine = best;
      for (int t = 0; t < 2; ++t)
        offer(best, __shfl_xor_sync(0xffffffffu, mine.value[t], step), __shfl_xor_sync(0xffffffffu, mine.place[t], step));
    }
    if (lane < 2) { values[2 * row + lane] = best.value[lane]; places[2 * row + lane] = best.place[lane]; }
  }
}
int largest_two(const sl_context* ctx, const DLTensor* x, DLTensor* values, DLTensor* places) {
  if (x->shape[0] == 0) return SL_OK;
  auto* next = static_cast<unsigned long long*>(ctx->workspace);
  cudaMemsetAsync(next, 0, sizeof *next, stream_of(ctx));
  search<<<16, 128, 0, stream_of(ctx)>>>(data<int>(x), data<int>(values), data<int64_t>(places), x->shape[0], x->shape[1], next);
  return launched(ctx);
}
""",
    workspace="8",
)


@sl.op("more_cuda::reversed_rows")
def reversed_rows(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:
    """Each row from its end, through memory that the call allocates and frees in the order of the stream."""
    return x.flip(1)


bind(
    reversed_rows,
    r"""
__global__ void turn(const float* x, float* out, int64_t n, int64_t c) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < n * c) out[i / c * c + c - 1 - i % c] = x[i];
}
int reversed_rows(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  const int64_t n = x->shape[0], c = x->shape[1], size = n * c * sizeof(float);
  if (size == 0) return SL_OK;
  void* turned = nullptr;
  if (cudaMallocAsync(&turned, size, stream_of(ctx)) != cudaSuccess) return launched(ctx);
  turn<<<blocks(n * c, 256), 256, 0, stream_of(ctx)>>>(data<float>(x), static_cast<float*>(turned), n, c);
  cudaMemcpyAsync(out->data, turned, size, cudaMemcpyDeviceToDevice, stream_of(ctx));
  cudaFreeAsync(turned, stream_of(ctx));
  return launched(ctx);
}
""",
)
