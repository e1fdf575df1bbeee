"""What one call of an op costs the host beside its work on a GPU, as text or with ``--json`` as JSON.

Every row adds two vectors of 1024 floats with one kernel launch and returns a new tensor: a Triton kernel, then a CUDA
kernel behind a C function (needs nvcc). ``eager_ns`` and ``inference_ns``: median ns per call on the host.
``compiled_ns`` and ``cpp_wrapper_ns``: what one more op adds to a chain compiled by Inductor. ``replay_ns``: wall time
per op of a captured graph. Rounds of all rows are interleaved, and short enough that the host never waits for the GPU.
``train``: a training step (``_train_overhead.py``), alone with ``--train``. Rows that do not fit into ``--budget``
seconds are left out, with that reason.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import _train_overhead
from _record import ROOT, record, write

import shiplap as sl
import shiplap_headers
from shiplap.kernels.native import binding
from shiplap.kernels.triton import triton_launcher

# What the rows execute. Of the file that builds libraries, what they are built with.
SOURCES = [
    "benchmarks/overhead_gpu.py",
    "benchmarks/_train_overhead.py",
    *(
        f"packages/shiplap/src/shiplap/kernels/{name}.py"
        for name in ("c/declaration", "c/call_frame", "triton/launcher")
    ),
    *(
        f"packages/shiplap/src/shiplap/kernels/native/{name}"
        for name in ("build_digest.py::FLAGS", "build_plan.py::command")
    ),
    "packages/shiplap/src/shiplap/torch_private/dispatcher_calls.py",
    "packages/shiplap/src/shiplap/dispatch/fast_paths.py",
    "packages/shiplap/src/shiplap/dispatch/launch.py",
    "packages/shiplap/src/shiplap/dispatch/python_kernel.py",
    "packages/shiplap/src/shiplap/codegen/native.py",
    "packages/shiplap/src/shiplap/codegen/templates/native.cpp.jinja",
    "packages/shiplap-headers/src/shiplap_headers/include/shiplap/*.h",
]
INCLUDE = Path(shiplap_headers.__file__).parent / "include"
TORCH = Path(torch.__file__).parent
SIZE, BLOCK = 1024, 1024
SHORT, LONG = 2, 18  # ops in a compiled chain
CAPTURED = 50  # ops in a captured graph
QUEUE = 512  # launches in flight: more of them, and the host would wait for the device

KERNEL = """
#include "shiplap/abi.h"
__global__ void kernel(const float* x, const float* y, float* out, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < n) out[i] = x[i] + y[i];
}
extern "C" int add_raw(const float* x, const float* y, float* out, int64_t n, void* stream) {
  kernel<<<(n + 255) / 256, 256, 0, (cudaStream_t)stream>>>(x, y, out, n);
  return cudaGetLastError() != cudaSuccess;
}
extern "C" SL_EXPORT int add(const sl_context* ctx, const DLTensor* x, const DLTensor* y, DLTensor* out) {
  const int failed = add_raw((const float*)x->data, (const float*)y->data, (float*)out->data, x->shape[0], ctx->stream);
  return failed ? SL_INTERNAL : SL_OK;
}"""

HAND_WRITTEN = """
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
extern "C" int add_raw(const float*, const float*, float*, int64_t, void*);
at::Tensor add(const at::Tensor& x, const at::Tensor& y) {
  TORCH_CHECK(x.dim() == 1 && y.dim() == 1, "wrong number of dims");
  TORCH_CHECK(x.sizes() == y.sizes(), "sizes disagree");
  TORCH_CHECK(x.scalar_type() == at::kFloat && y.scalar_type() == at::kFloat, "dtype not accepted");
  TORCH_CHECK(x.device() == y.device(), "devices disagree");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor a = x.contiguous(), b = y.contiguous();
  at::Tensor out = at::empty_like(a);
  const auto stream = c10::cuda::getCurrentCUDAStream(x.device().index()).stream();
  float* o = out.mutable_data_ptr<float>();
  const int failed = add_raw(a.const_data_ptr<float>(), b.const_data_ptr<float>(), o, a.numel(), stream);
  TORCH_CHECK(!failed, "launch failed");
  return out;
}
TORCH_LIBRARY(bench_gpu_hand, m) { m.def("add(Tensor x, Tensor y) -> Tensor", {at::Tag::pt2_compliant_tag}); }
TORCH_LIBRARY_IMPL(bench_gpu_hand, CUDA, m) { m.impl("add", add); }
"""

Function = Callable[[Tensor, Tensor], Tensor]
KEPT: list[Any] = []


class Missing(Exception):
    """Why a row is not there."""


# --- (a) a Triton kernel --------------------------------------------------------------------------------------------

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
else:

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, SIZE: tl.constexpr):
        offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        inside = offsets < n
        tl.store(
            out_ptr + offsets,
            tl.load(x_ptr + offsets, mask=inside) + tl.load(y_ptr + offsets, mask=inside),
            mask=inside,
        )


def jit() -> Any:
    if triton is None:
        raise Missing("no triton")
    return add_kernel


def blocks(n: int) -> tuple[int]:
    return ((n + BLOCK - 1) // BLOCK,)


def launching(launch: Any) -> Function:
    """A Python function around a launch: what the rows without shiplap share."""

    def add(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        launch[blocks(x.numel())](x, y, out, x.numel(), SIZE=BLOCK)
        return out

    return add


def triton_plain(folder: Path) -> Function:
    """No op at all: Inductor inlines the kernel when it compiles the caller."""
    return launching(jit())


def triton_custom_op(folder: Path) -> Function:
    """``torch.library.custom_op`` around the launch."""
    op = torch.library.custom_op("bench_gpu_custom::triton_add", launching(jit()), mutates_args=())
    op.register_fake(lambda x, y: torch.empty_like(x))
    return op


def triton_library_op(folder: Path) -> Function:
    """``torch.library.triton_op``: the kernel stays visible to Inductor."""
    kernel = jit()

    def add(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(kernel)[blocks(x.numel())](x, y, out, x.numel(), SIZE=BLOCK)
        return out

    return torch.library.triton_op("bench_gpu_triton::add", add, mutates_args=())


def triton_op(name: str, launch: Any) -> sl.Op:
    @sl.op(f"bench_gpu_{name}::add")
    def add(x: Float32[Tensor, "n"], y: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x + y

    @add.kernel("cuda")
    def run(x: Tensor, y: Tensor, *, out: Tensor) -> None:
        launch[blocks(x.shape[0])](x, y, out, x.shape[0], SIZE=BLOCK)

    return add


def triton_shiplap(folder: Path) -> sl.Op:
    """A shiplap Python launcher that launches as Triton does."""
    return triton_op("jit", jit())


def triton_shiplap_launcher(folder: Path) -> sl.Op:
    """The same with shiplap's launcher."""
    return triton_op("launcher", triton_launcher(jit()))


