"""``shiplap judge`` on a GPU: honest Triton kernels are accepted with true times, and cheats are refused.

Usage: ``python benchmarks/judge_gpu.py [--seconds 20]``, about three minutes on one GPU. One JSON line a kernel; exit
status 1 if an honest kernel is refused, a cheat is accepted, or a time differs by more than 5 % from do_bench's.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shiplap as sl
from shiplap.judge import Ruling
from shiplap.referee.loading import load_named
from shiplap.referee.process import Launcher

ROOT = Path(__file__).resolve().parent.parent
TRITON = """import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
F = torch.nn.functional
"""
LONG = 10e-6  # seconds of a kernel whose time is compared with do_bench's
REPEATS = 5  # measurements of do_bench

ADD = """
@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

def candidate(x, y):
    out = torch.empty_like(x)
    add[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    return out
"""
SOFTMAX = """
@triton.jit
def softmax(x, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * cols + at, at < cols, float("-inf"))
    e = tl.exp(row - tl.max(row, 0))
    tl.store(out + tl.program_id(0) * cols + at, e / tl.sum(e, 0), at < cols)

def candidate(x):
    out = torch.empty_like(x)
    softmax[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""
NORM = """
@triton.jit
def norm(x, w, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * cols + at, at < cols, 0.0)
    scale = tl.rsqrt(tl.sum(row * row, 0) / cols + 1e-6)
    tl.store(out + tl.program_id(0) * cols + at, row * scale * tl.load(w + at, at < cols, 0.0), at < cols)

def candidate(x, w):
    out = torch.empty_like(x)
    norm[(x.shape[0],)](x, w, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""
PRODUCT = """
@triton.jit
def product(x, w, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + rows[:, None] * K + k, (rows[:, None] < M) & (k < K), 0.0)
        b = tl.load(w + k[:, None] * N + cols, (k[:, None] < K) & (cols < N), 0.0)
        total += tl.dot(a, b, input_precision="ieee")
    y = libdevice.tanh(total / 5.0)  # 2 * sigmoid(2 * x) - 1 has no digits left near zero
    tl.store(out + rows[:, None] * N + cols, 5.0 * y, (rows[:, None] < M) & (cols < N))

def candidate(x, w):
    out = torch.empty(x.shape[0], w.shape[1], device=x.device)
    grid = triton.cdiv(x.shape[0], 64), triton.cdiv(w.shape[1], 64)
    product[grid](x, w, out, x.shape[0], w.shape[1], x.shape[1], BM=64, BN=64, BK=32)
    return out
"""
GELU = """
@triton.jit
def gelu(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n)
    tl.store(out + at, 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476)), at < n)

def candidate(x):
    out = torch.empty_like(x)
    gelu[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out
"""
CAP = "torch.tanh((x @ w) / 5.0) * 5.0"
HONEST = {  # arguments, inputs, reference, candidate
    "add": ("x, y", "torch.randn(1 << 22), torch.randn(1 << 22)", "x + y", ADD),
    "softmax": ("x", "torch.randn(4096, 1000)", "torch.softmax(x, 1)", SOFTMAX),
    "rms norm": (
        "x, w",
        "torch.randn(4096, 1024), torch.randn(1024)",
        "x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6) * w",
        NORM,
    ),
    "capped product": ("x, w", "torch.randn(512, 256) / 4, torch.randn(256, 512) / 4", CAP, PRODUCT),
    "gelu": ("x", "torch.randn(1 << 22)", "x * 0.5 * (1 + torch.erf(x * 0.7071067811865476))", GELU),
}
STREAMS = {
    "unjoined stream": """
SIDE = []
def candidate(x, w):
    SIDE[:] = SIDE or [torch.cuda.Stream()]
    out = torch.zeros(x.shape[0], w.shape[1], device=x.device)
    SIDE[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE[0]):
        torch.cuda._sleep(2_000_000)
        out.copy_(honest(x, w))
    return out
""",
    "late stream": """
def candidate(x, w):
    side = torch.cuda.Stream()
    result = honest(x, w)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
    return result
""",
    "shared memory over the limit": PRODUCT.replace("BM=64, BN=64, BK=32", "BM=256, BN=256, BK=256"),
}


def cases() -> Iterator[tuple[str, str, str, bool]]:
    """Name, source of the reference, source of the candidate, and whether it is honest."""
    for name, (args, inputs, body, candidate) in HONEST.items():
        yield name, _reference(args, inputs, body), TRITON + candidate, True
    sys.path.insert(0, str(ROOT / "packages" / "shiplap"))
    from tests.judge.cheats import CHEATS, HEAD

    capped = _reference("x, w", "torch.rand(96, 128) / 4, torch.rand(128, 64) / 4", CAP)
    on_device = {n: c for n, c in CHEATS.items() if "numpy" not in c and "torch.empty(" not in c and "zeros(" not in c}
    for name, text in list(on_device.items()):
        yield f"cheat: {name}", capped, HEAD + text, False
    for name, text in STREAMS.items():
        yield f"cheat: {name}", capped, TRITON + HEAD + text, False


def _reference(args: str, inputs: str, body: str) -> str:
    return f"import torch\ndef reference({args}):\n    return {body}\ndef get_inputs():\n    return [{inputs}]\n"


def _by_do_bench(reference: Path, candidate: Path) -> list[float]:
    """Seconds of one call of an honest candidate, in this process: several medians, which differ by some percent."""
    from triton.testing import do_bench

    args = [a.cuda() for a in load_named(str(reference), ["get_inputs"])()]
    kernel = load_named(str(candidate), ["candidate"])
    return sorted(float(do_bench(lambda: kernel(*args), return_mode="median")) * 1e-3 for _ in range(REPEATS))


def _line(name: str, ruling: Ruling, honest: bool, peers: list[float]) -> dict[str, Any]:
    timed, peer = ruling.timings[0].candidate if ruling.timings else 0.0, median(peers)
    off = abs(timed / peer - 1) if peer > LONG and timed else 0.0
    right = ruling.word != "refused" and off <= 0.05 if honest else ruling.word == "refused"
    return {
        "kernel": name,
        "right": right,
        "verdict": ruling.word,
        "reasons": [f"{r.check}: {r.evidence}"[:160] for r in ruling.reasons],
        "missing": dict(ruling.missing),
        "seconds": round(ruling.seconds, 1),
        "us": round(timed * 1e6, 2),
        "do_bench_us": round(peer * 1e6, 2),
        "do_bench_us_from_to": [round(peers[0] * 1e6, 2), round(peers[-1] * 1e6, 2)],
    }


def main() -> int:
    """Judge all; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of one verdict")
    parser.add_argument("--only", default="", help="kernels in whose name this regular expression is found")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, Launcher() as launcher:
        for number, (name, reference, candidate, honest) in enumerate(cases()):
            if not re.search(asked.only, name):
                continue
            ref, it = Path(folder, f"{number}", "ref.py"), Path(folder, f"{number}", "candidate", f"it{number}.py")
            it.parent.mkdir(parents=True)
            ref.write_text(reference)
            it.write_text(candidate)
            options: dict[str, Any] = {"device": "cuda", "seconds": asked.seconds, "launcher": launcher}
            ruling = sl.judge(ref, it, **options)
            line = _line(name, ruling, honest, _by_do_bench(ref, it) if honest else [0.0])
            wrong += not line["right"]
            print(json.dumps(line), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
