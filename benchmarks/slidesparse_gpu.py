"""2:4 and slid 6:8 weights on a GPU against dense products of 8 and 16 bits, and against torch's own sparse product.

``gemm``: captured products, L2 flushed before each, runs taking turns, medians; algorithms chosen beforehand among all
that the library makes a plan of. ``overhead``: one call among many in a row, wall clock, and captured, with what the
library and what torch choose by themselves beside it. ``activations``: quantise and
lift, against a copy of as many bytes. ``blocks``: Llama-like transformer blocks of random weights, prefill of 8192
tokens and decode under CUDA graphs. Each section has its share of ``--seconds`` and drops what it has no time for; the
goals of the issue, and what came of each, are printed after each section and head the record.
Run: ``python benchmarks/slidesparse_gpu.py [--only gemm,overhead,...]``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _record import record, write
from _slidesparse_gpu import (
    BF16,
    CUDA,
    FAILED,
    FP8,
    INT8,
    TRIED,
    Run,
    chosen,
    failed,
    goals,
    over,
    put,
    show,
    timed,
    two_of_four,
    values,
    wall,
    with_config,
)

import shiplap as sl
from shiplap.declare.config import Config
from shiplap.kernels.native.binding import build
from shiplap_slidesparse import formats, layers, lt, ops
from shiplap_slidesparse.cuda.configs import CONFIGS
from shiplap_slidesparse.lt import native

SOURCES = [
    "benchmarks/slidesparse_gpu.py",
    "benchmarks/_slidesparse_gpu.py",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/csrc/lt/*.cpp",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/csrc/lt/*.h",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/cuda/*.py",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/lt/*.py",
]
SQUARES = (1024, 2048, 4096, 8192)
TALL = ((4096, 28672, 8192), (8192, 4096, 14336), (16384, 8192, 8192))  # m, n, k
PATTERNS = {"2:4": 2, "4:6": 3, "6:8": 4}
SHAPES = {  # hidden, query and key-value heads of 128, intermediate
    "8B": (4096, 32, 8, 14336),
    "70B": (8192, 64, 8, 28672),
}
SIDE = 4096  # of the weight whose calls are counted
NAMES = {FP8: "fp8", INT8: "int8", BF16: "bf16"}
Case = tuple[dict[str, Any], Callable[[], dict[str, Any]]]  # what a row is about, and its measurement


def sparse_case(
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    pairs: int,
    picked: dict[str, Any],
    name: str,
    untuned: dict[str, Run] | None = None,
) -> Run:
    """Our product with a slid weight of depth ``k`` before lifting; its algorithm goes into ``picked``."""
    depth = formats.lifted_depth(k, pairs)
    op = {FP8: ops.sparse_mm_fp8, INT8: ops.sparse_mm_int8, BF16: ops.sparse_mm_bf16}[dtype]
    args = (values(m, depth, dtype), lt.compress_weight(two_of_four(n, depth, dtype)), n, ops.CUSPARSELT)
    picked[name] = chosen(op, args, m, n, depth)
    picked[f"{name}: tried"] = TRIED[f"{op.spec.opname} {m} x {n} x {depth}"]
    if untuned is not None:
        untuned[f"{name}, untuned"] = with_config(op, args)
    return lambda: op(*args)


def scaled_case(m: int, n: int, k: int) -> Run:
    """int8 written as bfloat16, scaled by the library: half the traffic of integers, the library's own algorithm."""
    blob, x, scale = lt.compress_weight(two_of_four(n, k, INT8)), values(m, k, INT8), torch.ones(n, device=CUDA)
    if (why := lt.supports_product(x.device, INT8, BF16, native.PER_ROW)) is not True:
        raise ValueError(why)
    return lambda: lt.scaled_product(x, blob, scale, BF16)


# --- products ---------------------------------------------------------------------------------------------------------


