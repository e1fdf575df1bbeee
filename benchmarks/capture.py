"""CUDA graphs: which shipped ops can be captured, whether the audit tells bad ops from good ones, what a call costs.

Needs a GPU, nvcc and Triton; less than five minutes on one H200. Four parts:

``ops``: every op of our families, audited with ``cuda_graph`` and ``cudagraph_trees``; where an op has no kernel for
the GPU its reference runs, and where it cannot be captured the row has the reason.
``zoo``: known-bad ops must be flagged, in the words that are expected, and known-good ones must not be.
``measure_cost``: the cost card of one op as a Triton kernel, as a C ABI kernel that nvcc built, and as its reference.
``sanitizer``: a kernel that writes out of bounds and one that does not, under compute-sanitizer, where it is there.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _record import ROOT, record, write

import shiplap as sl
from shiplap.audit import audit, measure_cost, sanitizer
from shiplap.audit.checks import sanitizer as sanitizer_check
from shiplap.errors import ShiplapError
from shiplap.plugin_api.installed import families
from shiplap.render.facts import nvidia_driver
from shiplap.sampling.samples import Samples
from shiplap_headers import include_dir

AUDIT = "packages/shiplap/src/shiplap/audit"
SOURCES = [
    "benchmarks/capture.py",
    "packages/shiplap-testing/src/shiplap_testing/zoo/gpu/*.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/ops.py",
    "packages/shiplap-dense/src/shiplap_dense/cuda.py",
    *(f"{AUDIT}/{name}.py" for name in ("capture", "cost", "sanitizer", "trace")),
    *(f"{AUDIT}/checks/{name}.py" for name in ("cuda_graph", "cudagraph_trees", "sanitizer")),
]
GRAPHS = ["cuda_graph", "cudagraph_trees"]
SEED, DEVICE = 20261121, "cuda"
SECONDS, PER_OP_S = 270, 25
LATE = "not run: out of time"
INCLUDE = include_dir()

NVCC = """
#include <cuda_runtime.h>
#include "shiplap/abi.h"
__global__ void twice(const float* x, float* out, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = 2 * x[i];
}
extern "C" SL_EXPORT int twice_cuda(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  long long n = x->shape[0];
  if (n == 0) return SL_OK;
  twice<<<(unsigned)((n + 255) / 256), 256, 0, (cudaStream_t)ctx->stream>>>(
      (const float*)x->data, (float*)out->data, n);
  return cudaPeekAtLastError() == cudaSuccess ? SL_OK : SL_INTERNAL;
}"""


if importlib.util.find_spec("triton"):
    import triton
    import triton.language as tl

    @triton.jit
    def twice_triton(x, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)


class Clock:
    """Seconds left for the whole run."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end


def shipped() -> Iterator[sl.Op]:
    """Every op of every family of kernels, once."""
    seen: dict[str, sl.Op] = {}
    for family in (each.module for each in families()):
        for value in (v for name in (family, f"{family}.ops") for v in vars(importlib.import_module(name)).values()):
            if isinstance(value, sl.Op):
                seen.setdefault(value.spec.name, value)
    yield from (seen[name] for name in sorted(seen))


def looked(op: sl.Op, checks: list[str], clock: Clock) -> dict[str, dict[str, str]]:
    """``check → verdict and evidence``; an error of the audit itself is a verdict as well."""
    if clock.over:
        return {check: {"verdict": "skip", "evidence": LATE} for check in checks}
    try:
        results = audit(op, checks=checks, seed=SEED, device=DEVICE, budget_s=PER_OP_S)
    except (ShiplapError, RuntimeError) as e:
        return {check: {"verdict": "error", "evidence": " ".join(str(e).split())[:300]} for check in checks}
    return {f.check: {"verdict": f.verdict, "evidence": f.evidence} for f in results}


