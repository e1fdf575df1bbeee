"""Products and convolutions with their epilogues on a GPU: fused templates, the same without fusion, and the peers.

Rows: ``shiplap`` (max-autotune, verified choice), ``control`` (the same candidate, fusion off), ``inductor``
(max-autotune of the plain PyTorch function), ``again`` (that, compiled once more from the caches), ``anew`` (that,
compiled once more from empty caches: what Inductor's own search picks differs from time to time), ``eager`` (cuBLASLt
or cuDNN, then pointwise kernels), and where ``shiplap`` is below 0.99 of ``inductor``, ``ours`` and ``ours anew``
(``shiplap`` compiled twice more from empty caches). ``ratio of sides`` is that of the medians of both sides' programs.
Each is captured in a CUDA graph; runs take turns with the L2 cache flushed between them, in two races; means of their
medians in microseconds. ``noise`` is the most by which two races differ in one row, or programs of one side in one
race: ``inductor``, ``again`` and ``anew``, and the three of ours.

``--workers 6`` compiles cases in as many processes; what is timed or verified has the device alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

sys.path.insert(0, str(Path(__file__).parent))
from _record import record, write
from _together import Alone, queued

import shiplap as sl  # noqa: F401
import shiplap_dense as dense
from shiplap.inductor import fusion_choices, switches
from shiplap.tuning.measure import CudaClock, RacePlan, race_runs
from shiplap_dense import ops

SOURCES = [
    "benchmarks/dense_gpu.py",
    "packages/shiplap-dense/src/shiplap_dense/*.triton.jinja",
    "packages/shiplap-dense/src/shiplap_dense/cuda.py",
    "packages/shiplap/src/shiplap/inductor/select_candidate.py",
    "packages/shiplap/src/shiplap/inductor/pytorch_candidate.py",
    "packages/shiplap/src/shiplap/tuning/measure.py",
]
MODE = "max-autotune-no-cudagraphs"
RACES, SLOWER = 2, 0.99
SIDES = ("inductor", "again", "anew"), ("shiplap", "ours", "ours anew")
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
    rng = torch.Generator().manual_seed(m)  # how unequal the groups are decides who is fast
    ends = [*torch.randint(0, m, (g - 1,), generator=rng).sort().values.tolist(), m]
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


def errors(fn: Fn, args: tuple[Tensor, ...], runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """How far each of ``runs`` is from ``fn`` in float64."""
    with torch.no_grad():
        want = fn(*(a.double() if a.is_floating_point() else a for a in args)).double()
        return {row: float((run()[0].double() - want).norm() / want.norm()) for row, run in runs.items()}


def measure(
    name: str, plain: Fn, ours: Fn, args: tuple[Tensor, ...], op: Any, clock: CudaClock, fallback: bool = False
) -> dict[str, Any]:
    """All rows of one case, and how far from float64 each program is. ``fallback``: nothing is selected."""
    seconds: dict[str, float] = {}
    chosen = reason = "fallback"
    with torch.no_grad():
        runs = {"eager": clock.ready(lambda: (plain(*args),))}
    if not fallback:
        runs["shiplap"], seconds["shiplap"] = compiled(ours, args, clock)
        choice = fusion_choices(op.spec.name)[-1]  # IndexError: the graph comes from a cache, which has no choices
        chosen, reason = choice.chosen, choice.reason
    template = not fallback and not chosen.startswith("reference")
    with switches(op, fusion=False, only=chosen) if template else switches(op, templates=False):
        runs["control"], seconds["control"] = compiled(ours, args, clock)
    for row in ("inductor", "again", "anew"):
        try:
            with fresh_cache() if row == "anew" else nullcontext():
                runs[row], seconds[row] = compiled(plain, args, clock)
        except Exception as e:
            print(f"{name}: inductor failed: {str(e)[:200]}", flush=True)
    halves = raced(runs, clock)
    if "shiplap" in runs and sum(halves["inductor"]) < SLOWER * sum(halves["shiplap"]):
        for row in SIDES[1][1:]:
            with tempfile.TemporaryDirectory() as kept, fresh_cache(), patch.dict(os.environ, SHIPLAP_CACHE_DIR=kept):
                runs[row], seconds[row] = compiled(ours, args, clock)
        halves = raced(runs, clock)
    apart = errors(plain if "grouped" not in name else ours, args, runs)
    times_us = {row: round(mean(each), 2) for row, each in halves.items()}
    print(f"{name:28s} " + " ".join(f"{r} {t:8.1f}" for r, t in times_us.items()) + f"  {chosen}", flush=True)
    print(f"    {reason}; errors " + " ".join(f"{r} {e:.1e}" for r, e in apart.items()), flush=True)
    return {
        "case": name,
        "us": times_us,
        "races_us": halves,
        "ratio": round(times_us["inductor"] / times_us["shiplap"], 4) if "shiplap" in times_us else None,
        "ratio of sides": ratio_of_sides(times_us),
        "noise": round(noise(halves), 4),
        "error": apart,
        "compile_s": seconds,
        "chosen": chosen,
        "reason": reason,
    }


def raced(runs: dict[str, Callable[[], Any]], clock: CudaClock) -> dict[str, list[float]]:
    """The median of each row in each race, in microseconds."""
    plan = RacePlan(rounds=120, seconds=2.0, hopeless=1e9)
    with torch.no_grad():
        races = [race_runs(dict(enumerate(runs.values())), clock, plan) for _ in range(RACES)]
    return {row: [round(times[i].median * 1e6, 2) for times in races] for i, row in enumerate(runs)}


def ratio_of_sides(times_us: dict[str, float]) -> float | None:
    """The median of the times of max-autotune's programs over that of ours; None if a side has none."""
    theirs, mine = ([times_us[row] for row in side if row in times_us] for side in SIDES)
    return round(median(theirs) / median(mine), 4) if theirs and mine else None