def dense_runs(m: int, n: int, k: int) -> dict[str, Run]:
    a16, b16 = values(m, k, BF16), values(n, k, BF16)
    a8, b8, ai, bi = a16.to(FP8), b16.to(FP8), values(m, k, INT8), values(n, k, INT8)
    b16t, b8t, bit = b16.t(), b8.t(), bi.t()  # views are no part of a call
    one, rows, columns = torch.ones((), device=CUDA), torch.ones(m, 1, device=CUDA), torch.ones(1, n, device=CUDA)
    results: dict[str, Run] = {
        "torch bf16": lambda: a16 @ b16t,
        "torch fp8 tensorwise": lambda: torch._scaled_mm(a8, b8t, one, one, out_dtype=BF16, use_fast_accum=True),
        "torch fp8 rowwise": lambda: torch._scaled_mm(a8, b8t, rows, columns, out_dtype=BF16, use_fast_accum=True),
        "torch int8": lambda: torch._int_mm(ai, bit),
    }
    for name, op, args in (
        ("fp8 rowwise", ops.mm_fp8, (a8, b8, rows.flatten(), columns.flatten())),
        ("int8", ops.mm_int8, (ai, bi)),
    ):
        put(results, name, lambda op=op, args=args: chosen(op, args, m, n, k) and (lambda: op(*args)))
    return results


def torch_sparse(
    dtype: torch.dtype, m: int, n: int, k: int, picked: dict[str, Any], untuned: dict[str, Run] | None = None
) -> Run:
    """torch's own 2:4 product, its algorithm searched; that goes into ``picked``."""
    blob, x = torch._cslt_compress(two_of_four(n, k, dtype)), values(m, k, dtype).t()
    kind = {"out_dtype": torch.int32 if dtype == INT8 else BF16, "transpose_result": True}
    alg = picked[f"torch sparse {NAMES[dtype]}"] = torch._cslt_sparse_mm_search(blob, x, **kind)
    if untuned is not None:
        untuned[f"torch sparse {NAMES[dtype]}, untuned"] = lambda: torch._cslt_sparse_mm(blob, x, **kind)
    return lambda: torch._cslt_sparse_mm(blob, x, alg_id=alg, **kind)


def gemm() -> Iterator[Case]:
    for m, n, k in (*((s, s, s) for s in SQUARES), *TALL):
        yield {"m": m, "n": n, "k": k}, partial(gemm_row, m, n, k)


def gemm_row(m: int, n: int, k: int) -> dict[str, Any]:
    runs, picked = dense_runs(m, n, k), {}
    cases = [(dtype, *p) for dtype in (FP8, INT8) for p in PATTERNS.items() if p[1] != 3 or m == n == k == 8192]
    for dtype, pattern, pairs in [*cases, *([(BF16, "2:4", 2)] if m == n == k else [])]:
        name = f"{NAMES[dtype]} {pattern}"
        put(runs, name, lambda d=dtype, p=pairs, name=name: sparse_case(d, m, n, k, p, picked, name))
    put(runs, "int8 2:4 scaled to bf16", lambda: scaled_case(m, n, k), missing=True)
    for dtype in (FP8, INT8):
        put(runs, f"torch sparse {NAMES[dtype]}", lambda d=dtype: torch_sparse(d, m, n, k, picked), missing=True)
    us = timed(runs)
    flops = {name: round(2e-6 * m * n * k / t, 1) for name, t in us.items()}
    peers = {f"{n} 2:4 over torch sparse": over(us, f"torch sparse {n}", f"{n} 2:4") for n in ("fp8", "int8")}
    return {
        "us": us,
        "tflops": flops,
        **ratios(us),
        **peers,
        "fp8 2:4 tflops": flops.get("fp8 2:4"),
        "algorithms": picked,
    }