def triton_launcher_plain(folder: Path) -> Function:
    """The launcher without an op, as the compiled graph never sees it."""
    return launching(triton_launcher(jit()))


# --- (b) a CUDA kernel behind a C function --------------------------------------------------------------------------


def toolkit() -> tuple[str, Path]:
    """nvcc, and where the toolkit's headers are."""
    from torch.utils.cpp_extension import CUDA_HOME

    nvcc = shutil.which("nvcc") or (f"{CUDA_HOME}/bin/nvcc" if CUDA_HOME else "")
    if not nvcc or not Path(nvcc).is_file():
        raise Missing("no nvcc")
    return nvcc, Path(CUDA_HOME or Path(nvcc).resolve().parents[1])


def compiled(folder: Path, name: str) -> Path:
    """The kernel as a library of its own, so that a row has it to itself; compiled once."""
    first, own = folder / "libkernel.so", folder / f"lib{name}.so"
    if not first.exists():
        nvcc, _ = toolkit()
        (folder / "kernel.cu").write_text(KERNEL)
        run(
            [
                nvcc,
                "-O2",
                "-shared",
                "-Xcompiler",
                "-fPIC",
                "-arch=native",
                f"-I{INCLUDE}",
                "-o",
                first,
                folder / "kernel.cu",
            ]
        )
    shutil.copy(first, own)
    return own


def run(command: list[Any]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"{Path(command[0]).name} failed: {done.stderr.strip()[-500:]}")


