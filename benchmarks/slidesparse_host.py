"""What a warm eager call of ``slidesparse::linear_int8`` costs the host, beside a C++ op around the same C function.

One row of 32 numbers, an int8 weight for 16 results, with and without a bias, and no rows at all, which leaves the
checks and the memory alone. CPU ns of the one thread that works, medians over interleaved rounds; ratios are medians
within a round, and the control is the C++ op by ``torch.ops.ns.op``. Goal of ``linear_int8``: at most 1.35.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _record
import torch

import shiplap_headers
import shiplap_slidesparse
from shiplap_slidesparse import cpu, layers

SOURCES = [
    "benchmarks/slidesparse_host.py",
    "packages/shiplap/src/shiplap/codegen/native.py",
    "packages/shiplap/src/shiplap/dispatch/fast_paths.py",
    "packages/shiplap/src/shiplap/torch_private/dispatcher_calls.py",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/csrc/layers.cpp",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/layers.py::linear_int8",
]
CALLS = ((1, False), (1, True), (0, False))  # rows, and whether there is a bias
EACH = 500  # calls between two readings of the clock
TORCH = Path(torch.__file__).parent
INCLUDE = [
    Path(shiplap_headers.__file__).parent / "include",
    Path(shiplap_slidesparse.__file__).parent / "csrc",
    TORCH / "include",
    TORCH / "include/torch/csrc/api/include",
]
HAND_WRITTEN = """
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>
#include "slidesparse.h"
using at::Tensor;
using Optional = std::optional<Tensor>;
DLTensor view(const Tensor& t, uint8_t code, uint8_t bits) {
  auto *sizes = const_cast<int64_t*>(t.sizes().data()), *strides = const_cast<int64_t*>(t.strides().data());
  return DLTensor{t.data_ptr(), {1, 0}, static_cast<int32_t>(t.dim()), {code, bits, 1}, sizes, strides, 0};
}
Tensor packed_or_not(const Optional& t) { return t ? t->contiguous() : Tensor(); }
Tensor linear(const Tensor& x, const Tensor& scale, const Optional& dense, const Optional& packed, const Optional& bias,
              int64_t pairs, int64_t layout) {
  TORCH_CHECK(x.dim() == 2 && scale.dim() == 1, "dims");
  const int64_t m = x.size(0), k = x.size(1), n = scale.size(0);
  TORCH_CHECK(x.scalar_type() == at::kFloat && scale.scalar_type() == at::kFloat, "dtype");
  TORCH_CHECK(pairs >= 2 && pairs <= 8 && layout >= 0 && layout <= 1 && k <= 65536, "values");
  TORCH_CHECK(x.device() == scale.device(), "devices");
  if (dense) TORCH_CHECK(dense->dim() == 2 && dense->size(0) == n && dense->size(1) == k, "dense");
  if (dense) TORCH_CHECK(dense->scalar_type() == at::kChar && dense->device() == x.device(), "dense");
  if (packed) TORCH_CHECK(packed->dim() == 1 && packed->scalar_type() == at::kByte, "packed");
  if (bias) TORCH_CHECK(bias->dim() == 1 && bias->size(0) == n && bias->scalar_type() == at::kFloat, "bias");
  const Tensor a = x.contiguous(), s = scale.contiguous();
  const Tensor d = packed_or_not(dense), p = packed_or_not(packed), b = packed_or_not(bias);
  const int threads = at::get_num_threads();
  const int64_t slid = ((k + 2 * pairs - 1) / (2 * pairs) * 4 * (pairs - 1) + 31) / 32 * 32;
  const int64_t depth = std::max(k, slid), int8 =
      threads * 16 * (2 * depth + 31) + std::min<int64_t>(m, 256) * (3 * depth + 101) + 320;
  const int64_t bytes = m * depth + int8 + 4 * m + threads * (5 * k + 192) + 256;
  Tensor out = at::empty({m, n}, a.options()), scratch = at::empty({bytes}, a.options().dtype(at::kByte));
  char message[1024] = "";
  const int64_t config[1] = {0};
  const sl_context context{SL_ABI_VERSION, threads, nullptr, scratch.data_ptr(), static_cast<size_t>(bytes), message,
                           sizeof message, config, 1};
  DLTensor vx = view(a, 2, 32), vs = view(s, 2, 32), vo = view(out, 2, 32), vd, vp, vb;
  if (dense) vd = view(d, 0, 8);
  if (packed) vp = view(p, 1, 8);
  if (bias) vb = view(b, 2, 32);
  const int status = slidesparse_linear_int8(&context, &vx, &vs, dense ? &vd : nullptr, packed ? &vp : nullptr,
                                             bias ? &vb : nullptr, &vo, pairs, layout);
  TORCH_CHECK(status == SL_OK, message);
  return out;
}
TORCH_LIBRARY(bench_int8, m) {
  m.def("linear(Tensor x, Tensor scale, Tensor? dense=None, Tensor? packed=None, Tensor? bias=None, SymInt pairs=4, "
        "SymInt layout=0) -> Tensor", {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(bench_int8, CPU, m) { m.impl("linear", linear); }
"""


def hand_written(folder: Path) -> Any:
    """Return the op in C++ around the C function of the family."""
    source, library = folder / "linear.cpp", folder / "linear.so"
    source.write_text(HAND_WRITTEN)
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    link = [cpu.LIBRARY, f"-Wl,-rpath,{cpu.LIBRARY.parent}", f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
    include = [f"-I{path}" for path in INCLUDE]
    flags = ["-O2", "-std=c++20", "-shared", "-fPIC", abi]
    subprocess.run(["c++", *flags, *include, "-o", library, source, *link], check=True)
    torch.ops.load_library(library)
    return torch.ops.bench_int8.linear


def arguments(rows: int, bias: bool) -> tuple[Any, ...]:
    """Return the arguments of a call with that many rows."""
    dense = torch.randint(-127, 127, (16, 32), dtype=torch.int8)
    return torch.randn(rows, 32), torch.rand(16), dense, None, torch.randn(16) if bias else None


def measured(functions: dict[str, Callable[..., Any]], given: tuple[Any, ...], rounds: int) -> dict[str, Any]:
    """Return the CPU nanoseconds of a call of each function, and their ratio to those of the first, as medians."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start = time.thread_time_ns()
            for _ in range(EACH):
                function(*given)
            times[name].append((time.thread_time_ns() - start) / EACH)
    base = next(iter(times.values()))[1:]
    ratios = {n: statistics.median(a / b for a, b in zip(each[1:], base, strict=True)) for n, each in times.items()}
    return {n: {"ns": round(statistics.median(each[1:])), "ratio": round(ratios[n], 2)} for n, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/slidesparse_host.json")
    parser.add_argument("--rounds", type=int, default=31)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        by_hand = hand_written(Path(made))
    op = layers.linear_int8
    op.build()
    functions: dict[str, Callable[..., Any]] = {
        "c++": by_hand.default,
        "c++, torch.ops": by_hand,
        "linear_int8": op,
        "torch.ops": torch.ops.slidesparse.linear_int8,
    }
    rows = []
    for count, bias in CALLS:
        given = arguments(count, bias)
        for name, function in functions.items():
            torch.testing.assert_close(function(*given), op.reference(*given), msg=name)
        rows.append({"rows": count, "bias": bias, "calls": measured(functions, given, asked.rounds)})
        for name, call in rows[-1]["calls"].items():
            print(f"{count} rows{', bias' if bias else '':8}{name:16}{call['ns']:10,}{call['ratio']:8.2f}")
    load = round(os.getloadavg()[0], 1)
    print(f"load average {load}")
    if asked.json:
        path = _record.ROOT / "benchmarks/results/slidesparse_host.json"
        _record.write(path, _record.record(SOURCES, [], rounds=asked.rounds, load=load, calls=rows))


if __name__ == "__main__":
    main()