def ops(clock: Clock) -> list[dict[str, Any]]:
    rows = []
    for op in shipped():
        began = time.monotonic()
        kernels = [k.name for k in op.kernels.get("cuda", ())] or ["reference"]
        results = looked(op, GRAPHS, clock)
        rows.append({"op": op.spec.name, "runs": kernels, **results, "seconds": round(time.monotonic() - began, 1)})
    return rows


def zoo(clock: Clock) -> dict[str, Any]:
    """Each bad op with the check that flagged it, in the words expected; each good one with its verdicts."""
    from shiplap_testing.zoo import gpu

    sound = [{"op": s.name, **looked(s.op, GRAPHS, clock)} for s in gpu.GOOD]
    rows = []
    for specimen in gpu.BAD:
        row: dict[str, Any] = {"op": specimen.name, "expected": gpu.EVIDENCE[specimen.name], "flagged_by": []}
        if specimen.name in gpu.TWO_DEVICES and torch.cuda.device_count() < 2:
            row["not_run"] = "needs two devices"
            rows.append(row)
            continue
        said = []
        for check in sorted(specimen.flagged_by):  # one at a time: a check may wait for another that failed
            results = looked(specimen.op, [check], clock)[check]
            row["flagged_by"] += [check] if results["verdict"] == "fail" else []
            said.append(results["evidence"])
        row["said"] = "; ".join(said)[:400]
        row["as_expected"] = bool(row["flagged_by"]) and row["expected"] in "; ".join(said)
        rows.append(row)
    return {"bad": rows, "good": sound}


def declared(name: str) -> sl.Op:
    """``x * 2``: the same op under three names, one per kind of kernel."""

    def twice(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x * 2

    return sl.op(f"bench_capture::{name}")(twice)


def by_triton() -> sl.Op:
    import triton

    op = declared("triton")

    @op.kernel("cuda", name="triton")
    def _(x, *, out):
        if x.numel():
            twice_triton[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)

    return op


def by_nvcc() -> sl.Op:
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise FileNotFoundError("no nvcc on PATH")
    folder = Path(tempfile.mkdtemp(prefix="shiplap-bench-"))
    (folder / "twice.cu").write_text(NVCC)
    library = folder / "libtwice.so"
    command = [compiler, "-O2", "-shared", "-Xcompiler", "-fPIC", f"-I{INCLUDE}", "-arch=native"]
    subprocess.run([*command, "-o", library, folder / "twice.cu"], check=True, capture_output=True, text=True)
    op = declared("nvcc")
    op.kernel("cuda", sl.cabi(library, "twice_cuda", without_signature=True))
    return op


def costs() -> list[dict[str, Any]]:
    """The card of each kind of kernel, or why there is none. The reference is the control: torch's own kernel."""
    rows = []
    for kind, make in (("triton", by_triton), ("nvcc", by_nvcc), ("reference", lambda: declared("reference"))):
        try:
            op = make()
            x = torch.randn(1000, device=DEVICE)
            assert torch.equal(op(x), x * 2)
            rows.append({"kernel": kind, **vars(measure_cost(op, device=DEVICE))})
        except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as e:
            detail = getattr(e, "stderr", "") or str(e)
            rows.append({"kernel": kind, "missing": " ".join(str(detail).split())[:300]})
    return rows


def sanitized() -> list[dict[str, str]]:
    """Both ops at once, each in a process of its own."""
    from shiplap_testing.zoo.gpu import memory

    if not sanitizer.sanitizer_version():
        return [{"op": name, "verdict": "skip", "evidence": "compute-sanitizer is not on PATH"} for name in memory.OPS]

    def one(name: str) -> dict[str, str]:
        op = memory.OPS[name]
        cases = list(islice(sanitizer_check.sanitizer_cases(Samples(op, SEED, DEVICE)), 6))
        results = sanitizer_check.observe_under_tool("memcheck", op, cases)
        verdict = "fail" if results.problem else "skip" if results.skip else "ok"
        return {"op": name, "verdict": verdict, "evidence": (results.problem or results.skip or results.note)[:600]}

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, memory.OPS))


