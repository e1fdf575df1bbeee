"""Dense CPU templates: fused, the same kernel with fusion off, plain Inductor of the reference, and eager.

Every round times each contestant once, in random order, and a ratio is taken inside a round: whatever else the machine
does falls on all of them. What counts is CPU time of the process on one thread; wall time on all threads is recorded
beside it from a process of its own. Weights are laid out once, beforehand, for all contestants alike.

    python benchmarks/dense_cpu.py [--json benchmarks/results/dense_cpu.json] [--threads 2] [--seconds 2]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
from torch._dynamo.utils import counters

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import _record  # noqa: E402

import shiplap_dense as dense  # noqa: E402
from shiplap.inductor import fusion_choices, switches  # noqa: E402
from shiplap_dense import ops  # noqa: E402

DENSE = "packages/shiplap-dense/src/shiplap_dense"
HEADERS = "packages/shiplap-headers/src/shiplap_headers/include"
SOURCES = (f"{DENSE}/*.h", f"{HEADERS}/shiplap/cpu/micro.h", f"{DENSE}/*.cpp.jinja", f"{DENSE}/cpu.py")
BAR = 1.5  # int8-weight product over plain Inductor
MAX_ROUNDS, MIN_ROUNDS = 60, 5
gelu, relu, conv2d = torch.nn.functional.gelu, torch.relu, torch.nn.functional.conv2d
Args = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """``ours`` and ``plain`` compute the same from ``args``; ``multiplications`` are those of the product."""

    kind: str
    name: str
    op: Any
    ours: Callable[..., torch.Tensor]
    plain: Callable[..., torch.Tensor]
    args: Args
    multiplications: int


def int8_product(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> Workload:
    w = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    args = torch.randn(m, k).to(dtype), w, (torch.rand(n) / 127).to(dtype), torch.randn(n).to(dtype)
    return Workload(
        f"int8 product + bias + gelu, {str(dtype).removeprefix('torch.')}",
        f"{m}x{k}x{n}",
        ops.int8_mm,
        lambda x, w, s, b: gelu(dense.matmul_int8(x, w, s, b)),
        lambda x, w, s, b: gelu((x @ w.to(x.dtype).t()) * s + b),
        args,
        m * k * n,
    )


def product(m: int, k: int, n: int) -> Workload:
    args = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    return Workload(
        "product + bias + relu, float32",
        f"{m}x{k}x{n}",
        ops.mm,
        lambda a, b, c: relu(dense.matmul(a, b, c)),
        lambda a, b, c: relu(a @ b + c),
        args,
        m * k * n,
    )


def convolution(ci: int, co: int, size: int, kernel: int, stride: int) -> Workload:
    x = torch.randn(1, ci, size, size).to(memory_format=torch.channels_last)
    w = torch.randn(co, ci, kernel, kernel).to(memory_format=torch.channels_last)
    pad = kernel // 2
    out = (size + 2 * pad - kernel) // stride + 1
    return Workload(
        "convolution + bias + relu, float32",
        f"{ci}->{co}, {size}x{size}, {kernel}x{kernel}/{stride}",
        ops.conv2d,
        lambda x, w, b: relu(dense.conv2d(x, w, b, stride, pad)),
        lambda x, w, b: relu(conv2d(x, w, b, stride, pad)),
        (x, w, torch.randn(co)),
        out * out * co * ci * kernel**2,
    )


def workloads() -> list[Workload]:
    shapes = [(k, n) for k, n in [(1024, 4096), (4096, 1024), (512, 512), (64, 1024)]]
    int8 = [int8_product(m, k, n) for k, n in shapes for m in (1, 16, 128, 512, 2048)]
    half = [int8_product(m, 1024, 4096, torch.bfloat16) for m in (1, 128)]
    plain = [product(128, 1024, 4096), product(2048, 64, 1024), product(512, 512, 512)]
    resnet = [
        (64, 64, 56, 1, 1),
        (64, 64, 56, 3, 1),
        (3, 64, 224, 7, 2),
        (128, 128, 28, 3, 1),
        (256, 1024, 14, 1, 1),
        (512, 512, 7, 3, 1),
    ]
    return [*int8, *half, *plain, *(convolution(*shape) for shape in resnet)]


def compiled(fn: Callable[..., torch.Tensor], args: Args) -> Callable[[], torch.Tensor]:
    run = torch.compile(fn, fullgraph=True, dynamic=False)
    run(*args)
    return lambda: run(*args)


def contestants(work: Workload) -> tuple[dict[str, Callable[[], torch.Tensor]], str]:
    torch.compiler.reset()  # once: what was compiled before it would be compiled again, under other switches
    fused = compiled(lambda *a: work.ours(*a), work.args)
    chosen = fusion_choices(work.op.spec.name)[-1].chosen
    with switches(work.op, fusion=False):
        control = compiled(lambda *a: work.ours(*a), work.args)
    plain = compiled(lambda *a: work.plain(*a), work.args)
    return {"fused": fused, "control": control, "plain": plain, "eager": lambda: work.plain(*work.args)}, chosen


def agree(runs: dict[str, Callable[[], torch.Tensor]], work: Workload) -> dict[str, float]:
    """Relative errors against float64; a contestant that computes something else is not measured."""
    wide = work.plain(*(t.double() if t.is_floating_point() else t for t in work.args))
    kernels = counters["inductor"]["cpp_templated_kernel_counter"]
    errors = {name: float((run().double() - wide).norm() / wide.norm()) for name, run in runs.items()}
    limit = 1e-5 if work.args[0].dtype == torch.float32 else 2e-2
    assert max(errors.values()) < limit, (work.name, errors)
    assert counters["inductor"]["cpp_templated_kernel_counter"] == kernels, "compiled again"
    return errors


def measure(runs: dict[str, Callable[[], Any]], clock: Callable[[], float], seconds: float) -> dict[str, Any]:
    rounds: list[dict[str, float]] = []
    dice = random.Random(0)
    end = time.perf_counter() + seconds
    while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and time.perf_counter() < end):
        taken = {}
        for name in dice.sample(list(runs), len(runs)):  # whoever follows the largest buffers finds the coldest cache
            began = clock()
            runs[name]()
            taken[name] = (clock() - began) * 1e3
        rounds.append(taken)
    row: dict[str, Any] = {"rounds": len(rounds)}
    for name in runs:
        row[name] = quantiles([r[name] for r in rounds])
    for name in runs.keys() - {"fused"}:
        row[f"{name} / fused"] = quantiles([r[name] / r["fused"] for r in rounds])
    return row


def quantiles(values: list[float]) -> list[float]:
    """Quartile, median, quartile."""
    return [round(q, 4) for q in statistics.quantiles(values, n=4, method="inclusive")]


def peak(seconds: float = 0.3) -> float:
    """What this core multiplies and adds in a second at best, in 1e9: a square product of MKL's, by its fastest run."""
    a, best, end = torch.randn(768, 768), float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.thread_time()
        torch.mm(a, a)
        best = min(best, time.thread_time() - began)
    return 768**3 / best / 1e9