def ratios(us: dict[str, float]) -> dict[str, float]:
    """What the goals ask for: sparse against the fastest dense product of torch in the same type."""
    fp8 = min((us[n] for n in ("torch fp8 tensorwise", "torch fp8 rowwise") if n in us), default=0)
    against = {"fp8 2:4": fp8, "fp8 6:8": fp8, "int8 2:4": us.get("torch int8", 0), "int8 6:8": us.get("torch int8", 0)}
    results = {f"{n} over dense": round(base / us[n], 3) for n, base in against.items() if n in us and base}
    return {**results, "fp8 2:4 over rowwise": over(us, "torch fp8 rowwise", "fp8 2:4")}


# --- what a call costs ------------------------------------------------------------------------------------------------


def overhead() -> Iterator[Case]:
    for m in (16, 64, 128):
        yield {"m": m, "n": SIDE, "k": SIDE}, partial(overhead_row, m)


def overhead_row(m: int) -> dict[str, Any]:
    runs, untuned, picked = dense_runs(m, SIDE, SIDE), {}, {}
    del runs["torch bf16"]
    if m <= 16:
        del runs["torch int8"]  # takes more than 16 rows only
    for dtype in (FP8, INT8):
        name = f"{NAMES[dtype]} 2:4"
        put(runs, name, lambda d=dtype, name=name: sparse_case(d, m, SIDE, SIDE, 2, picked, name, untuned))
        put(
            runs,
            f"torch sparse {NAMES[dtype]}",
            lambda d=dtype: torch_sparse(d, m, SIDE, SIDE, picked, untuned),
            missing=True,
        )
    x = torch.randn(m, SIDE, device=CUDA, dtype=BF16)
    for mode in ("torch-fp8", "fp8", "fp8 2:4", "int8 2:4"):
        put(runs, f"layer {mode}", lambda mode=mode: partial(Linear(SIDE, SIDE, mode, m), x))
    with torch.inference_mode():
        call = wall(runs)
    return {
        "us a call": call,
        "us captured": timed({**runs, **untuned}, 0.4),
        "algorithms": picked,
        "2:4 call over _scaled_mm": over(call, "fp8 2:4", "torch fp8 rowwise"),
        "torch sparse call over ours": over(call, "torch sparse fp8", "fp8 2:4", 1),
    }


# --- activations ------------------------------------------------------------------------------------------------------


def activations() -> Iterator[Case]:
    shapes = [(8192, 8192), (16384, 8192), (8192, 14336), (8192, 4096), (128, 8192)]
    cases = [(ops.quantise_fp8, p, *s) for s in shapes for p in (2, 4)]
    for op, pairs, m, k in (*cases, (ops.quantise_fp8, 3, 8192, 8192), (ops.quantise_int8, 4, 8192, 8192)):
        yield {"op": op.spec.opname, "pairs": pairs, "m": m, "k": k}, partial(activation, op, pairs, m, k)


