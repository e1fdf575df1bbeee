"""``shiplap judge`` on a GPU: honest Triton kernels are accepted with true times, and cheats are refused.

Usage: ``python benchmarks/judge_gpu.py [--seconds 60]``, about ten minutes on one GPU. One JSON line a kernel; exit
status 1 if an honest kernel is refused, a cheat is accepted, or a time differs by more than 5 % from do_bench's.
``--part 2/8`` judges every eighth kernel, beginning with the third, and ``--only`` those of a name.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shiplap as sl
from shiplap.judge import JudgeResult
from shiplap.sandbox.load_candidate import load_named
from shiplap.sandbox.supervisor import SandboxLauncher

ROOT = Path(__file__).resolve().parent.parent
TRITON = """import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
F = torch.nn.functional
"""
DEVICE = "cuda"
LONG = 10e-6  # seconds of a kernel whose time is compared with do_bench's
REPEATS = 5  # measurements of do_bench

ADD = """
@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

def candidate(x, y):
    x, y = x.contiguous(), y.contiguous()
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
    x = x.contiguous()
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
    x, w = x.contiguous(), w.contiguous()
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
    x, w = x.contiguous(), w.contiguous()
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
    x = x.contiguous()
    out = torch.empty_like(x)
    gelu[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out
"""
SUM = """
@triton.jit
def row_sum(x, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + tl.program_id(0) * cols + at, at < cols, 0.0), 0))

