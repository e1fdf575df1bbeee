"""What a training step of an op costs the host beside its work: the op forward, and its gradient by autograd.

The op multiplies two vectors, and one kernel computes both gradients. ``step_ns``: a call, and one backward through it.
``more_ns``: what one more op adds to a chain, forward and backward, without the fixed cost of a backward. The control
is an op with a ``torch::autograd::Function`` in C++, called as ``torch.ops.ns.op.default`` and as ``torch.ops.ns.op``.
On the CPU times are CPU time of the thread that works; on a GPU wall time, in rounds that never wait for the device.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
import shiplap_headers
from shiplap.kernels.native import attach

INCLUDE, TORCH = Path(shiplap_headers.__file__).parent / "include", Path(torch.__file__).parent
SIZE = {"cpu": 4, "cuda": 1024}
SHORT, LONG = 2, 18  # ops in a chain
Function = Callable[[Tensor, Tensor], Tensor]
V = Float32[Tensor, "n"]

KERNEL = """
#include "shiplap/abi.h"
#ifdef __CUDACC__
#define LOOP for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += n)
#define KERNEL __global__ static void
#define LAUNCH(name, ...) name<<<(n + 255) / 256, 256, 0, (cudaStream_t)stream>>>(__VA_ARGS__, n)
#else
#define LOOP for (int64_t i = 0; i < n; ++i)
#define KERNEL static void
#define LAUNCH(name, ...) name(__VA_ARGS__, n)
#endif
KERNEL forward(const float* x, const float* y, float* out, int64_t n) { LOOP out[i] = x[i] * y[i]; }
KERNEL backward(const float* g, const float* x, const float* y, float* gx, float* gy, int64_t n) {
  LOOP { gx[i] = g[i] * y[i]; gy[i] = g[i] * x[i]; }
}
extern "C" {
SL_EXPORT void mul_raw(const float* x, const float* y, float* out, int64_t n, void* stream) {
  LAUNCH(forward, x, y, out);
}
SL_EXPORT void mul_grad_raw(const float* g, const float* x, const float* y, float* gx, float* gy, int64_t n,
                            void* stream) {
  LAUNCH(backward, g, x, y, gx, gy);
}
SL_EXPORT int mul(const sl_context* ctx, const DLTensor* x, const DLTensor* y, DLTensor* out) {
  mul_raw((float*)x->data, (float*)y->data, (float*)out->data, x->shape[0], ctx->stream);
  return SL_OK;
}
SL_EXPORT int mul_grad(const sl_context* ctx, const DLTensor* g, const DLTensor* x, const DLTensor* y,
                       DLTensor* gx, DLTensor* gy) {
  mul_grad_raw((float*)g->data, (float*)x->data, (float*)y->data, (float*)gx->data, (float*)gy->data, x->shape[0],
               ctx->stream);
  return SL_OK;
}
}"""

HAND_WRITTEN = """
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#ifdef GPU
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#define GUARD(t)                                    \\
  const c10::cuda::CUDAGuard guard(t.device());     \\
  void* stream = c10::cuda::getCurrentCUDAStream().stream();
