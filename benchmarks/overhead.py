"""What one call of an op costs beside its work: ``make bench-overhead``, ``ARGS=--json`` for one JSON object.

The op is the same in every row: two float tensors of 4 elements, ranks, sizes and dtypes checked, a new tensor out, the
same C loop. ``eager_ns``: median ns per call. ``compiled_ns`` and ``cpp_wrapper_ns``: what one more op adds to a chain
compiled by Inductor, with its Python and its C++ wrapper. Times are CPU time of the one thread that works, so that a
busy machine delays a run more than it changes it; rounds of all rows are interleaved, and ``ratios`` are medians of
the ratios within a round. ``train``: a step with its gradient (``_train_overhead.py``). Rows of ``CONTROLS`` are none
of an op: the work without a dispatcher, and torch's own add.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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

# What the rows execute. Of files that are edited for other reasons, the functions on the path.
SOURCES = [
    "benchmarks/overhead.py",
    "benchmarks/_train_overhead.py",
    "packages/shiplap/src/shiplap/codegen/native.py",
    "packages/shiplap/src/shiplap/declare/cpp_expression.py",
    "packages/shiplap/src/shiplap/codegen/templates/native.cpp.jinja",
    "packages/shiplap/src/shiplap/codegen/templates/tvm_ffi.cpp.jinja",
    "packages/shiplap-headers/src/shiplap_headers/include/shiplap/*.h",
    "packages/shiplap/src/shiplap/kernels/c/call_frame.py",
    "packages/shiplap/src/shiplap/kernels/c/declaration.py::CKernel",
    "packages/shiplap/src/shiplap/dispatch/fast_paths.py",
    "packages/shiplap/src/shiplap/dispatch/op.py::Op._call_dispatcher",
    *(f"packages/shiplap/src/shiplap/dispatch/execute.py::Executor.{name}" for name in ("execute", "pick_kernel")),
    "packages/shiplap/src/shiplap/torch_private/dispatcher_calls.py",
    "packages/shiplap/src/shiplap/kernels/native/gradient_recorder.py::SOURCE",
]
INCLUDE = Path(shiplap_headers.__file__).parent / "include"
TORCH = Path(torch.__file__).parent
NOTE, BEGIN, END = ROOT / "docs/design/0004-native.md", "<!-- overhead -->", "<!-- /overhead -->"
SHORT, LONG = 2, 18  # ops in a compiled chain: the difference pays for nothing but ops

KERNEL = """
#include "shiplap/abi.h"
SL_EXPORT int add(const sl_context* ctx, const DLTensor* x, const DLTensor* y, DLTensor* out) {
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = ((float*)x->data)[i] + ((float*)y->data)[i];
  return SL_OK;
}
SL_EXPORT void add_raw(const float* x, const float* y, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] + y[i];
}"""

HAND_WRITTEN = """
#include <ATen/ATen.h>
#include <torch/library.h>
at::Tensor add(const at::Tensor& x, const at::Tensor& y) {
  TORCH_CHECK(x.dim() == 1 && y.dim() == 1, "wrong number of dims");
  TORCH_CHECK(x.sizes() == y.sizes(), "sizes disagree");
  TORCH_CHECK(x.scalar_type() == at::kFloat && y.scalar_type() == at::kFloat, "dtype not accepted");
  const at::Tensor a = x.contiguous(), b = y.contiguous();
  at::Tensor out = at::empty_like(a);
  const float *p = a.const_data_ptr<float>(), *q = b.const_data_ptr<float>();
  float* o = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < a.numel(); ++i) o[i] = p[i] + q[i];
  return out;
}
TORCH_LIBRARY(bench_hand, m) { m.def("add(Tensor x, Tensor y) -> Tensor", {at::Tag::pt2_compliant_tag}); }
TORCH_LIBRARY_IMPL(bench_hand, CPU, m) { m.impl("add", add); }
"""

Function = Callable[[Tensor, Tensor], Tensor]


def compile_c(folder: Path, name: str) -> Path:
    """The kernel as a library of its own, so that a row has it to itself."""
    source, library = folder / f"{name}.c", folder / f"lib{name}.so"
    source.write_text(KERNEL)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", f"-I{INCLUDE}", "-o", library, source], check=True)
    return library


def hand_written(folder: Path) -> Function:
    """A C++ op as PyTorch's tutorial writes it."""
    source, library = folder / "hand.cpp", folder / "hand.so"
    source.write_text(HAND_WRITTEN)
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    include = [f"-I{TORCH}/include", f"-I{TORCH}/include/torch/csrc/api/include"]
    command = ["c++", "-O2", "-std=c++20", "-shared", "-fPIC", abi, *include, "-o", library, source]
    subprocess.run([*command, f"-L{TORCH}/lib", "-ltorch_cpu", "-ltorch", "-lc10"], check=True)
    torch.ops.load_library(library)
    torch.library.register_fake("bench_hand::add", lambda x, y: torch.empty_like(x))
    return torch.ops.bench_hand.add.default