@torch.no_grad()
def run(threads: int, seconds: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    rows = []
    for work in workloads():
        runs, chosen = contestants(work)
        errors = agree(runs, work)
        figures = measure(runs, clock, seconds)
        row = {"kind": work.kind, "name": work.name, "chosen": chosen, **figures, "errors": errors}
        if threads == 1:
            best = peak()
            row["1e9 per second"] = round(work.multiplications / figures["fused"][1] / 1e6, 1)
            row["square product, 1e9 per second"] = round(best, 1)
            row["plain / product at that rate"] = round(figures["plain"][1] / (work.multiplications / best / 1e6), 2)
        rows.append(row)
        show(row)
    return rows


def show(row: dict[str, Any]) -> None:
    times = "  ".join(f"{name} {row[name][1]:9.3f}" for name in ("fused", "control", "plain", "eager"))
    ratios = f"{row['control / fused'][1]:5.2f}x control  {row['plain / fused'][1]:5.2f}x plain"
    print(f"{row['kind'][:28]:28} {row['name']:24} {times}  {ratios}  {row['chosen']}", flush=True)


def table(result: dict[str, Any]) -> str:
    """The rows of one thread, as the design note shows them."""
    lines = [
        "| case | shiplap | fusion off | Inductor | eager | Inductor / shiplap | bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["threads 1, CPU ms"]:
        ours, control, plain, eager = (f"{row[name][1]:.3g}" for name in ("fused", "control", "plain", "eager"))
        low, ratio, high = (f"{q:.2f}" for q in row["plain / fused"])
        bound = row["plain / product at that rate"]
        case = f"{row['kind'].split(' ')[0]} {row['name']}{', bf16' if 'bfloat16' in row['kind'] else ''}"
        lines.append(f"| {case} | {ours} | {control} | {plain} | {eager} | {ratio} [{low}, {high}] | {bound:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="of measurement per workload and clock")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    inductor.fx_graph_cache = False  # both processes decide for themselves
    if given.child:
        given.json.write_text(json.dumps(run(given.child, given.seconds)))
        return
    by_threads = {}
    for threads in dict.fromkeys((1, given.threads)):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            command = [sys.executable, __file__, "--child", str(threads), "--json", str(out)]
            subprocess.run([*command, "--seconds", str(given.seconds)], check=True)
            by_threads[f"threads {threads}, {'CPU' if threads == 1 else 'wall'} ms"] = json.loads(out.read_text())
    if given.json:
        _record.write(given.json, _record.record(SOURCES, [], bar=BAR, **by_threads))


if __name__ == "__main__":
    main()