def hand_written(folder: Path) -> Function:
    """A C++ op as PyTorch's tutorial writes it."""
    kernel, (_, home) = compiled(folder, "hand_kernel"), toolkit()
    source, library = folder / "hand.cpp", folder / "hand.so"
    source.write_text(HAND_WRITTEN)
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    include = [
        f"-I{TORCH}/include",
        f"-I{TORCH}/include/torch/csrc/api/include",
        f"-I{home}/include",
        f"-I{home}/include/cccl",
    ]
    link = [kernel, f"-Wl,-rpath,{folder}", f"-L{TORCH}/lib", "-ltorch_cpu", "-ltorch", "-lc10", "-lc10_cuda"]
    run(["c++", "-O2", "-std=c++20", "-shared", "-fPIC", abi, *include, "-o", library, source, *link])
    torch.ops.load_library(library)
    torch.library.register_fake("bench_gpu_hand::add", lambda x, y: torch.empty_like(x))
    return torch.ops.bench_gpu_hand.add.default


def declared(folder: Path, name: str) -> sl.Op:
    @sl.op(f"bench_gpu_{name}::add")
    def add(x: Float32[Tensor, "n"], y: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x + y

    add.kernel("cuda", sl.cabi(compiled(folder, name), "add", without_signature=True))
    return add


def through_native(folder: Path) -> sl.Op:
    """Shiplap's native binding."""
    op = declared(folder, "native")
    binding.build(op)
    kind, why = binding.state(op, "cuda")
    if kind != "native":
        raise Missing(why)
    return op


def through_python(folder: Path) -> sl.Op:
    """Shiplap's Python binding."""
    op = declared(folder, "python")
    os.environ["SHIPLAP_NATIVE"] = "0"
    op(torch.ones(4, device="cuda"), torch.ones(4, device="cuda"))
    del os.environ["SHIPLAP_NATIVE"]
    assert op.native is None
    return op


def by_ctypes(folder: Path, name: str) -> Function:
    """The Python function that the two torch.library rows share, checks included."""
    raw = ctypes.CDLL(str(compiled(folder, name))).add_raw
    raw.argtypes, raw.restype = (*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_void_p), ctypes.c_int

    def add(x: Tensor, y: Tensor) -> Tensor:
        if x.dim() != 1 or x.shape != y.shape or x.dtype != torch.float32 or y.dtype != torch.float32:
            raise ValueError("arguments do not fit")
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        with torch.cuda.device(x.device):
            stream = torch.cuda.current_stream().cuda_stream
            if raw(x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel(), stream):
                raise RuntimeError("launch failed")
        return out

    return add


def library_impl(folder: Path) -> Function:
    """``torch.library.Library``: define and impl."""
    library = torch.library.Library("bench_gpu_impl", "DEF")
    library.define("add(Tensor x, Tensor y) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("add", by_ctypes(folder, "impl"), "CUDA")
    torch.library.register_fake("bench_gpu_impl::add", lambda x, y: torch.empty_like(x), lib=library)
    KEPT.append(library)
    return torch.ops.bench_gpu_impl.add.default


def custom_op(folder: Path) -> Function:
    """``torch.library.custom_op``: what PyTorch's documentation tells authors to use."""
    op = torch.library.custom_op("bench_gpu_custom::add", by_ctypes(folder, "custom"), mutates_args=())
    op.register_fake(lambda x, y: torch.empty_like(x))
    return op


ROWS: dict[str, Callable[[Path], Function]] = {
    "triton_plain": triton_plain,
    "triton_launcher_plain": triton_launcher_plain,
    "triton_op": triton_library_op,
    "triton_custom_op": triton_custom_op,
    "triton_shiplap": triton_shiplap,
    "triton_shiplap_launcher": triton_shiplap_launcher,
    "torch_library_cpp": hand_written,
    "shiplap_native": through_native,
    "shiplap_python": through_python,
    "library_impl_ctypes": library_impl,
    "custom_op_ctypes": custom_op,
}
EAGER_ONLY = {"triton_launcher_plain", "shiplap_native_out"}
FIRST = ("torch_library_cpp", "shiplap_native", "triton_custom_op", "triton_shiplap_launcher", "custom_op_ctypes")

# --- measuring ------------------------------------------------------------------------------------------------------


def reason(e: Exception) -> str:
    return str(e) if isinstance(e, Missing) else f"{type(e).__name__}: {str(e)[:300]}"


def functions(folder: Path) -> tuple[dict[str, Function], dict[str, str]]:
    """What is measured, and why a row is missing."""
    contenders: dict[str, Function] = {}
    missing: dict[str, str] = {}
    x, y = torch.randn(SIZE, device="cuda"), torch.randn(SIZE, device="cuda")
    for name, make in ROWS.items():
        try:
            function = make(folder)
            if not torch.equal(function(x, y), x + y):
                raise Missing("wrong values")
        except Exception as e:  # one row must not cost the others: it is shown as missing, with its reason
            missing[name] = reason(e)
            continue
        contenders[name] = function
    return contenders, missing


def median_ns(calls: dict[str, Callable[[], Any]], rounds: int, repeat: int) -> dict[str, float]:
    """Median over interleaved rounds of ns per call on the host; the device is idle when a round begins."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(repeat):
                call()
            times[name].append((time.perf_counter_ns() - start) / repeat)
    torch.cuda.synchronize()
    return {name: round(statistics.median(values[1:]), 1) for name, values in times.items()}


def eager(contenders: dict[str, Function], rounds: int) -> dict[str, float]:
    x, y = torch.randn(SIZE, device="cuda"), torch.randn(SIZE, device="cuda")
    calls: dict[str, Callable[[], Any]] = {name: (lambda f=f: f(x, y)) for name, f in contenders.items()}
    calls["aten_add"] = lambda: torch.add(x, y)
    if "shiplap_native" in contenders and torch.is_inference_mode_enabled():
        op: Any = contenders["shiplap_native"]
        out = torch.empty_like(x)
        calls["shiplap_native_out"] = lambda: op.out(x, y, out=out)
    return median_ns(calls, rounds, QUEUE)


_chains = itertools.count()


def chain(function: Function, length: int) -> Function:
    """``length`` calls in a row, in a code object of their own name: Dynamo counts recompilations by equal code."""
    scope, name = {"function": function}, f"run{next(_chains)}"
    exec(f"def {name}(x, y):\n" + "    x = function(x, y)\n" * length + "    return x", scope)
    return torch.compile(scope[name], fullgraph=True, dynamic=False)


def slopes(
    contenders: dict[str, Function], rounds: int, deadline: float, missing: dict[str, str], *, cpp_wrapper: bool
) -> dict[str, float]:
    """ns that one more op adds to a compiled chain, for the rows that can be compiled before ``deadline``."""
    x, y = torch.randn(SIZE, device="cuda"), torch.randn(SIZE, device="cuda")
    calls: dict[str, Callable[[], Any]] = {}
    order = [n for n in (*FIRST, *contenders) if n in contenders and n not in EAGER_ONLY]
    slowest = 0.0
    with torch._inductor.config.patch(cpp_wrapper=cpp_wrapper), torch.no_grad():
        for name in dict.fromkeys(order):
            start = time.monotonic()
            if start + slowest > deadline:
                missing[f"{name}, {'C++' if cpp_wrapper else 'Python'} wrapper"] = "no time left to compile it"
                continue
            try:
                pair = [chain(contenders[name], length) for length in (SHORT, LONG)]
                right = all(
                    torch.allclose(c(x, y), x + n * y, atol=1e-3) for c, n in zip(pair, (SHORT, LONG), strict=True)
                )
                if not right:
                    raise Missing("wrong values")
            except Exception as e:
                missing[f"{name}, {'C++' if cpp_wrapper else 'Python'} wrapper"] = reason(e)
                continue
            calls |= {f"{name}/{n}": (lambda c=c: c(x, y)) for c, n in zip(pair, (SHORT, LONG), strict=True)}
            slowest = max(slowest, time.monotonic() - start)
        times = median_ns(calls, rounds, QUEUE // LONG)
    measured = {name.partition("/")[0] for name in calls}
    return {n: round((times[f"{n}/{LONG}"] - times[f"{n}/{SHORT}"]) / (LONG - SHORT), 1) for n in ROWS if n in measured}


def replayed(contenders: dict[str, Function], rounds: int, missing: dict[str, str]) -> dict[str, float]:
    """Wall ns per op of a captured chain, device included."""
    x, y = torch.randn(SIZE, device="cuda"), torch.randn(SIZE, device="cuda")
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, f in contenders.items():
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.no_grad(), torch.cuda.graph(graph):
                z = x
                for _ in range(CAPTURED):
                    z = f(z, y)
        except Exception as e:
            missing[f"{name}, captured"] = reason(e)
            continue
        graphs[name] = graph
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(4):
                graph.replay()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter_ns() - start) / (4 * CAPTURED))
    return {name: round(statistics.median(values[1:]), 1) for name, values in times.items()}


@contextmanager
def private_cache() -> Iterator[Path]:
    """Bindings are built into a folder of this run, and so are counted."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHIPLAP_CACHE_DIR"] = str(Path(folder) / "cache")
        yield Path(folder)


def trained(folder: Path, rounds: int) -> dict[str, Any]:
    """What a training step costs, or why that is missing."""
    try:
        return _train_overhead.measure(folder, "cuda", rounds, toolkit()[0])
    except Exception as e:
        return {"missing": reason(e)}


def measure(rounds: int, budget: float, *, compile: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    began = time.monotonic()
    with private_cache() as folder:
        contenders, missing = functions(folder)
        print(f"built in {time.monotonic() - began:.0f} s", file=sys.stderr)
        result: dict[str, Any] = {"eager_ns": eager(contenders, rounds)}
        with torch.inference_mode():
            result["inference_ns"] = eager(contenders, rounds)
        result["replay_ns"] = replayed(contenders, rounds, missing)
        for name, cpp in (("compiled_ns", False), ("cpp_wrapper_ns", True)) if compile else ():
            part = 0.55 if not cpp else 0.95
            result[name] = slopes(contenders, min(rounds, 15), began + part * budget, missing, cpp_wrapper=cpp)
            print(f"{name} after {time.monotonic() - began:.0f} s", file=sys.stderr)
        train = trained(folder, rounds)
    for table in result.values():
        table.update(dict.fromkeys(name for name in missing if name in ROWS))
    device = f"{torch.cuda.get_device_name()}, driver {driver()}, CUDA {torch.version.cuda}"
    return record(
        SOURCES,
        ["triton"],
        device=device,
        load_average=os.getloadavg()[0],
        missing=missing,
        seconds=round(time.monotonic() - began),
        ratios=ratios(result),
        train=train,
        **result,
    )


def driver() -> str:
    call = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


RATIOS = {
    "native / hand-written C++": ("shiplap_native", "torch_library_cpp"),
    "custom_op / native": ("custom_op_ctypes", "shiplap_native"),
    "launcher / jit launch, without an op": ("triton_launcher_plain", "triton_plain"),
    "launcher / jit launch, in a shiplap op": ("triton_shiplap_launcher", "triton_shiplap"),
    "Triton custom_op / shiplap with launcher": ("triton_custom_op", "triton_shiplap_launcher"),
}


def ratios(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By table and pair, where both rows are there."""
    return {
        name: {
            title: round(table[a] / table[b], 3) for title, (a, b) in RATIOS.items() if table.get(a) and table.get(b)
        }
        for name, table in result.items()
    }


def show(result: dict[str, Any]) -> None:
    tables = [n for n in ("eager_ns", "inference_ns", "compiled_ns", "cpp_wrapper_ns", "replay_ns") if n in result]
    print(f"{'ns per op':26}" + "".join(f"{name.removesuffix('_ns'):>13}" for name in tables))
    for row in ("aten_add", *ROWS, "shiplap_native_out"):
        cells = [result[t].get(row) for t in tables]
        print(f"{row:26}" + "".join(f"{'-' if c is None else format(c, ',.0f'):>13}" for c in cells))
    for row, why in result["missing"].items():
        print(f"{row}: {why}")
    for title in RATIOS:
        cells = [result["ratios"][t].get(title) for t in tables]
        print(f"{title:42}" + "".join(f"{'-' if c is None else c:>13}" for c in cells))
    print(result["train"].get("missing") or "\n".join(_train_overhead.lines_of(result["train"])))
    print(f"{result['device']}, load average {result['load_average']:.1f}, {result['seconds']} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", nargs="?", const="-", metavar="PATH", help="print JSON, or write it to PATH")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--budget", type=float, default=200, help="seconds; compiled rows that do not fit are left out")
    parser.add_argument("--no-compile", action="store_true", help="eager and replay only")
    parser.add_argument("--train", action="store_true", help="the training step alone")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 10_000  # chains of all rows are alike to Dynamo
    if not torch.cuda.is_available():
        parser.exit(2, "overhead_gpu: no CUDA device\n")
    if options.train:
        torch.set_num_threads(1)
        with private_cache() as folder:
            print(json.dumps(trained(folder, options.rounds), indent=1))
        return
    result = measure(options.rounds, options.budget, compile=not options.no_compile)
    if options.json and options.json != "-":
        write(ROOT / options.json, result)
    if options.json == "-":
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    main()