def timed(what: str, run: Callable[[], Any], spent: dict[str, float]) -> Any:
    began = time.monotonic()
    results = run()
    spent[what] = round(time.monotonic() - began, 1)
    print(f"{what}: {spent[what]} s", flush=True)
    return results


def measure(seconds: float) -> dict[str, Any]:
    clock = Clock(seconds)
    spent: dict[str, float] = {}
    cards = timed("cost", costs, spent)  # first: nothing else has left anything behind
    table = timed("ops", lambda: ops(clock), spent)
    memory = (
        timed("sanitizer", sanitized, spent) if not clock.over else [{"op": "-", "verdict": "skip", "evidence": LATE}]
    )
    specimens = timed("zoo", lambda: zoo(clock), spent)
    device = f"{torch.cuda.get_device_name()}, driver {nvidia_driver()}, CUDA {torch.version.cuda}"
    return record(
        SOURCES,
        ["triton"],
        device=device,
        compute_sanitizer=sanitizer.sanitizer_version() or "absent",
        seed=SEED,
        devices=torch.cuda.device_count(),
        seconds=spent,
        cost=cards,
        ops=table,
        sanitizer=memory,
        zoo=specimens,
    )


def show(result: dict[str, Any]) -> None:
    print(f"\n{'shipped op':34}{'runs':14}{'cuda_graph':12}{'trees':7}why")
    for row in result["ops"]:
        graph, trees = row["cuda_graph"], row["cudagraph_trees"]
        why = "" if graph["verdict"] == "ok" else graph["evidence"]
        why = why or ("" if trees["verdict"] == "ok" else trees["evidence"])
        print(f"{row['op']:34}{'/'.join(row['runs'])[:13]:14}{graph['verdict']:12}{trees['verdict']:7}{why[:110]}")
    print(f"\n{'ns per call, x * 2':20}{'bound by':12}{'raw':>10}{'eager':>10}{'compiled':>10}{'captured':>10}")
    for row in result["cost"]:
        if "missing" in row:
            print(f"{row['kernel']:20}{row['missing'][:90]}")
            continue
        times = (row[name] for name in ("raw_ns", "eager_ns", "compiled_ns", "captured_ns"))
        cells = "".join(f"{'-' if t is None else format(t, ',.0f'):>10}" for t in times)
        print(f"{row['kernel']:20}{row['binding']:12}{cells}")
    print()
    for row in result["sanitizer"]:
        print(f"memcheck {row['op']:20}{row['verdict']:6}{row['evidence'][:120]}")
    bad, good = result["zoo"]["bad"], result["zoo"]["good"]
    for row in bad:
        if not row.get("as_expected"):
            print(f"BAD  {row['op']}: {row.get('not_run') or row['said'][:160] or 'not flagged'}")
    for row in good:
        for check in GRAPHS:
            if row[check]["verdict"] not in ("ok", "skip"):
                print(f"GOOD {row['op']}: {check} {row[check]['verdict']}: {row[check]['evidence'][:160]}")
    run = [row for row in bad if "not_run" not in row]
    silent = [
        r for r in good if r["cuda_graph"]["verdict"] == "ok" and r["cudagraph_trees"]["verdict"] in ("ok", "skip")
    ]
    print(
        f"zoo: {sum(r['as_expected'] for r in run)} of {len(run)} bad ops flagged as expected "
        f"({len(bad) - len(run)} not run), {len(silent)} of {len(good)} good ops silent"
    )
    print(f"{result['device']}; {result['versions']}; seconds {result['seconds']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH", help="write the result there, relative to the repository")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which the rest is left out, and says so")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    result = measure(options.seconds)
    if options.json:
        write(ROOT / options.json, json.loads(json.dumps(result, default=str)))
    show(result)


if __name__ == "__main__":
    main()
