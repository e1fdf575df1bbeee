"""What one warm call of an ``sl.triton`` op costs the host, as text or with ``--json`` as one JSON object.

Every row adds two vectors of 1024 floats with the same ``@triton.jit`` function and returns a new tensor. The peers are
a C++ op, written by hand, that launches the very cubin through the driver, and torch's ``triton_op``. ``eager_ns`` and
``inference_ns``: median ns per call on the host, and the least of all rounds. ``compiled_ns``: what one more op adds to
a chain compiled by Inductor. Rounds of all rows are interleaved, and so short that the host never waits for the GPU.
``ratios`` are medians of the ratios within a round. A cold machine takes about a minute; chains that do not fit into
``--budget`` seconds are left out, with that reason.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import overhead_gpu as shared
from _record import ROOT, record, write

import shiplap as sl
from shiplap.kernels.native import binding

SOURCES = [
    "benchmarks/triton_host_gpu.py",
    *(f"benchmarks/overhead_gpu.py::{name}" for name in ("chain", "triton_library_op", "run", "toolkit")),
    *(f"packages/shiplap/src/shiplap/kernels/triton/{name}.py" for name in ("kernel", "program", "specialize")),
    "packages/shiplap/src/shiplap/codegen/launcher.py",
    "packages/shiplap/src/shiplap/codegen/native.py",
    "packages/shiplap/src/shiplap/codegen/templates/launcher.cpp.jinja",
    "packages/shiplap/src/shiplap/codegen/templates/native.cpp.jinja",
    "packages/shiplap/src/shiplap/dispatch/fast_paths.py",
    "packages/shiplap-headers/src/shiplap_headers/include/shiplap/*.h",
]
SIZE, BLOCK, QUEUE, SHORT, LONG = shared.SIZE, shared.BLOCK, shared.QUEUE, shared.SHORT, shared.LONG

HAND_WRITTEN = """
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>
#include <torch/library.h>
using U = unsigned;
using Launch = int (*)(void*, U, U, U, U, U, U, U, void*, void**, void**);
static Launch launch;
static void* function;
static unsigned threads, shared_bytes;
extern "C" void set_kernel(void* f, unsigned t, unsigned s) {
  launch = reinterpret_cast<Launch>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuLaunchKernel"));
  function = f, threads = t, shared_bytes = s;
}
at::Tensor add(const at::Tensor& x, const at::Tensor& y) {
  TORCH_CHECK(x.dim() == 1 && y.dim() == 1, "wrong number of dims");
  TORCH_CHECK(x.sizes() == y.sizes(), "sizes disagree");
  TORCH_CHECK(x.scalar_type() == at::kFloat && y.scalar_type() == at::kFloat, "dtype not accepted");
  TORCH_CHECK(x.device() == y.device(), "devices disagree");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor a = x.contiguous(), b = y.contiguous();
  at::Tensor out = at::empty_like(a);
  const float *p = a.const_data_ptr<float>(), *q = b.const_data_ptr<float>();
  float* o = out.mutable_data_ptr<float>();
  int32_t n = a.numel();
  void* none = nullptr;  // Triton's own scratch memories
  void* parameters[] = {&p, &q, &o, &n, &none, &none};
  void* stream = c10::cuda::getCurrentCUDAStream(x.device().index()).stream();
  const U blocks = (n + 1023) / 1024;
  int failed = launch(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, parameters, nullptr);
  if (failed == 201) {  // no context yet: a thread of autograd whose first call to CUDA this is
    cudaFree(nullptr);
    failed = launch(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, parameters, nullptr);
  }
  TORCH_CHECK(!failed, "launch failed: ", failed);
  return out;
}
TORCH_LIBRARY(bench_triton_hand, m) { m.def("add(Tensor x, Tensor y) -> Tensor", {at::Tag::pt2_compliant_tag}); }
TORCH_LIBRARY_IMPL(bench_triton_hand, CUDA, m) { m.impl("add", add); }
"""


def hand_written(folder: Path) -> shared.Function:
    """A C++ op that launches what Triton has compiled for this call, and nothing else."""
    library = compile_hand_written(folder)
    torch.ops.load_library(library)
    torch.library.register_fake("bench_triton_hand::add", lambda x, y: torch.empty_like(x))
    x = torch.empty(SIZE, device="cuda")
    compiled = shared.jit()[shared.blocks(SIZE)](x, x, torch.empty_like(x), SIZE, SIZE=BLOCK)
    threads, bytes = 32 * compiled.metadata.num_warps, compiled.metadata.shared
    ctypes.CDLL(str(library)).set_kernel(ctypes.c_void_p(compiled.function), threads, bytes)
    return torch.ops.bench_triton_hand.add.default


def compile_hand_written(folder: Path) -> Path:
    source, library = folder / "hand.cpp", folder / "hand.so"
    source.write_text(HAND_WRITTEN)
    _, home = shared.toolkit()
    torch_home = shared.TORCH
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    folders = (torch_home / "include", torch_home / "include/torch/csrc/api/include", home / "include")
    include = [f"-I{path}" for path in (*folders, home / "include/cccl")]
    link = [f"-L{torch_home}/lib", "-ltorch_cpu", "-ltorch", "-lc10", "-lc10_cuda", "-ldl"]
    shared.run(["c++", "-O2", "-std=c++20", "-shared", "-fPIC", abi, *include, "-o", library, source, *link])
    return library


def sl_triton(folder: Path) -> sl.Op:
    """The plain function, bound with ``sl.triton`` and launched by generated C++."""

    @sl.op("bench_triton_native::add")
    def add(x: Float32[Tensor, "n"], y: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x + y

    add.kernel("cuda", sl.triton(shared.jit(), grid="cdiv(n, SIZE)", constants={"SIZE": BLOCK}))
    binding.build(add)
    kind, why = binding.state(add, "cuda")
    if kind != "native":
        raise shared.Missing(why)
    return add


def sl_triton_dispatched(folder: Path) -> shared.Function:
    """The same op as ``torch.ops`` has it."""
    return torch.ops.bench_triton_native.add


def aten_add(folder: Path) -> shared.Function:
    return torch.add


ROWS: dict[str, Callable[[Path], shared.Function]] = {
    "hand_written_launch": hand_written,
    "sl_triton": sl_triton,
    "sl_triton_torch_ops": sl_triton_dispatched,
    "triton_op": shared.triton_library_op,
    "triton_jit": shared.triton_plain,
    "aten_add": aten_add,
}
COMPILED = ("triton_op", "sl_triton", "hand_written_launch")
RATIOS = {
    "sl_triton / hand_written_launch": ("sl_triton", "hand_written_launch"),
    "sl_triton_torch_ops / hand_written_launch": ("sl_triton_torch_ops", "hand_written_launch"),
    "sl_triton / triton_op": ("sl_triton", "triton_op"),
}
Times = dict[str, list[float]]


def functions(folder: Path) -> tuple[dict[str, shared.Function], dict[str, str]]:
    """What is measured, and why a row is missing."""
    contenders, missing = dict[str, shared.Function](), dict[str, str]()
    x, y = torch.randn(SIZE, device="cuda"), torch.randn(SIZE, device="cuda")
    for name, make in ROWS.items():
        began = time.monotonic()
        try:
            function = make(folder)
            if not torch.equal(function(x, y), x + y):
                raise shared.Missing("wrong values")
        except Exception as e:  # one row must not cost the others: it is shown as missing, with its reason
            missing[name] = shared.reason(e)
        else:
            contenders[name] = function
        print(f"{name}: {time.monotonic() - began:.1f} s {missing.get(name, '')}", file=sys.stderr, flush=True)
    return contenders, missing


def rounds_of(calls: Mapping[str, Callable[[], object]], rounds: int, repeat: int) -> Times:
    """Host ns per call in interleaved rounds; the device is idle when a row begins. The first round is dropped."""
    times: Times = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(repeat):
                call()
            times[name].append((time.perf_counter_ns() - start) / repeat)
    torch.cuda.synchronize()
    return {name: values[1:] for name, values in times.items()}


def eager(contenders: Mapping[str, shared.Function], rounds: int) -> Times:
    x, y = torch.randn(SIZE, device="cuda"), torch.randn(SIZE, device="cuda")
    return rounds_of({name: (lambda f=f: f(x, y)) for name, f in contenders.items()}, rounds, QUEUE)


def slopes(contenders: Mapping[str, shared.Function], rounds: int, deadline: float, missing: dict[str, str]) -> Times:
    """ns that one more op adds to a compiled chain, for the rows that can be compiled before ``deadline``."""
    x, y = torch.randn(SIZE, device="cuda"), torch.randn(SIZE, device="cuda")
    calls, slowest = dict[str, Callable[[], object]](), 0.0
    with torch.no_grad():
        for name in (n for n in COMPILED if n in contenders):
            began = time.monotonic()
            if began + slowest > deadline:
                missing[f"{name}, compiled"] = "no time left to compile it"
                continue
            try:
                pair = {n: shared.chain(contenders[name], n) for n in (SHORT, LONG)}
                if not all(torch.allclose(c(x, y), x + n * y, atol=1e-3) for n, c in pair.items()):
                    raise shared.Missing("wrong values")
            except Exception as e:
                missing[f"{name}, compiled"] = shared.reason(e)
                continue
            calls |= {f"{name}/{n}": (lambda c=c: c(x, y)) for n, c in pair.items()}
            slowest = max(slowest, time.monotonic() - began)
            print(f"{name}, compiled: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        times = rounds_of(calls, rounds, QUEUE // LONG)
    names = dict.fromkeys(name.partition("/")[0] for name in calls)
    pairs = {name: zip(times[f"{name}/{LONG}"], times[f"{name}/{SHORT}"], strict=True) for name in names}
    return {name: [(long - short) / (LONG - SHORT) for long, short in pair] for name, pair in pairs.items()}


def described(times: Times) -> dict[str, dict[str, float]]:
    """Per row the median and the least of its rounds."""
    return {n: {"median": round(statistics.median(v), 1), "least": round(min(v), 1)} for n, v in times.items()}


def ratios(times: Times, titles: Mapping[str, tuple[str, str]] = RATIOS) -> dict[str, float]:
    """Medians of the ratios within a round: what disturbs a round disturbs both."""
    pairs = {t: (times[a], times[b]) for t, (a, b) in titles.items() if a in times and b in times}
    return {
        title: round(statistics.median(a / b for a, b in zip(*pair, strict=True)), 3) for title, pair in pairs.items()
    }


def measure(rounds: int, budget: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    began = time.monotonic()
    with shared.private_cache() as folder:
        contenders, missing = functions(folder)
        tables = {"eager_ns": eager(contenders, rounds)}
        with torch.inference_mode():
            tables["inference_ns"] = eager(contenders, rounds)
        tables["compiled_ns"] = slopes(contenders, rounds, began + budget, missing)
    return record(
        SOURCES,
        ["triton"],
        device=f"{torch.cuda.get_device_name()}, driver {shared.driver()}, CUDA {torch.version.cuda}",
        load_average=os.getloadavg()[0],
        missing=missing,
        seconds=round(time.monotonic() - began),
        ratios={name: ratios(times) for name, times in tables.items()},
        **{name: described(times) for name, times in tables.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", nargs="?", const="-", metavar="PATH", help="print JSON, or write it to PATH too")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--budget", type=float, default=70, help="seconds after which no chain is compiled any more")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 10_000  # chains of all rows are alike to Dynamo
    if not torch.cuda.is_available():
        parser.exit(2, "triton_host_gpu: no CUDA device\n")
    result = measure(options.rounds, options.budget)
    if options.json and options.json != "-":
        write(ROOT / options.json, result)
    print(json.dumps(result, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