def activation(op: sl.Op, pairs: int, m: int, k: int) -> dict[str, Any]:
    """Every config against a copy of as many bytes."""
    call = op.bind((torch.randn(m, k, device=CUDA, dtype=BF16), pairs))
    kernel = op.kernels[CUDA][0]
    runs: dict[str, Run] = {str(c): lambda c=c: kernel.with_config(Config.of(c)).run_call(call) for c in CONFIGS}
    moved = m * k * 2 + m * formats.lifted_depth(k, pairs)
    source = torch.empty(moved // 2, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    us = timed({**runs, "copy": lambda: target.copy_(source)}, 0.25)
    best = min((name for name in us if name != "copy"), key=lambda name: us[name])
    default = us.get(str(kernel.space.default(call.env).as_dict()))
    return {
        "us": us,
        "best": best,
        "of copy bandwidth": round(us["copy"] / us[best], 3),
        "default of copy bandwidth": default and round(us["copy"] / default, 3),
        "GB/s": round(moved / us[best] / 1e3),
    }


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
            self.packed = lt.compress_weight(two_of_four(n, depth, dtype))
            op = {FP8: ops.sparse_mm_fp8, INT8: ops.sparse_mm_int8, BF16: ops.sparse_mm_bf16}[dtype]
            x = values(mp, depth, dtype)
            chosen(op, (x, self.packed, n, ops.CUSPARSELT), mp, n, depth)
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
            out = torch._scaled_mm(
                q, self.weight.t(), scale[:, None], self.scale[None], out_dtype=BF16, use_fast_accum=True
            )
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


def blocks() -> Iterator[Case]:
    for rows in (8192, 16, 128, 1, 64, 256, 32, 8):  # what matters most comes first
        for name, shape in SHAPES.items():
            about = {"model": name, "rows": rows, "decode": rows != 8192}
            yield about, partial(block_row, shape, rows, rows != 8192)


def block_row(shape: tuple[int, int, int, int], rows: int, decode: bool) -> dict[str, Any]:
    x, runs = torch.randn(rows, shape[0], device=CUDA, dtype=BF16), {}
    for mode in MODES if rows in (8192, 16, 128) else MODES[:-1]:
        put(runs, mode, lambda mode=mode: partial(Block(shape, mode, rows, decode), x))
    us = timed(runs, 0.4)
    best = min(us, key=lambda mode: us[mode])
    speed = {
        mode: over(us, "torch-fp8" if "fp8" in mode else "int8" if "int8" in mode else "bf16", mode) for mode in us
    }
    return {"us": us, "over own dense": speed, "fastest": best, "fastest over bf16": over(us, "bf16", best)}


SECTIONS: dict[str, tuple[Callable[[], Iterator[Case]], float]] = {  # and their shares of the time
    "overhead": (overhead, 0.1),
    "gemm": (gemm, 0.3),
    "blocks": (blocks, 0.5),
    "activations": (activations, 0.1),
}


def measure(section: str, ends: float, rows: list[dict[str, Any]]) -> str:
    """Fill ``rows`` until the section or the time is over; what was left out, or empty."""
    for about, case in SECTIONS[section][0]():
        if time.monotonic() > ends:
            return f"{section} from {about} on"
        before = len(FAILED)
        try:
            row = {**about, **case(), **({"left out": FAILED[before:]} if FAILED[before:] else {})}
        except Exception as e:
            row = {**about, "error": failed(f"{section} {about}", e)}
        rows.append(show(section, row))
        torch.cuda.empty_cache()
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    parser.add_argument("--json", type=Path, help="file for the record; written after each section")
    parser.add_argument("--seconds", type=float, default=230, help="for all sections; no row begins later")
    options = parser.parse_args()
    if (why := lt.available(CUDA)) is not True:
        sys.exit(f"no 2:4 products here: {why}")
    torch.manual_seed(0)
    build(ops.mm_fp8)  # one translation unit binds all leaf ops
    device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    measured: dict[str, Any] = {}
    print(f"# {device}, torch {torch.__version__}, cuSPARSELt {lt.library_versions()[1]}", flush=True)
    sections = options.only.split(",")
    whole, ends, cut = sum(SECTIONS[s][1] for s in sections), time.monotonic(), []
    with torch.no_grad():
        for section in sections:
            ends += options.seconds * SECTIONS[section][1] / whole  # what one leaves, the next may have
            cut += [left] if (left := measure(section, ends, measured.setdefault(section, []))) else []
            results = goals(measured)
            print(json.dumps({"goals": results, "left out": cut}), flush=True)
            if options.json:
                versions = dict(
                    zip(("cublaslt", "cusparselt"), lt.library_versions(), strict=True)
                )  # of what is open by now
                write(
                    options.json,
                    record(SOURCES, ["triton"], device, libraries=versions, goals=results, cut=cut, **measured),
                )


if __name__ == "__main__":
    main()
    sys.exit(f"{len(FAILED)} failed, first {FAILED[0]}" if FAILED else 0)