#define DEVICE CUDA
#else
#define GUARD(t) void* stream = nullptr;
#define DEVICE CPU
#endif
using at::Tensor;
extern "C" void mul_raw(const float*, const float*, float*, int64_t, void*);
extern "C" void mul_grad_raw(const float*, const float*, const float*, float*, float*, int64_t, void*);
void look(const Tensor& t, const Tensor& like) {
  TORCH_CHECK(t.dim() == 1 && t.sizes() == like.sizes(), "sizes disagree");
  TORCH_CHECK(t.scalar_type() == at::kFloat, "dtype not accepted");
  TORCH_CHECK(t.device() == like.device(), "devices disagree");
}
Tensor mul(const Tensor& x, const Tensor& y) {
  look(x, x);
  look(y, x);
  GUARD(x)
  const Tensor a = x.contiguous(), b = y.contiguous();
  Tensor out = at::empty_like(a);
  mul_raw(a.const_data_ptr<float>(), b.const_data_ptr<float>(), out.mutable_data_ptr<float>(), a.numel(), stream);
  return out;
}
std::tuple<Tensor, Tensor> mul_grad(const Tensor& g, const Tensor& x, const Tensor& y) {
  look(x, x);
  look(g, x);
  look(y, x);
  GUARD(x)
  const Tensor c = g.contiguous(), a = x.contiguous(), b = y.contiguous();
  Tensor gx = at::empty_like(a), gy = at::empty_like(b);
  mul_grad_raw(c.const_data_ptr<float>(), a.const_data_ptr<float>(), b.const_data_ptr<float>(),
               gx.mutable_data_ptr<float>(), gy.mutable_data_ptr<float>(), a.numel(), stream);
  return {gx, gy};
}
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
struct Mul : torch::autograd::Function<Mul> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& y) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const auto found = c10::Dispatcher::singleton().findSchemaOrThrow("bench_train_hand::mul", "");
    static const auto op = found.typed<decltype(mul)>();
    ctx->save_for_backward({x, y});
    return op.call(x, y);
  }
  static variable_list backward(AutogradContext* ctx, variable_list g) {
    const auto saved = ctx->get_saved_variables();
    auto [gx, gy] = mul_grad(g[0], saved[0], saved[1]);
    return {gx, gy};
  }
};
Tensor mul_autograd(const Tensor& x, const Tensor& y) { return Mul::apply(x, y); }
TORCH_LIBRARY(bench_train_hand, m) { m.def("mul(Tensor x, Tensor y) -> Tensor", {at::Tag::pt2_compliant_tag}); }
TORCH_LIBRARY_IMPL(bench_train_hand, DEVICE, m) { m.impl("mul", mul); }
TORCH_LIBRARY_IMPL(bench_train_hand, Autograd, m) { m.impl("mul", mul_autograd); }
"""


def _run(command: list[Any]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()[-800:]}")


def _kernel(folder: Path, name: str, nvcc: str) -> Path:
    """The kernels as a library of its own, so that a row has it to itself."""
    source, library = folder / f"{name}{'.cu' if nvcc else '.cpp'}", folder / f"lib{name}.so"
    source.write_text(KERNEL)
    flags = ["-Xcompiler", "-fPIC", "-arch=native"] if nvcc else ["-fPIC"]
    _run([nvcc or "c++", "-O2", "-shared", *flags, f"-I{INCLUDE}", "-o", library, source])
    return library


def _hand_written(folder: Path, nvcc: str) -> None:
    """A C++ op with its gradient, as PyTorch's tutorial writes it."""
    kernel, source, library = _kernel(folder, "train_hand_kernel", nvcc), folder / "train.cpp", folder / "train.so"
    source.write_text(HAND_WRITTEN)
    home = Path(nvcc).resolve().parents[1] if nvcc else None
    include = [f"-I{TORCH}/include", f"-I{TORCH}/include/torch/csrc/api/include"]
    include += [f"-I{home}/include", f"-I{home}/include/cccl", "-DGPU"] if home else []
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    link = [kernel, f"-Wl,-rpath,{folder}", f"-L{TORCH}/lib", "-ltorch_cpu", "-ltorch", "-lc10"]
    link += ["-lc10_cuda"] if nvcc else []
    _run(["c++", "-O2", "-std=c++20", "-shared", "-fPIC", abi, *include, "-o", library, source, *link])
    torch.ops.load_library(library)


def _declared(folder: Path, name: str, device: str, nvcc: str) -> sl.Op:
    """The declared op, whose gradient is a declared op, with native bindings of both."""
    library = _kernel(folder, f"train_{name}", nvcc)

    @sl.op(f"bench_train_{name}::mul")
    def mul(x: V, y: V) -> V:
        return x * y

    @sl.op(f"bench_train_{name}::mul_grad", outputs=("grad_x", "grad_y"))
    def mul_grad(grad: V, x: V, y: V) -> tuple[V, V]:
        return grad * y, grad * x

    mul.kernel(device, sl.cabi(library, "mul", without_signature=True))
    mul_grad.kernel(device, sl.cabi(library, "mul_grad", without_signature=True))
    mul.backward(mul_grad)
    mul.build()
    return mul


