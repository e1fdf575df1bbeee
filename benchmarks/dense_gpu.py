"""Products and convolutions with their epilogues on a GPU: fused templates, the same without fusion, and the peers.

Rows: ``shiplap`` (max-autotune, verified choice), ``control`` (the same candidate, fusion off), ``inductor``
(max-autotune of the plain PyTorch function), ``again`` (that, compiled once more: the noise between compilations),
``eager`` (cuBLASLt or cuDNN, then pointwise kernels). Each is captured in a CUDA graph; runs take turns with the L2
cache flushed between them; medians in microseconds.

``--workers 6`` compiles cases in as many processes; what runs on the device, runs while no other process does.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _record import record, write

import shiplap as sl  # noqa: F401
import shiplap_dense as dense
from shiplap.fuse import fusion_choices, switches
from shiplap.selection.measure import CudaClock, Plan, race
from shiplap_dense import ops

SOURCES = [
    "benchmarks/dense_gpu.py",
    "packages/shiplap-dense/src/shiplap_dense/*.triton.jinja",
    "packages/shiplap-dense/src/shiplap_dense/cuda.py",
    "packages/shiplap/src/shiplap/fuse/select.py",
    "packages/shiplap/src/shiplap/fuse/surroundings.py",
    "packages/shiplap/src/shiplap/selection/measure.py",
]
MODE = "max-autotune-no-cudagraphs"
Fn = Callable[..., Tensor]
gelu, relu = torch.nn.functional.gelu, torch.relu
MATMUL = [(m, n, k) for n, k in ((4096, 4096), (8192, 8192), (8192, 4096)) for m in (16, 128, 4096, 8192)]
CONV = [  # ResNet-50, batch 32: (channels in, size, channels out, kernel, stride)
    (64, 56, 64, 1, 1),
    (64, 56, 64, 3, 1),
    (128, 56, 128, 3, 2),
    (128, 28, 512, 1, 1),
    (256, 14, 256, 3, 1),
    (512, 7, 512, 3, 1),
]
GROUPED = [(4096, 8, 1024, 2048)]  # tokens, experts, k, n
MORE_MATMUL = [
    (64, 11008, 4096),
    (256, 4096, 11008),
    (512, 4096, 4096),
    (1024, 5120, 5120),
    (2048, 4096, 14336),
    (2048, 14336, 4096),
]
MORE_CONV = [(256, 28, 256, 3, 2), (1024, 14, 256, 1, 1), (512, 28, 128, 1, 1)]
MORE_GROUPED = [(8192, 16, 2048, 1024)]


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def matmul_case(m: int, n: int, k: int) -> tuple[Fn, Fn, tuple[Tensor, ...], Any]:
    """``gelu(a @ w.T + bias) + residual``."""
    args = normal(m, k), normal(n, k, scale=k**-0.5), normal(n), normal(m, n)
    plain: Fn = lambda a, w, b, r: gelu(torch.nn.functional.linear(a, w, b)) + r  # noqa: E731
    ours: Fn = lambda a, w, b, r: gelu(dense.matmul(a, w.t(), b)) + r  # noqa: E731
    return plain, ours, args, ops.mm


def conv_case(ci: int, size: int, co: int, kernel: int, stride: int) -> tuple[Fn, Fn, tuple[Tensor, ...], Any]:
    """``relu(conv2d(x) + bias)``, channels last."""
    last, pad = torch.channels_last, kernel // 2
    x = normal(32, ci, size, size).to(memory_format=last)
    w = normal(co, ci, kernel, kernel, scale=(ci * kernel * kernel) ** -0.5).to(memory_format=last)
    plain: Fn = lambda x, w, b: relu(torch.nn.functional.conv2d(x, w, b, stride, pad))  # noqa: E731
    ours: Fn = lambda x, w, b: relu(dense.conv2d(x, w, b, stride, pad))  # noqa: E731
    return plain, ours, (x, w, normal(co)), ops.conv2d


def grouped_case(m: int, g: int, k: int, n: int) -> tuple[Fn, Fn, tuple[Tensor, ...], Any]:
    """``silu(grouped product)``, tokens sorted by expert; the peer is torch's own grouped product."""
    ends = [*torch.randint(0, m, (g - 1,)).sort().values.tolist(), m]
    args = normal(m, k), normal(g, k, n, scale=k**-0.5), torch.tensor(ends, dtype=torch.int32, device="cuda")
    silu = torch.nn.functional.silu
    native = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    plain: Fn = lambda a, b, ends: silu(native(a, b, offs=ends))  # noqa: E731
    ours: Fn = lambda a, b, ends: silu(dense.grouped_matmul(a, b, ends))  # noqa: E731
    return plain, ours, args, ops.grouped_mm