def noise(races: dict[str, list[float]]) -> float:
    """The most by which equal programs differ: one in two races, and those of one side in each race."""
    sides = [[races[row] for row in side if row in races] for side in SIDES]
    pairs = [each for side in sides for each in side]
    pairs += [list(together) for side in sides for together in zip(*side, strict=True)]
    return max((max(pair) / min(pair) - 1 for pair in pairs), default=0.0)


def summary(results: list[dict[str, Any]]) -> str:
    """How many cases are below 0.99 of max-autotune, and which of them by more than their noise."""
    timed = [c for c in results if c.get("ratio")]
    below = [c for c in timed if c["ratio"] < SLOWER]
    lost = [c["case"] for c in below if 1 - c["ratio"] > c["noise"]]
    middle = median(c["ratio"] for c in timed) if timed else 0.0
    sides = sum((c["ratio of sides"] or 1) < SLOWER for c in timed)
    told = f"{len(timed)} cases, median {middle:.3f}, {len(below)} below 0.99 ({sides} by sides), outside noise: "
    return told + str(lost or "none")


def cases(wanted: list[str]) -> list[tuple[str, Any]]:
    """Those with one of the parts in their name, in the order of the parts; all of them without any."""
    listed: list[tuple[str, Any]] = []
    for matmul, conv, grouped in ((MATMUL, CONV, GROUPED), (MORE_MATMUL, MORE_CONV, MORE_GROUPED)):
        listed += [(f"matmul {m}x{n}x{k}", (matmul_case, (m, n, k))) for m, n, k in matmul]
        listed += [(f"conv {c[0]}->{c[2]} {c[3]}x{c[3]}/{c[4]} at {c[1]}", (conv_case, c)) for c in conv]
        listed += [(f"grouped {g[0]} over {g[1]}: {g[2]}x{g[3]}", (grouped_case, g)) for g in grouped]
    return list(dict(case for part in wanted or [""] for case in listed if part in case[0]).items())


def measured_here(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    started = time.monotonic()
    alone = Alone(options.lock) if options.lock else None
    if alone is not None:
        alone.searches()
        alone.selections()
        alone.around(sys.modules[__name__], "raced")
        alone.around(sys.modules[__name__], "errors")
    wanted = cases(options.case)
    for name, (make, shape) in queued(wanted, options.queue) if options.queue else wanted:
        if time.monotonic() - started > options.seconds:
            print(f"{name}: not started, time is up")
            continue
        begun = time.monotonic()
        if alone is not None:
            alone.seconds.clear()
        print(f"{name}: begun", flush=True)
        try:
            told = measure(name, *make(*shape), CudaClock("cuda"), options.fallback)
        except Exception:
            print(f"{name}: failed\n{traceback.format_exc()[-2000:]}", flush=True)
            continue
        if alone is not None:
            seconds = {"all": time.monotonic() - begun, **alone.seconds}
            told["seconds"] = {n: round(s, 1) for n, s in seconds.items()}
        yield told
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def measured_together(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases in processes of their own; one that is not done in time is ended, and what it has told stays."""
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as made:
        lines = options.lines or Path(made) / "lines"
        command = [sys.executable, __file__, *options.case, "--seconds", str(options.seconds), "--lines", str(lines)]
        command += ["--fallback"] * options.fallback
        command += ["--queue", f"{made}/queue", "--lock", options.lock or f"{made}/lock"]
        running = [subprocess.Popen(command) for _ in range(options.workers)]
        for process in running:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        text = lines.read_text(encoding="utf-8") if lines.exists() else ""
    told = {case["case"]: case for case in map(json.loads, text.splitlines())}
    return [told[name] for name, _ in cases([]) if name in told]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", nargs="*", help="parts of names of cases; all of them by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after this time")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile")
    parser.add_argument("--fallback", action="store_true", help="select nothing: the fallback beside its peers")
    parser.add_argument("--queue", type=Path, help="file: how many of the cases processes have taken")
    parser.add_argument("--lock", help="file: who runs on the device has it locked")
    parser.add_argument("--lines", type=Path, help="a line of JSON for each case, as soon as it is measured")
    options = parser.parse_args()
    results = measured_together(options) if options.workers else []
    for case in () if options.workers else measured_here(options):
        results.append(case)
        if options.lines:
            with open(options.lines, "a", encoding="utf-8") as file:
                print(json.dumps(case), file=file)
    print(summary(results))
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
