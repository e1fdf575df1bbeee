"""2:4 and slid 6:8 weights on a GPU against dense products of 8 and 16 bits, and against torch's own sparse product.

``gemm``: captured products, L2 flushed before each, runs taking turns, medians; algorithms chosen beforehand among all
that the library makes a plan of. ``overhead``: one call among many in a row, wall clock. ``activations``: quantise and
lift, against a copy of as many bytes. ``blocks``: Llama-like transformer blocks of random weights, prefill of 8192
tokens and decode under CUDA graphs. Run: ``python benchmarks/slidesparse_gpu.py [--only gemm,overhead,...]``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _record import record, write

import shiplap as sl
from shiplap.impl.native import build
from shiplap.kernels.slidesparse import formats, layers, lt, ops
from shiplap.kernels.slidesparse.cuda import CONFIGS
from shiplap.kernels.slidesparse.lt import kernels, tuning
from shiplap.op import choices
from shiplap.op.config import Config
from shiplap.tune.measure import CudaClock, Plan, race

SOURCES = [
    "benchmarks/slidesparse_gpu.py", "src/shiplap/kernels/slidesparse/csrc/lt/*",
    "src/shiplap/kernels/slidesparse/cuda/*.py", "src/shiplap/kernels/slidesparse/lt/*.py",
]  # fmt: skip
FP8, INT8, BF16, CUDA = torch.float8_e4m3fn, torch.int8, torch.bfloat16, "cuda"
SQUARES = (1024, 2048, 4096, 8192)
TALL = ((4096, 28672, 8192), (8192, 4096, 14336), (16384, 8192, 8192))  # m, n, k
PATTERNS = {"2:4": 2, "4:6": 3, "6:8": 4}
SHAPES = {  # hidden, query and key-value heads of 128, intermediate
    "8B": (4096, 32, 8, 14336), "70B": (8192, 64, 8, 28672),
}  # fmt: skip
SIDE = 4096  # of the weight whose calls are counted
BATCHES = (1, 8, 16, 32, 64, 128, 256)
Run = Callable[[], Any]


def values(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    if dtype == INT8:
        return torch.randint(-127, 128, (rows, k), device=CUDA, dtype=INT8)
    return torch.randn(rows, k, device=CUDA, dtype=BF16).to(dtype)


def two_of_four(n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Random, with two non-zeros in each four: what a slid weight is as well."""
    ways = torch.tensor([3, 5, 6, 9, 10, 12], device=CUDA)[:, None] >> torch.arange(4, device=CUDA) & 1
    kept = ways.to(INT8)[torch.randint(0, 6, (n, k // 4), device=CUDA)].view(n, k)
    return values(n, k, INT8) * kept if dtype == INT8 else (values(n, k, BF16) * kept).to(dtype)


def show(section: str, row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps({"section": section, **row}), flush=True)
    return row


def timed(runs: dict[str, Run], seconds: float = 0.6) -> dict[str, float]:
    """Medians in microseconds of captured runs; what cannot run is left out, with its reason."""
    ready: dict[str, Run] = {}
    clock = CudaClock(CUDA, "always")  # holds its graphs, and their memory, until it goes
    for name, run in runs.items():
        try:
            ready[name] = clock.ready(run)
        except Exception as e:
            print(f"# {name}: {str(e).splitlines()[0][:160]}", flush=True)
            torch.cuda.synchronize()
    found = race(dict(enumerate(ready.values())), clock, Plan(rounds=40, least=5, seconds=seconds, hopeless=1e9))
    return {name: round(found[i].median * 1e6, 2) for i, name in enumerate(ready) if i in found}


# --- choosing algorithms ----------------------------------------------------------------------------------------------


def quick(run: Run) -> float:
    """The best of three, in milliseconds."""
    run()
    best = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        best.append(start.elapsed_time(end))
    return min(best)


_picked: dict[tuple[sl.Op, int, int, int], dict[str, int]] = {}


def chosen(op: sl.Op, args: tuple[Any, ...], m: int, n: int, k: int) -> dict[str, int]:
    """The fastest algorithm of a leaf product, put into force for its bucket; empty if there is none."""
    if (op, m, n, k) in _picked:
        return _picked[op, m, n, k]
    kernel, call, ranked = next(k for k in op.kernels[CUDA] if k.name == "lt"), op._checker.bind(args), []
    problem, stream = tuning.problem_of(op, 0, m, n, k), torch.cuda.current_stream().cuda_stream

    def rank(config: dict[str, int]) -> None:
        run = kernel.variant(Config.of(config)).run
        try:
            ranked.append((quick(lambda: run(call)), config))
        except sl.ShiplapError as e:
            print(f"# {config}: {e.got}", flush=True)

    for config in (kernel.space.default(call.env).as_dict(), *tuning.algorithms(op, problem, stream, splits=(0,))):
        rank(config)
    ranked.sort(key=lambda pair: pair[0])
    if op in kernels.SPARSE and m <= tuning.FEW_ROWS:
        for _, config in ranked[:4]:
            for split in tuning.SPLITS if config["ALG"] >= 0 else ():
                if tuning.taken(op, problem, {**config, "SPLIT_K": split}, stream):
                    rank({**config, "SPLIT_K": split})
    if not ranked:  # the library does not do this product at all
        return {}
    best = _picked[op, m, n, k] = min(ranked, key=lambda pair: pair[0])[1]
    key = (CUDA, *op.rule.key(call))
    choices.install([choices.Entry(op.spec.name, op.identity, key, "lt", Config.of(best))])
    return best


def sparse_case(dtype: torch.dtype, m: int, n: int, k: int, pairs: int) -> tuple[Run, dict[str, int]]:
    """Our product with a slid weight of depth ``k`` before lifting."""
    depth = formats.lifted_depth(k, pairs)
    blob, x = lt.compress(two_of_four(n, depth, dtype)), values(m, depth, dtype)
    op = {FP8: ops.sparse_mm_fp8, INT8: ops.sparse_mm_int8, BF16: ops.sparse_mm_bf16}[dtype]
    args = (x, blob, torch.ones(n, device=CUDA) if dtype == FP8 else n, ops.CUSPARSELT)
    picked = chosen(op, args, m, n, depth)
    if picked:
        return (lambda: op(*args)), picked
    return (lambda: lt.product(x, blob, n, BF16, sparse=True)), {"without scales": 1}


# --- products ---------------------------------------------------------------------------------------------------------


def dense_runs(m: int, n: int, k: int) -> dict[str, Run]:
    a16, b16 = values(m, k, BF16), values(n, k, BF16)
    a8, b8, ai, bi = a16.to(FP8), b16.to(FP8), values(m, k, INT8), values(n, k, INT8)
    one, rows, columns = torch.ones((), device=CUDA), torch.ones(m, 1, device=CUDA), torch.ones(1, n, device=CUDA)
    found: dict[str, Run] = {
        "torch bf16": lambda: a16 @ b16.t(),
        "torch fp8 tensorwise": lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=BF16, use_fast_accum=True),
        "torch fp8 rowwise": lambda: torch._scaled_mm(a8, b8.t(), rows, columns, out_dtype=BF16, use_fast_accum=True),
        "torch int8": lambda: torch._int_mm(ai, bi.t()),
    }
    flat_rows, flat_columns = rows.flatten(), columns.flatten()
    chosen(ops.mm_fp8, (a8, b8, flat_rows, flat_columns), m, n, k)
    chosen(ops.mm_int8, (ai, bi), m, n, k)
    found["fp8 rowwise"] = lambda: ops.mm_fp8(a8, b8, flat_rows, flat_columns)
    found["int8"] = lambda: ops.mm_int8(ai, bi)
    return found


def torch_sparse(dtype: torch.dtype, m: int, n: int, k: int) -> Run:
    """torch's own 2:4 product, its algorithm searched."""
    blob, x = torch._cslt_compress(two_of_four(n, k, dtype)), values(m, k, dtype)
    kind = {"out_dtype": torch.int32 if dtype == INT8 else BF16, "transpose_result": True}
    alg = torch._cslt_sparse_mm_search(blob, x.t(), **kind)
    return lambda: torch._cslt_sparse_mm(blob, x.t(), alg_id=alg, **kind)


def gemm() -> Iterator[dict[str, Any]]:
    for m, n, k in (*((s, s, s) for s in SQUARES), *TALL):
        runs, picked = dense_runs(m, n, k), {}
        for dtype, name in ((FP8, "fp8"), (INT8, "int8")):
            try:
                runs[f"torch sparse {name}"] = torch_sparse(dtype, m, n, k)
            except RuntimeError as e:
                print(f"# torch sparse {name}: {str(e).splitlines()[0][:160]}", flush=True)
            for pattern, pairs in PATTERNS.items():
                if pairs != 3 or m == n == k == 8192:
                    runs[f"{name} {pattern}"], picked[f"{name} {pattern}"] = sparse_case(dtype, m, n, k, pairs)
        if m == n == k:
            runs["bf16 2:4"], picked["bf16 2:4"] = sparse_case(BF16, m, n, k, 2)
        us = timed(runs)
        flops = {name: round(2e-6 * m * n * k / t, 1) for name, t in us.items()}
        yield show("gemm", {"m": m, "n": n, "k": k, "us": us, "tflops": flops, **ratios(us), "algorithms": picked})
        torch.cuda.empty_cache()


def ratios(us: dict[str, float]) -> dict[str, float]:
    """What the goals ask for: sparse against the fastest dense product of torch in the same type."""
    fp8 = min((us[n] for n in ("torch fp8 tensorwise", "torch fp8 rowwise") if n in us), default=0)
    against = {"fp8 2:4": fp8, "fp8 6:8": fp8, "int8 2:4": us.get("torch int8", 0), "int8 6:8": us.get("torch int8", 0)}
    found = {f"{n} over dense": round(base / us[n], 3) for n, base in against.items() if n in us and base}
    if "fp8 2:4" in us and "torch fp8 rowwise" in us:
        found["fp8 2:4 over rowwise"] = round(us["torch fp8 rowwise"] / us["fp8 2:4"], 3)
    return found


# --- what a call costs ------------------------------------------------------------------------------------------------


def wall(runs: dict[str, Run], calls: int = 200, rounds: int = 15) -> dict[str, float]:
    """Microseconds from call to call, the medians of rounds that take turns."""
    samples: dict[str, list[float]] = {}
    for name, run in list(runs.items()):
        try:
            for _ in range(40):  # attaches the native binding
                run()
            samples[name] = []
        except (sl.ShiplapError, RuntimeError) as e:
            print(f"# {name}: {str(e).splitlines()[0][:160]}", flush=True)
            del runs[name]
    for _ in range(rounds):
        for name, run in runs.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                run()
            issued = time.perf_counter()
            torch.cuda.synchronize()
            samples[name].append((time.perf_counter() - started) / calls * 1e6)
            samples.setdefault(f"{name}, host", []).append((issued - started) / calls * 1e6)
    return {name: round(median(found), 2) for name, found in samples.items()}


def overhead() -> Iterator[dict[str, Any]]:
    n = k = SIDE
    for m in (16, 64, 128):
        runs = dense_runs(m, n, k)
        del runs["torch bf16"]
        if m <= 16:
            del runs["torch int8"]  # takes more than 16 rows only
        runs["fp8 2:4"], _ = sparse_case(FP8, m, n, k, 2)
        runs["int8 2:4"], _ = sparse_case(INT8, m, n, k, 2)
        for dtype, name in ((FP8, "fp8"), (INT8, "int8")):
            try:
                runs[f"torch sparse {name}"] = torch_sparse(dtype, m, n, k)
            except RuntimeError as e:
                print(f"# torch sparse {name}: {str(e).splitlines()[0][:160]}", flush=True)
        with torch.inference_mode():
            call = wall(runs)
        row = {"m": m, "n": n, "k": k, "us a call": call, "us captured": timed(runs, 0.3)}
        row["2:4 call over _scaled_mm"] = round(call["fp8 2:4"] / call["torch fp8 rowwise"], 3)
        if "torch sparse fp8" in call:
            row["torch sparse call over ours"] = round(call["torch sparse fp8"] / call["fp8 2:4"], 1)
        yield show("overhead", row)


# --- activations ------------------------------------------------------------------------------------------------------


def activations() -> Iterator[dict[str, Any]]:
    shapes = [(8192, 8192), (16384, 8192), (8192, 14336), (8192, 4096), (128, 8192)]
    cases = [(ops.quantise_fp8, p, *s) for s in shapes for p in (2, 4)]
    for op, pairs, m, k in (*cases, (ops.quantise_fp8, 3, 8192, 8192), (ops.quantise_int8, 4, 8192, 8192)):
        yield show("activations", {"op": op.spec.opname, "pairs": pairs, **activation(op, pairs, m, k)})


def activation(op: sl.Op, pairs: int, m: int, k: int) -> dict[str, Any]:
    """Every config against a copy of as many bytes."""
    call = op._checker.bind((torch.randn(m, k, device=CUDA, dtype=BF16), pairs))
    kernel = op.kernels[CUDA][0]
    runs: dict[str, Run] = {str(c): lambda c=c: kernel.variant(Config.of(c)).run(call) for c in CONFIGS}
    moved = m * k * 2 + m * formats.lifted_depth(k, pairs)
    source = torch.empty(moved // 2, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    us = timed({**runs, "copy": lambda: target.copy_(source)}, 0.25)
    best = min((name for name in us if name != "copy"), key=lambda name: us[name])
    default = us.get(str(kernel.space.default(call.env).as_dict()))
    return {
        "m": m, "k": k, "us": us, "best": best, "of copy bandwidth": round(us["copy"] / us[best], 3),
        "default of copy bandwidth": default and round(us["copy"] / default, 3), "GB/s": round(moved / us[best] / 1e3),
    }  # fmt: skip


# --- blocks -----------------------------------------------------------------------------------------------------------


class Linear:
    """A layer in one of the modes that compete."""

    def __init__(self, n: int, k: int, mode: str, rows: int) -> None:
        kind, _, pattern = mode.partition(" ")
        self.kind, self.pairs, self.sparse = kind, PATTERNS.get(pattern, 2), pattern in PATTERNS
        dtype = {"fp8": FP8, "int8": INT8}.get(kind.removeprefix("torch-"), BF16)
        self.weight, self.packed = None, None
        self.scale = torch.full((n,), 0.5 / k, device=CUDA) if dtype != BF16 else n
        mp, depth = -(-rows // 16) * 16, formats.lifted_depth(k, self.pairs)
        if self.sparse:
            self.packed = lt.compress(two_of_four(n, depth, dtype))
            op = {FP8: ops.sparse_mm_fp8, INT8: ops.sparse_mm_int8, BF16: ops.sparse_mm_bf16}[dtype]
            x = values(mp, depth, dtype)
            chosen(op, (x, self.packed, self.scale if dtype == FP8 else n, ops.CUSPARSELT), mp, n, depth)
        else:
            self.weight = values(n, k, dtype) if dtype != BF16 else values(n, k, BF16) * k**-0.5
            if kind == "fp8":
                ones = torch.ones(mp, device=CUDA)
                chosen(ops.mm_fp8, (values(mp, k, FP8), self.weight, ones, self.scale), mp, n, k)
            if kind == "int8":
                chosen(ops.mm_int8, (values(mp, k, INT8), self.weight), mp, n, k)

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "bf16" and not self.sparse:
            return F.linear(x, self.weight)
        if self.kind == "torch-fp8":  # the peer: our quantisation, torch's rowwise product
            q, scale = ops.quantise_fp8(x, 2)
            out = torch._scaled_mm(q, self.weight.t(), scale[:, None], self.scale[None], out_dtype=BF16,
                                   use_fast_accum=True)  # fmt: skip
            return out[: len(x)]
        op = {"fp8": layers.linear_fp8, "int8": layers.linear_int8, "bf16": layers.linear_bf16}[self.kind]
        return op(x, self.scale, self.weight, self.packed, None, self.pairs, ops.CUSPARSELT)


class Block:
    """A transformer block; decode attends to 1024 cached tokens, which all modes share."""

    def __init__(self, shape: tuple[int, int, int, int], mode: str, rows: int, decode: bool) -> None:
        hidden, self.heads, self.kv, inner = shape
        self.decode, self.rows = decode, rows
        width = 128 * (self.heads + 2 * self.kv)
        sizes = ((width, hidden), (hidden, 128 * self.heads), (2 * inner, hidden), (hidden, inner))
        self.qkv, self.out, self.up, self.down = (Linear(n, k, mode, rows) for n, k in sizes)
        self.norm = torch.ones(hidden, device=CUDA, dtype=BF16)
        if decode:
            self.cache = torch.randn(2, rows, self.kv, 1024, 128, device=CUDA, dtype=BF16)

    def __call__(self, x: Tensor) -> Tensor:
        qkv = self.qkv(F.rms_norm(x, x.shape[-1:], self.norm)).view(self.rows, -1, 128)
        q, k, v = qkv.split((self.heads, self.kv, self.kv), 1)
        if self.decode:
            k, v = self.cache
            mixed = F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
        else:
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        x = x + self.out(mixed.reshape(self.rows, -1))
        gate, up = self.up(F.rms_norm(x, x.shape[-1:], self.norm)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


MODES = ("bf16", "torch-fp8", "fp8", "fp8 2:4", "fp8 6:8", "int8", "int8 2:4", "int8 6:8", "bf16 2:4")


def blocks() -> Iterator[dict[str, Any]]:
    for name, shape in SHAPES.items():
        for rows, decode in ((8192, False), *((b, True) for b in BATCHES)):
            x, runs = torch.randn(rows, shape[0], device=CUDA, dtype=BF16), {}
            modes = MODES if rows in (8192, 16, 128) else MODES[:-1]
            for mode in modes:
                block = Block(shape, mode, rows, decode)
                runs[mode] = lambda block=block, x=x: block(x)
            us = timed(runs, 0.4)
            best = min(us, key=lambda mode: us[mode])
            speed = {mode: round(us["torch-fp8" if "fp8" in mode else "int8" if "int8" in mode else "bf16"] / t, 3)
                     for mode, t in us.items()}  # fmt: skip
            yield show("blocks", {"model": name, "rows": rows, "decode": decode, "us": us, "over own dense": speed,
                                  "fastest": best, "fastest over bf16": round(us["bf16"] / us[best], 3)})  # fmt: skip
            del runs
            torch.cuda.empty_cache()


SECTIONS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "overhead": overhead, "activations": activations, "gemm": gemm, "blocks": blocks,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    parser.add_argument("--json", type=Path, help="file for the record; written after each section")
    parser.add_argument("--seconds", type=float, default=230, help="stop before the next row when so many have passed")
    options = parser.parse_args()
    if (why := lt.available(CUDA)) is not True:
        sys.exit(f"no 2:4 products here: {why}")
    torch.manual_seed(0)
    ends = time.monotonic() + options.seconds
    build(ops.mm_fp8)  # one translation unit binds all leaf ops
    device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    libraries = dict(zip(("cublaslt", "cusparselt"), lt.versions(), strict=True))
    measured: dict[str, Any] = {}
    print(f"# {device}, torch {torch.__version__}, {libraries}, {kernels.WORKSPACE} bytes of workspace", flush=True)
    with torch.no_grad():
        for section in options.only.split(","):
            rows = measured[section] = []
            for row in SECTIONS[section]():
                rows.append(row)
                if options.json:
                    write(options.json, record(SOURCES, ["triton"], device, libraries=libraries, **measured))
                if time.monotonic() > ends:
                    print(f"# stopped after {options.seconds:.0f} s in {section}", flush=True)
                    return


if __name__ == "__main__":
    main()