def compiled(fn: Fn, args: tuple[Tensor, ...], clock: CudaClock) -> tuple[Callable[[], Any], float]:
    """``fn`` compiled and captured at once: the next compilation of the same function would replace it."""
    torch._dynamo.reset()
    made, started = torch.compile(fn, mode=MODE, fullgraph=True), time.monotonic()
    with torch.no_grad():
        made(*args)
        seconds = time.monotonic() - started
        return clock.ready(lambda: (made(*args),)), seconds


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def measure(name: str, plain: Fn, ours: Fn, args: tuple[Tensor, ...], op: Any, clock: CudaClock) -> dict[str, Any]:
    """All rows of one case, and how far from float64 each of the two programs is."""
    seconds: dict[str, float] = {}
    with torch.no_grad():
        runs = {"eager": clock.ready(lambda: (plain(*args),))}
    runs["shiplap"], seconds["shiplap"] = compiled(ours, args, clock)
    choice = fusion_choices(op.spec.name)[-1]
    template = not choice.chosen.startswith("reference")
    with switches(op, fusion=False, only=choice.chosen) if template else switches(op, templates=False):
        runs["control"], seconds["control"] = compiled(ours, args, clock)
    for row in ("inductor", "again"):
        try:
            runs[row], seconds[row] = compiled(plain, args, clock)
        except Exception as e:
            print(f"{name}: inductor failed: {str(e)[:200]}", flush=True)
    with torch.no_grad():
        wide = [a.double() if a.is_floating_point() else a for a in args]
        want = plain(*wide) if "grouped" not in name else ours(*wide)
        errors = {row: error(run()[0], want) for row, run in runs.items()}
        del wide, want
        rows = list(runs)
        times = race(dict(enumerate(runs.values())), clock, Plan(rounds=60, seconds=2.0, hopeless=1e9))
    times_us = {row: round(times[i].median * 1e6, 2) for i, row in enumerate(rows) if i in times}
    spread = {row: [round(times[i].low * 1e6, 2), round(times[i].high * 1e6, 2)] for i, row in enumerate(rows)}
    print(f"{name:28s} " + " ".join(f"{r} {t:8.1f}" for r, t in times_us.items()) + f"  {choice.chosen}", flush=True)
    print(f"    {choice.reason}; errors " + " ".join(f"{r} {e:.1e}" for r, e in errors.items()), flush=True)
    return {
        "case": name,
        "us": times_us,
        "quartiles_us": spread,
        "error": errors,
        "compile_s": seconds,
        "chosen": choice.chosen,
        "reason": choice.reason,
    }


def cases(wanted: list[str]) -> list[tuple[str, Any]]:
    listed: list[tuple[str, Any]] = []
    for matmul, conv, grouped in ((MATMUL, CONV, GROUPED), (MORE_MATMUL, MORE_CONV, MORE_GROUPED)):
        listed += [(f"matmul {m}x{n}x{k}", (matmul_case, (m, n, k))) for m, n, k in matmul]
        listed += [(f"conv {c[0]}->{c[2]} {c[3]}x{c[3]}/{c[4]} at {c[1]}", (conv_case, c)) for c in conv]
        listed += [(f"grouped {g[0]} over {g[1]}: {g[2]}x{g[3]}", (grouped_case, g)) for g in grouped]
    return [(name, make) for name, make in listed if not wanted or any(w in name for w in wanted)]


class Alone:
    """The device, for one process at a time; a thread that has it may ask again."""

    def __init__(self, path: str) -> None:
        self.path, self.lock, self.depth = path, threading.RLock(), 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            held = None if self.depth else open(self.path, "w")  # noqa: SIM115
            if held is not None:
                fcntl.flock(held, fcntl.LOCK_EX)
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1
                if held is not None:
                    held.close()

    def around(self, owner: Any, name: str) -> None:
        """``owner.name`` runs while no other process has the device."""
        plain = getattr(owner, name)

        def run(*args: Any, **named: Any) -> Any:
            with self():
                return plain(*args, **named)

        setattr(owner, name, run)

    def always(self) -> None:
        """All that this process verifies and times. Candidates run in this process: in another one nobody waits."""
        select, bench = import_module("shiplap.fuse.select"), import_module("shiplap.selection.bench")
        select._isolation = None
        self.around(type(import_module("torch._inductor.runtime.benchmarking").benchmarker), "benchmark_gpu")
        self.around(select, "race")
        self.around(bench, "race")
        self.around(bench.Verifier, "check")
        self.around(sys.modules[__name__], "race")


def measured_here(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    started = time.monotonic()
    part, parts = map(int, options.part.split("/"))
    for name, (make, shape) in cases(options.case)[part::parts]:
        if time.monotonic() - started > options.seconds:
            print(f"{name}: not started, time is up")
            continue
        try:
            yield measure(name, *make(*shape), CudaClock("cuda"))
        except Exception as e:
            print(f"{name}: {type(e).__name__}: {str(e)[:300]}", flush=True)
        torch.cuda.empty_cache()


def measured_together(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases in processes of their own; one that is not done in time is ended, and what it has told stays."""
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as made:
        running = []
        for i in range(options.workers):
            command = [sys.executable, __file__, *options.case, "--part", f"{i}/{options.workers}"]
            command += ["--seconds", str(options.seconds), "--lock", f"{made}/lock", "--lines", f"{made}/{i}"]
            running.append(subprocess.Popen(command))
        for process in running:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        texts = [path.read_text(encoding="utf-8") for path in Path(made).glob("[0-9]*")]
    told = {case["case"]: case for text in texts for case in map(json.loads, text.splitlines())}
    return [told[name] for name, _ in cases([]) if name in told]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", nargs="*", help="parts of names of cases; all of them by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after this time")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile")
    parser.add_argument("--part", default="0/1", help="of the cases, as 0/6")
    parser.add_argument("--lock", help="file: who runs on the device has it locked")
    parser.add_argument("--lines", type=Path, help="a line of JSON for each case, as soon as it is measured")
    options = parser.parse_args()
    if options.lock:
        Alone(options.lock).always()
    results = measured_together(options) if options.workers else []
    for case in () if options.workers else measured_here(options):
        results.append(case)
        if options.lines:
            with open(options.lines, "a", encoding="utf-8") as file:
                print(json.dumps(case), file=file)
    if options.json:
        smi = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        device = f"{torch.cuda.get_device_name()}, driver {smi}"
        write(options.json, record(SOURCES, ["triton"], device, mode=MODE, cases=results))


if __name__ == "__main__":
    main()