def declared(folder: Path, name: str) -> sl.Op:
    """The shiplap op; which binding serves it is up to the caller."""

    @sl.op(f"bench_{name}::add")
    def add(x: Float32[Tensor, "n"], y: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x + y

    add.kernel("cpu", sl.cabi(compile_c(folder, name), "add", without_signature=True))
    return add


def through_python(folder: Path) -> sl.Op:
    """Shiplap's Python binding."""
    op = declared(folder, "python")
    os.environ["SHIPLAP_NATIVE"] = "0"
    op(torch.ones(4), torch.ones(4))
    del os.environ["SHIPLAP_NATIVE"]
    assert op.native is None
    return op


def through_native(folder: Path) -> sl.Op:
    """Shiplap's native binding."""
    op = declared(folder, "native")
    binding.build(op)
    return op


def by_ctypes(folder: Path) -> Function:
    """The Python function that the two torch.library rows share, checks included."""
    raw = ctypes.CDLL(str(compile_c(folder, "raw"))).add_raw
    raw.argtypes, raw.restype = (*[ctypes.c_void_p] * 3, ctypes.c_int64), None

    def add(x: Tensor, y: Tensor) -> Tensor:
        if x.dim() != 1 or x.shape != y.shape or x.dtype != torch.float32 or y.dtype != torch.float32:
            raise ValueError("arguments do not fit")
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        raw(x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel())
        return out

    return add


def library_impl(folder: Path) -> Function:
    """``torch.library.Library``: define and impl."""
    library = torch.library.Library("bench_impl", "DEF")
    library.define("add(Tensor x, Tensor y) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("add", by_ctypes(folder), "CPU")
    torch.library.register_fake("bench_impl::add", lambda x, y: torch.empty_like(x), lib=library)
    KEPT.append(library)
    return torch.ops.bench_impl.add.default


def custom_op(folder: Path) -> Function:
    """``torch.library.custom_op``: what PyTorch's documentation tells authors to use."""
    op = torch.library.custom_op("bench_custom::add", by_ctypes(folder), mutates_args=())
    op.register_fake(lambda x, y: torch.empty_like(x))
    return op


def tvm_ffi_direct(folder: Path) -> Function:
    """The C ABI kernel exported through apache-tvm-ffi, called with torch tensors; ImportError without that package."""
    importlib.import_module("tvm_ffi")
    from shiplap.kernels.native import tvm_ffi

    function = tvm_ffi.export(declared(folder, "ffi_export"))

    def add(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        function(x, y, out)  # which checks them all
        return out

    return add


def tvm_ffi(folder: Path) -> Function:
    """The same behind ``torch.library.Library``: as an op."""
    add = tvm_ffi_direct(folder)
    library = torch.library.Library("bench_ffi", "DEF")
    library.define("add(Tensor x, Tensor y) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("add", add, "CPU")
    torch.library.register_fake("bench_ffi::add", lambda x, y: torch.empty_like(x), lib=library)
    KEPT.append(library)
    return torch.ops.bench_ffi.add.default


KEPT: list[Any] = []
ROWS: dict[str, Callable[[Path], Function]] = {
    "torch_library_cpp": hand_written,
    "shiplap_native": through_native,
    "shiplap_python": through_python,
    "library_impl_ctypes": library_impl,
    "custom_op_ctypes": custom_op,
    "tvm_ffi": tvm_ffi,
}
CONTROLS: dict[str, Callable[[Path], Function]] = {
    "plain_function": by_ctypes,
    "tvm_ffi_direct": tvm_ffi_direct,
    "aten_add": lambda folder: torch.add,
}


def functions(folder: Path) -> tuple[dict[str, Function], dict[str, str]]:
    """What is measured, and why a row is missing."""
    contenders: dict[str, Function] = {}
    missing = {}
    for name, make in (ROWS | CONTROLS).items():
        try:
            contenders[name] = make(folder)
        except ImportError as e:
            missing[name] = f"not installed: {e}"
    x, y = torch.randn(4), torch.randn(4)
    for name, function in contenders.items():
        assert torch.equal(function(x, y), x + y), name
    return contenders, missing


Times = dict[str, list[float]]


def rounds_of(calls: dict[str, Callable[[], Any]], rounds: int, repeat: int) -> Times:
    """CPU ns per call in interleaved rounds; the first is for warming up and is dropped."""
    times: Times = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.thread_time_ns()
            for _ in range(repeat):
                call()
            times[name].append((time.thread_time_ns() - start) / repeat)
    return {name: values[1:] for name, values in times.items()}


def medians(times: Times) -> dict[str, float]:
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def ratio(times: Times, one: str, other: str) -> float:
    """Median of the ratios within a round: what disturbs a round disturbs both."""
    return round(statistics.median(a / b for a, b in zip(times[one], times[other], strict=True)), 3)


def eager(contenders: dict[str, Function], rounds: int) -> Times:
    x, y = torch.randn(4), torch.randn(4)
    return rounds_of({name: (lambda f=f: f(x, y)) for name, f in contenders.items()}, rounds, 1000)


def chain(function: Function, length: int) -> Function:
    """``length`` calls in a row, in a code object of their own: Dynamo's cache is one per code object."""
    scope: dict[str, Any] = {"function": function}
    exec("def run(x, y):\n" + "    x = function(x, y)\n" * length + "    return x", scope)
    return torch.compile(scope["run"], fullgraph=True, dynamic=False)


def slopes(contenders: dict[str, Function], rounds: int, *, cpp_wrapper: bool) -> Times:
    """ns that one more op adds to a compiled chain."""
    x, y = torch.randn(4), torch.randn(4)
    calls: dict[str, Callable[[], Any]] = {}
    with torch._inductor.config.patch(cpp_wrapper=cpp_wrapper), torch.no_grad():
        for name, f in contenders.items():
            for length in (SHORT, LONG):
                compiled = chain(f, length)
                compiled(x, y)
                calls[f"{name}/{length}"] = lambda c=compiled: c(x, y)
        times = rounds_of(calls, rounds, 200)
    pairs = {name: zip(times[f"{name}/{LONG}"], times[f"{name}/{SHORT}"], strict=True) for name in contenders}
    return {name: [(long - short) / (LONG - SHORT) for long, short in pair] for name, pair in pairs.items()}


def measure(rounds: int, *, compiled: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        contenders, missing = functions(Path(folder))
        tables = {"eager_ns": eager(contenders, rounds)}
        with torch.inference_mode():
            tables["inference_ns"] = eager(contenders, rounds)
        if compiled:
            ops = {name: f for name, f in contenders.items() if name not in CONTROLS}
            tables["compiled_ns"] = slopes(ops, rounds, cpp_wrapper=False)
            tables["cpp_wrapper_ns"] = slopes(ops, rounds, cpp_wrapper=True)
        train = _train_overhead.measure(Path(folder), "cpu", rounds)
    result: dict[str, Any] = {name: {**medians(times), **dict.fromkeys(missing)} for name, times in tables.items()}
    ratios = {
        name: {
            "native_vs_hand_written": ratio(times, "shiplap_native", "torch_library_cpp"),
            "custom_op_vs_native": ratio(times, "custom_op_ctypes", "shiplap_native"),
        }
        for name, times in tables.items()
    }
    return record(
        SOURCES,
        ["apache-tvm-ffi"],
        load_average=os.getloadavg()[0],
        rounds=rounds,
        missing=missing,
        ratios=ratios,
        train=train,
        **result,
    )


def show(result: dict[str, Any]) -> None:
    tables = [name for name in ("eager_ns", "inference_ns", "compiled_ns", "cpp_wrapper_ns") if name in result]
    print(f"{'ns per op':22}" + "".join(f"{name.removesuffix('_ns'):>14}" for name in tables))
    for row in (*ROWS, *CONTROLS):
        cells = [result[t].get(row) for t in tables]
        print(f"{row:22}" + "".join(f"{'-' if c is None else format(c, ',.0f'):>14}" for c in cells))
    for row, why in result["missing"].items():
        print(f"{row}: {why}")
    for row, goal in (("native_vs_hand_written", "at most 1.35"), ("custom_op_vs_native", "in eager at least 3.5")):
        print(f"{row:22}" + "".join(f"{result['ratios'][t][row]:14.2f}" for t in tables) + f"   (goal: {goal})")
    print("\n".join(_train_overhead.lines_of(result["train"])))
    print(f"{result['device']}, load average {result['load_average']:.1f}")


def document(result: dict[str, Any]) -> None:
    """Replace the table of the design note: it repeats the recorded run, and a test compares the two."""
    tables = [result[name] for name in ("eager_ns", "inference_ns", "compiled_ns", "cpp_wrapper_ns")]
    lines = ["| ns per op | eager | inference mode | compiled | cpp_wrapper |", "|---|---|---|---|---|"]
    for row in (*ROWS, *CONTROLS):
        cells = ["-" if table.get(row) is None else f"{table[row]:,.0f}" for table in tables]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    lines += [
        f"| {row} | {' | '.join(f'{ratios[row]:.2f}' for ratios in result['ratios'].values())} |"
        for row in ("native_vs_hand_written", "custom_op_vs_native")
    ]
    lines.append(f"\n{result['device']}, torch {result['versions']['torch']}, {result['date']}.")
    text = NOTE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    NOTE.write_text(head + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", nargs="?", const="-", metavar="PATH", help="print JSON, or write it to PATH")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--no-compile", action="store_true", help="eager only")
    options = parser.parse_args()
    result = measure(options.rounds, compiled=not options.no_compile)
    if options.json == "-":
        print(json.dumps(result, indent=1))
    elif options.json:
        write(ROOT / options.json, result)
        if not options.no_compile:
            document(result)
    else:
        show(result)


if __name__ == "__main__":
    main()
