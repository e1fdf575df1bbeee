"""Candidates in CUDA C++ of the judge's benchmark, built by nvcc and called by ctypes or built with torch's headers."""

BY_NVCC = """
import ctypes, os, subprocess, tempfile
from torch.utils.cpp_extension import CUDA_HOME
KERNEL = r'''
#include <cuda_runtime.h>
%s
'''
def built():
    path = os.path.join(tempfile.mkdtemp(), "kernel")
    with open(path + ".cu", "w") as file:
        file.write(KERNEL)
    arch = "-arch=sm_%%d%%d" %% torch.cuda.get_device_capability()
    nvcc = os.path.join(CUDA_HOME or "/usr/local/cuda", "bin", "nvcc")
    command = [nvcc, "-O3", arch, "-shared", "-Xcompiler", "-fPIC", "-o", path + ".so", path + ".cu"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(path + ".so").launch
LAUNCH = built()
def pointer(t):
    return ctypes.c_void_p(t.data_ptr())
def stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
"""
SQUARED_RELU = """
__global__ void squared_relu(const float* x, float* out, long long n) {
  long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (at < n) { float v = x[at] > 0.f ? x[at] : 0.f; out[at] = v * v; }
}
extern "C" void launch(const float* x, float* out, long long n, cudaStream_t stream) {
  if (n) squared_relu<<<(n + 255) / 256, 256, 0, stream>>>(x, out, n);
}
"""
CALL_SQUARED = """
def candidate(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    LAUNCH(pointer(x), pointer(out), ctypes.c_longlong(x.numel()), stream())
    return out
"""
RMS_IN_CUDA = """
__global__ void norm(const float* x, const float* w, float* out, int cols) {
  __shared__ float sums[32];
  const float* row = x + (size_t)blockIdx.x * cols;
  float sum = 0.f;
  for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += row[i] * row[i];
  for (int step = 16; step; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.f;
  for (int i = 0; i < blockDim.x / 32; ++i) total += sums[i];
  float scale = rsqrtf(total / cols + 1e-6f);
  for (int i = threadIdx.x; i < cols; i += blockDim.x) out[(size_t)blockIdx.x * cols + i] = row[i] * scale * w[i];
}
extern "C" void launch(const float* x, const float* w, float* out, int rows, int cols, cudaStream_t stream) {
  if (rows && cols) norm<<<rows, 512, 0, stream>>>(x, w, out, cols);
}
"""
CALL_NORM = """
def candidate(x, w):
    x, w = x.contiguous(), w.contiguous()
    out = torch.empty_like(x)
    LAUNCH(pointer(x), pointer(w), pointer(out), x.shape[0], x.shape[1], stream())
    return out
"""
TURN_IN_CUDA = """
__global__ void turn(const float* x, float* out, int rows, int cols) {
  __shared__ float tile[32][33];
  int col = blockIdx.x * 32 + threadIdx.x, first = blockIdx.y * 32;
  for (int i = threadIdx.y; i < 32; i += 8)
    if (col < cols && first + i < rows) tile[i][threadIdx.x] = x[(size_t)(first + i) * cols + col];
  __syncthreads();
  int row = first + threadIdx.x;
  for (int i = threadIdx.y; i < 32; i += 8)
    if (row < rows && blockIdx.x * 32 + i < cols)
      out[(size_t)(blockIdx.x * 32 + i) * rows + row] = 2.f * tile[threadIdx.x][i] + 1.f;
}
extern "C" void launch(const float* x, float* out, int rows, int cols, cudaStream_t stream) {
  if (rows && cols) turn<<<dim3((cols + 31) / 32, (rows + 31) / 32), dim3(32, 8), 0, stream>>>(x, out, rows, cols);
}
"""
CALL_TURN = """
def candidate(x):
    x = x.contiguous()
    out = torch.empty(x.shape[1], x.shape[0], device=x.device)
    LAUNCH(pointer(x), pointer(out), x.shape[0], x.shape[1], stream())
    return out
"""
NORM_IN_CUDA = BY_NVCC % RMS_IN_CUDA + CALL_NORM
TURNED_IN_CUDA = BY_NVCC % TURN_IN_CUDA + CALL_TURN
SQUARED_IN_CUDA = BY_NVCC % SQUARED_RELU + CALL_SQUARED
SQUARED_INLINE = """
from torch.utils.cpp_extension import load_inline
KERNEL = '''
#include <torch/extension.h>
__global__ void squared_relu(const float* x, float* out, long long n) {
  long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (at < n) { float v = x[at] > 0.f ? x[at] : 0.f; out[at] = v * v; }
}
torch::Tensor forward(torch::Tensor x) {
  x = x.contiguous();
  auto out = torch::empty_like(x);
  long long n = x.numel();
  if (n) squared_relu<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), n);
  return out;
}
'''
HEAD = "torch::Tensor forward(torch::Tensor x);"
built = load_inline(name="squared", cpp_sources=HEAD, cuda_sources=KERNEL, functions=["forward"])
def candidate(x):
    return built.forward(x)
"""