def candidate(x):
    x = x.contiguous()
    out = torch.empty(x.shape[0], device=x.device)
    row_sum[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""
LAYER = """
@triton.jit
def layer(x, w, b, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * cols + at, at < cols, 0.0)
    centred = tl.where(at < cols, row - tl.sum(row, 0) / cols, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / cols + 1e-5)
    y = centred * scale * tl.load(w + at, at < cols, 0.0) + tl.load(b + at, at < cols, 0.0)
    tl.store(out + tl.program_id(0) * cols + at, y, at < cols)

def candidate(x, w, b):
    x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
    out = torch.empty_like(x)
    layer[(x.shape[0],)](x, w, b, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""
GATED = """
@triton.jit
def gated(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n)
    tl.store(out + at, v / (1.0 + tl.exp(-v)) * tl.load(y + at, at < n), at < n)

def candidate(x, y):
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    gated[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    return out
"""
CAP = "torch.tanh((x @ w) / 5.0) * 5.0"
PAIR = "torch.randn(1 << 22, device=D), torch.randn(1 << 22, device=D)"
HONEST = {  # arguments, inputs, reference, candidate
    "add": ("x, y", PAIR, "x + y", ADD),
    "softmax": ("x", "torch.randn(4096, 1000, device=D)", "torch.softmax(x, 1)", SOFTMAX),
    "rms norm": (
        "x, w",
        "torch.randn(4096, 1024, device=D), torch.randn(1024, device=D)",
        "x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6) * w",
        NORM,
    ),
    "capped product": ("x, w", "torch.randn(512, 256) / 4, torch.randn(256, 512) / 4", CAP, PRODUCT),
    "gelu": ("x", "torch.randn(1 << 22, device=D)", "x * 0.5 * (1 + torch.erf(x * 0.7071067811865476))", GELU),
    "row sum": ("x", "torch.randn(8192, 1024, device=D)", "x.sum(1)", SUM),
    "layer norm": (
        "x, w, b",
        "torch.randn(4096, 1024, device=D), torch.randn(1024, device=D), torch.randn(1024, device=D)",
        "torch.nn.functional.layer_norm(x, (x.shape[1],), w, b)",
        LAYER,
    ),
    "gated": ("x, y", PAIR, "torch.nn.functional.silu(x) * y", GATED),
    "larger product": ("x, w", "torch.randn(1024, 1024) / 8, torch.randn(1024, 1024) / 8", CAP, PRODUCT),
}
SWIGLU = """
@triton.jit
def swiglu(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n).to(tl.float32)
    tl.store(out + at, v / (1.0 + tl.exp(-v)) * tl.load(y + at, at < n).to(tl.float32), at < n)

def candidate(x, y):
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        swiglu[(triton.cdiv(x.numel(), 2048),)](x, y, out, x.numel(), BLOCK=2048, num_warps=8)
    return out
"""
NORM_OF_ROWS = """
@triton.jit
def norm(x, w, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * cols
    row = tl.load(x + start + at, at < cols, 0.0)
    scale = tl.rsqrt(tl.sum(row * row, 0) / cols + 1e-6)
    tl.store(out + start + at, row * scale * tl.load(w + at, at < cols, 0.0), at < cols)

def candidate(x, w):
    x, w = x.contiguous(), w.contiguous()
    out = torch.empty_like(x)
    norm[(x.shape[0],)](x, w, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
    return out
"""
SOFTMAX_OF_ROWS = """
@triton.jit
def softmax(x, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * cols
    row = tl.load(x + start + at, at < cols, float("-inf"))
    e = tl.exp(row - tl.max(row, 0))
    tl.store(out + start + at, e / tl.sum(e, 0), at < cols)

def candidate(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    softmax[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
    return out
"""
COMPILED_NORM = """
@torch.compile(dynamic=True)
def candidate(x, w):
    return x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6) * w
"""
COMPILED_GELU = """
@torch.compile(dynamic=True)
def candidate(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
"""
IN_CUDA = """
from torch.utils.cpp_extension import load_inline
KERNEL = '''
#include <torch/extension.h>
__global__ void squared_relu(const float* x, float* out, long long n) {
  long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (at < n) { float v = x[at] > 0.f ? x[at] : 0.f; out[at] = v * v; }
}
torch::Tensor forward(torch::Tensor x) {
  x = x.contiguous();
  auto out = torch::empty_like(x);
  long long n = x.numel();
  if (n) squared_relu<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), n);
  return out;
}
'''
HEAD = "torch::Tensor forward(torch::Tensor x);"
built = load_inline(name="squared", cpp_sources=HEAD, cuda_sources=KERNEL, functions=["forward"])
def candidate(x):
    return built.forward(x)
"""
LARGE = "torch.randn(4096, 4096), torch.rand(4096) + 0.5"
WIDE = "torch.randn(4096, 11008), torch.randn(4096, 11008)"
RMS = "x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6) * w"
TANH = "0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))"
EXPS = "(x - x.amax(1, True)).exp() / (x - x.amax(1, True)).exp().sum(1, True)"
REAL = {  # kernels at sizes of language models
    "real rms norm": ("x, w", LARGE, RMS, NORM_OF_ROWS),
    "real softmax": ("x", "torch.randn(8192, 4096)", EXPS, SOFTMAX_OF_ROWS),
    "real swiglu": ("x, y", WIDE, "x * torch.sigmoid(x) * y", SWIGLU),
    "real swiglu in bfloat16": (
        "x, y",
        "*(torch.randn(4096, 11008, dtype=torch.bfloat16) for _ in range(2)),",
        "torch.nn.functional.silu(x) * y",
        SWIGLU,
    ),
    "real compiled rms norm": ("x, w", LARGE, RMS, COMPILED_NORM),
    "real compiled gelu": ("x", "torch.randn(4096, 4096)", TANH, COMPILED_GELU),
    "real squared relu in CUDA C++": ("x", "torch.randn(4096, 8192)", "torch.relu(x) ** 2", IN_CUDA),
}
FORGED = {  # cheats on the memory that is shared, the gate and the clock
    "one stale row": """
def candidate(x, w):
    out = torch.empty(x.shape[0], w.shape[1], device=x.device)
    out[1:] = honest(x, w)[1:]
    return out
""",
    "last values": """
KEPT = []
def candidate(x, w):
    out = honest(x, w)
    KEPT.append(out)
    return KEPT[-2] if len(KEPT) > 1 and KEPT[-2].shape == out.shape else out
""",
    "result in an argument": """
def candidate(x, w):
    return x.copy_(honest(x, w)) if x.shape[1] == w.shape[1] else w.view(-1)[: 1].expand(x.shape[0], w.shape[1])
""",
    "no waiting for the gate": """
SIDE = []
def candidate(x, w):
    SIDE[:] = SIDE or [torch.cuda.Stream()]
    with torch.cuda.stream(SIDE[0]):
        out = honest(x, w)
    return out
""",
    "half now and half later": """
SIDE = []
def candidate(x, w):
    SIDE[:] = SIDE or [torch.cuda.Stream()]
    out = honest(x, w)
    half, out[::2] = out[::2].clone(), 0
    SIDE[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE[0]):
        torch.cuda._sleep(400_000)
        out[::2] = half
    return out
""",
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
    "stream that is soon done": """
SIDE = []
def candidate(x, w):
    SIDE[:] = SIDE or [torch.cuda.Stream()]
    out = torch.zeros(x.shape[0], w.shape[1], device=x.device)
    SIDE[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE[0]):
        torch.cuda._sleep(60_000)
        out.copy_(honest(x, w))
    return out
""",
    "stream that stays current": """
SIDE = []
def candidate(x, w):
    SIDE[:] = SIDE or [torch.cuda.Stream(), torch.cuda.Stream()]
    with torch.cuda.stream(SIDE[0]):
        torch.cuda._sleep(60_000)
        out = honest(x, w)
    torch.cuda.set_stream(SIDE[1])
    return out
""",
    "method that computes": """
def candidate(x, w):
    out = torch.empty(x.shape[0], w.shape[1], device=x.device)
    def compute(*args, **kwargs):
        out.copy_(honest(x, w))
        return torch.Tensor.detach(out)
    out.detach = out.cpu = compute
    return out
""",
    "finalizer of an argument": """
import weakref
def candidate(x, w):
    out, same = x.new_empty(x.shape[0], w.shape[1]), x.detach()
    weakref.finalize(x, lambda: out.copy_(honest(same, w)))
    return out
""",
    "finalizer in a circle": """
import gc
def candidate(x, w):
    out = x.new_empty(x.shape[0], w.shape[1])
    class Later:
        def __del__(self):
            out.copy_(honest(x, w))
    later = Later()
    later.me = later
    for _ in range(max(0, gc.get_threshold()[0] - gc.get_count()[0] - 40)):
        LEFT.append([])
    return out
LEFT = []
""",
    "clock of events": """
torch.cuda.Event.elapsed_time = lambda self, end: 0.0021
def candidate(x, w):
    torch.cuda._sleep(100_000)
    return honest(x, w)
""",
    "mode that comes and goes": """
from torch.utils._python_dispatch import TorchDispatchMode
SEEN = {}
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dim() == 2:
            SEEN.setdefault("args", []).append(out)
        elif func is torch.ops.aten.fill_.Scalar and len(SEEN.get("args", ())) == 2:
            SEEN["out"] = honest(*SEEN.pop("args"))
        return out
MODE = Mode()
def candidate(x, w):
    if torch.utils._python_dispatch._get_current_dispatch_mode() is MODE:
        MODE.__exit__(None, None, None)
    out = SEEN.pop("out", None)
    out = honest(x, w) if out is None or out.shape != (x.shape[0], w.shape[1]) else out
    SEEN.clear()
    MODE.__enter__()
    return out
""",
    "signals that come and go": """
import signal
def look(number, frame):
    pass
def candidate(x, w):
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    out = honest(x, w)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    return out
""",
    "thread that comes and goes": """
import threading, time
STOP = []
def run():
    while not STOP:
        time.sleep(0.0002)
def candidate(x, w):
    STOP.append(1)
    out = honest(x, w)
    STOP.clear()
    threading.Thread(target=run, daemon=True).start()
    return out
""",
    "shared memory over the limit": PRODUCT.replace("BM=64, BN=64, BK=32", "BM=256, BN=256, BK=256"),
}


def cases() -> Iterator[tuple[str, str, str, bool]]:
    """Name, source of the reference, source of the candidate, and whether it is honest."""
    for name, (args, inputs, body, candidate) in (HONEST | REAL).items():
        yield name, _reference(args, inputs, body), TRITON + candidate, True
    sys.path.insert(0, str(ROOT / "packages" / "shiplap"))
    from tests.judge.cheats import CHEATS, HEAD

    capped = _reference("x, w", "torch.rand(96, 128) / 4, torch.rand(128, 64) / 4", CAP)
    on_device = {n: c for n, c in CHEATS.items() if "numpy" not in c and "torch.empty(" not in c and "zeros(" not in c}
    for name, text in list(on_device.items()):
        yield f"cheat: {name}", capped, HEAD + text, False
    for name, text in (STREAMS | FORGED).items():
        yield f"cheat: {name}", capped, TRITON + HEAD + text, False


def _reference(args: str, inputs: str, body: str) -> str:
    inner = f"def reference({args}):\n    return {body}\ndef get_inputs():\n    return [{inputs}]\n"
    return f"import torch\nD = {DEVICE!r}\n{inner}"


def _by_do_bench(reference: Path, candidate: Path, name: str = "candidate") -> list[float]:
    """Seconds of one call of an honest candidate, in this process: several medians, which differ by some percent."""
    from triton.testing import do_bench

    args = [a.cuda() for a in load_named(str(reference), ["get_inputs"])()]
    kernel = load_named(str(candidate), [name])
    return sorted(float(do_bench(lambda: kernel(*args), return_mode="median")) * 1e-3 for _ in range(REPEATS))


def _line(name: str, result: JudgeResult, honest: bool, peers: list[float], references: list[float]) -> dict[str, Any]:
    timed, peer = result.timings[0].candidate if result.timings else 0.0, median(peers)
    off = abs(timed / peer - 1) if peer > LONG and timed else 0.0
    right = result.verdict != "refused" and off <= 0.05 if honest else result.verdict == "refused"
    return {
        "kernel": name,
        "right": right,
        "verdict": result.verdict,
        "reasons": [f"{r.check}: {r.evidence}"[:160] for r in result.reasons],
        "missing": dict(result.missing),
        "unchecked": [text for text in result.unchecked if "times" in text],
        "seconds": round(result.seconds, 1),
        "calls": result.calls,
        "speedup": round(result.speedup, 3),
        "min_speedup": round(result.timings[0].min_speedup, 3) if result.timings else 0.0,
        "do_bench_speedup": round(median(references) / peer, 3) if peer else 0.0,
        "batch": [(t.batch, t.queued) for t in result.timings],
        "resolution_us": [round(t.resolution * 1e6, 2) for t in result.timings],
        "reference_us": [round(t.reference * 1e6, 1) for t in result.timings],
        "us": round(timed * 1e6, 2),
        "do_bench_us": round(peer * 1e6, 2),
        "do_bench_us_from_to": [round(peers[0] * 1e6, 2), round(peers[-1] * 1e6, 2)],
    }


def main() -> int:
    """Judge all; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of one verdict")
    parser.add_argument("--part", default="0/1", help="which of how many parts")
    parser.add_argument("--fixed-shapes", action="store_true", help="for a quick look at times")
    parser.add_argument("--rounds", type=int, default=12, help="calls that are timed")
    parser.add_argument("--only", default="", help="kernels in whose name this regular expression is found")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds after which no other kernel begins")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    wrong, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, SandboxLauncher() as launcher:
        part, parts = map(int, asked.part.split("/"))
        for number, (name, reference, candidate, honest) in enumerate(cases()):
            if not re.search(asked.only, name) or number % parts != part or time.monotonic() - began > asked.until:
                continue
            ref, it = Path(folder, f"{number}", "ref.py"), Path(folder, f"{number}", "candidate", f"it{number}.py")
            it.parent.mkdir(parents=True)
            ref.write_text(reference)
            it.write_text(candidate)
            options: dict[str, Any] = {"device": DEVICE, "seconds": asked.seconds, "launcher": launcher}
            options |= {"vary_shapes": not asked.fixed_shapes, "rounds": asked.rounds}
            result = sl.judge(ref, it, **options)
            peers = _by_do_bench(ref, it) if honest else [0.0]
            references = _by_do_bench(ref, ref, "reference") if honest else [0.0]
            line = _line(name, result, honest, peers, references)
            wrong += not line["right"]
            print(json.dumps(line), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