def _functions(folder: Path, device: str, nvcc: str) -> dict[str, Function]:
    """What is measured, by row."""
    with ThreadPoolExecutor(1) as pool:  # two compilers at a time
        by_hand = pool.submit(_hand_written, folder, nvcc)
        native = _declared(folder, "native", device, nvcc)
        by_hand.result()
    assert native.native is not None
    assert native.native.records, "C++ does not record the gradient"
    in_cpp, attach.record_in_cpp = attach.record_in_cpp, lambda op: None
    try:
        python = _declared(folder, "python", device, nvcc)
    finally:
        attach.record_in_cpp = in_cpp
    forward, backward = torch.ops.bench_train_python.mul.raw, torch.ops.bench_train_python.mul_grad.raw

    class Mul(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, y)
            return forward(x, y)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return backward(grad, *ctx.saved_tensors)

    return {
        "torch_library_cpp": torch.ops.bench_train_hand.mul.default,
        "torch_library_cpp_packet": torch.ops.bench_train_hand.mul,
        "shiplap_native": native,
        "shiplap_torch_ops": torch.ops.bench_train_native.mul,
        "shiplap_python_recorder": python,
        "autograd_function": Mul.apply,
    }


def _steps(function: Function, length: int, device: str) -> Callable[[], Any]:
    """``length`` calls in a row, and a backward through them."""
    x, y, grad = (torch.randn(SIZE[device], device=device) for _ in range(3))
    leaves = x.requires_grad_(), y.requires_grad_()

    def step() -> Any:
        out = x
        for _ in range(length):
            out = function(out, y)
        return torch.autograd.grad(out, leaves, grad)

    return step


def measure(folder: Path, device: str, rounds: int, nvcc: str = "") -> dict[str, Any]:
    """Return ns of a step and of one more op by row, and the ratios to the ops in C++ within a round."""
    functions = _functions(folder, device, nvcc)
    x, y = (torch.randn(SIZE[device], device=device, requires_grad=True) for _ in range(2))
    for name, function in functions.items():
        got = torch.autograd.grad(function(x, y), (x, y), torch.ones_like(x))
        assert torch.equal(got[0], y), name
        assert torch.equal(got[1], x), name
    clock = time.thread_time_ns if device == "cpu" else time.perf_counter_ns
    calls = {(name, length): _steps(f, length, device) for name, f in functions.items() for length in (1, SHORT, LONG)}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in range(rounds + 1):
        for key, call in calls.items():
            repeat = 200 // key[1]  # short enough that a GPU's queue has room
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            for _ in range(repeat):
                call()
            times[key].append((clock() - start) / repeat)
    step = {name: times[name, 1][1:] for name in functions}
    more = {
        name: [(b - a) / (LONG - SHORT) for a, b in zip(times[name, SHORT][1:], times[name, LONG][1:], strict=True)]
        for name in functions
    }
    pairs = {
        "native_vs_hand_written": ("shiplap_native", "torch_library_cpp"),
        "torch_ops_vs_hand_written": ("shiplap_torch_ops", "torch_library_cpp_packet"),
        "python_recorder_vs_hand_written": ("shiplap_python_recorder", "torch_library_cpp"),
        "autograd_function_vs_hand_written": ("autograd_function", "torch_library_cpp"),
        "control": ("torch_library_cpp_packet", "torch_library_cpp"),
    }
    tables = {"step_ns": step, "more_ns": more}
    ratios = {
        row: {
            kind: round(statistics.median(a / b for a, b in zip(table[one], table[other], strict=True)), 3)
            for kind, table in tables.items()
        }
        for row, (one, other) in pairs.items()
    }
    medians = {kind: {name: round(statistics.median(v), 1) for name, v in t.items()} for kind, t in tables.items()}
    return {**medians, "ratios": ratios, "rounds": rounds}


def lines_of(result: dict[str, Any]) -> list[str]:
    """Return the table of a measured result."""
    lines = [f"{'ns of a training step':34}{'one op':>12}{'one more':>12}"]
    lines += [f"{n:34}{v:12,.0f}{result['more_ns'][n]:12,.0f}" for n, v in result["step_ns"].items()]
    return [*lines, *(f"{n:34}{r['step_ns']:12.2f}{r['more_ns']:12.2f}" for n, r in result["ratios"].items())]


if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        torch.set_num_threads(1)
        print("\n".join(lines_of(measure(Path(made), "cpu", int(sys.argv[1]) if len(sys.argv) > 1 else 15))))
