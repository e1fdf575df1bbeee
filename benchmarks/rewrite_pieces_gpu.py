"""Pieces of models for which a rewrite might pay on a GPU, each against torch.compile of what models write.

* ``capped``: attention whose scores are capped by ``tanh`` (Gemma 2), in blocks of rows as the rewrite has it on a CPU.
* ``rotary``: rotary embedding by halves, of queries and keys as a model has them, without the copy that is turned.
* ``layer norm``: ``layer_norm(x + residual)``, both results used. Nothing to place; how near is Inductor to a copy?
* ``cross entropy``: of a linear layer, forward and backward, in chunks of rows that are computed again. Memory beside
  time.

``again`` is the plain function compiled once more: the control. Medians of rounds that take turns.

    python benchmarks/rewrite_pieces_gpu.py [--json benchmarks/results/rewrite_pieces_gpu.json] [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from rewrite import apart, keep, timed
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shiplap as sl
from shiplap.rewrite.shipped.attention import Attention
from shiplap.rewrite.shipped.rotary import Rotary

SOURCES = (
    "benchmarks/rewrite_pieces_gpu.py",
    "packages/shiplap/src/shiplap/rewrite/shipped/attention.py",
    "packages/shiplap/src/shiplap/rewrite/shipped/capped.py",
    "packages/shiplap/src/shiplap/rewrite/shipped/rotary.py",
)
CAPPED = [(1, 8, 1024, 256), (1, 8, 4096, 256), (4, 16, 2048, 128)]  # batch, heads, tokens, width
ROTARIES = [(1, 32, 2048, 64), (2, 16, 1024, 128), (8, 32, 4096, 128)]  # batch, heads, tokens, width
NORMS = [(16384, 1024), (8192, 4096)]
ENTROPIES = [(8192, 2048, 32000), (8192, 4096, 128256)]  # tokens, width, vocabulary
CHUNK = 1024


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.0625
    scores = torch.tanh(scores / 50.0) * 50.0 + mask
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k, cos, sin = q.transpose(1, 2), k.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def normed(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, (x.shape[-1],), weight, bias), total


def entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def in_chunks(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    parts: list[Any] = [
        checkpoint(
            lambda a, b: F.cross_entropy(F.linear(a, weight).float(), b, reduction="sum"), a, b, use_reentrant=False
        )
        for a, b in zip(x.split(CHUNK), target.split(CHUNK), strict=True)
    ]
    return torch.stack(parts).sum() / x.shape[0]


def fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` compiled, with code of its own: what was compiled for another row is not used."""
    return torch.compile(types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__), dynamic=False)


def ready(fn: Callable[..., Any], *args: Tensor) -> Callable[[], Any]:
    """Compiled now: the rewrites in force are those of now."""
    fn(*args)
    return lambda: fn(*args)


def row(name: str, calls: dict[str, Callable[[], Any]], device: str, **more: Any) -> dict[str, Any]:
    times = timed(calls, device, 30)
    us = {n: round(median(ts) * 1e6, 1) for n, ts in times.items()}
    ratios = {n: round(median(o / s for o, s in zip(times["off"], ts, strict=True)), 3) for n, ts in times.items()}
    return {"case": name, "us": us, "off over": {n: r for n, r in ratios.items() if n != "off"}, **more}


def capped_row(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, Any]:
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    mask = torch.full((shape[2], shape[2]), torch.finfo(dtype).min, device=device, dtype=dtype).triu(1)[None, None]
    with torch.no_grad():
        calls = {name: ready(fresh(capped), q, k, v, mask) for name in ("off", "again")}
        with sl.rewrites(Attention(always=True)) as placed:
            calls["on"] = ready(fresh(capped), q, k, v, mask)
        assert placed.matches
        exact = capped(q.float(), k.float(), v.float(), mask.float())
        errors = {n: float(f"{apart(call(), exact):.2g}") for n, call in calls.items()}
        return row(f"capped {'x'.join(map(str, shape))}", calls, device, error=errors)


def rotary_row(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, Any]:
    batch, heads, tokens, width = shape
    q, k = (torch.randn(batch, tokens, n, width, device=device, dtype=dtype) for n in (heads, max(heads // 4, 1)))
    angles = torch.randn(batch, tokens, width // 2, device=device).repeat(1, 1, 2)
    args = (q, k, angles.cos().to(dtype), angles.sin().to(dtype))
    with torch.no_grad():
        calls = {name: ready(fresh(turned), *args) for name in ("off", "again")}
        with sl.rewrites(Rotary(always=True)) as placed:
            calls["on"] = ready(fresh(turned), *args)
        assert len(placed.matches) == 2
        exact = turned(*(a.double() for a in args))[0]
        errors = {n: float(f"{apart(call()[0], exact):.2g}") for n, call in calls.items()}
        return row(f"rotary {'x'.join(map(str, shape))}", calls, device, error=errors)


def norm_row(shape: tuple[int, int], device: str, dtype: torch.dtype) -> dict[str, Any]:
    x, residual, other, total = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    weight, bias = torch.randn(2, shape[1], device=device, dtype=dtype)
    with torch.no_grad():
        calls: dict[str, Callable[[], Any]] = {
            n: ready(fresh(normed), x, residual, weight, bias) for n in ("off", "again")
        }
        calls["copies of as many bytes"] = lambda: (other.copy_(x), total.copy_(residual))
        return row(f"layer norm {shape[0]}x{shape[1]}", calls, device)


def entropy_row(sizes: tuple[int, int, int], device: str, dtype: torch.dtype) -> dict[str, Any]:
    n, k, words = sizes
    x = torch.randn(n, k, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(words, k, device=device, dtype=dtype) * k**-0.5).requires_grad_()
    target = torch.randint(0, words, (n,), device=device)
    calls: dict[str, Callable[[], Any]] = {}
    peaks: dict[str, float] = {}
    values: dict[str, float] = {}
    for name, fn in (("off", fresh(entropy)), ("again", fresh(entropy)), ("in chunks", fresh(in_chunks))):

        def call(fn: Callable[..., Any] = fn) -> Any:
            x.grad = weight.grad = None
            loss = fn(x, weight, target)
            loss.backward()
            return loss

        call()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        values[name] = float(call())
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        calls[name], peaks[name] = call, round((peak - held) / 2**20, 1)
    return row(f"cross entropy {n}x{k}x{words}", calls, device, peak_mib=peaks, loss=values)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="start no further case after this time")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes: whether each runs, not how fast")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    wanted: list[tuple[Callable[..., dict[str, Any]], tuple[int, ...]]] = [
        *((rotary_row, s) for s in ROTARIES),
        *((norm_row, s) for s in NORMS),
        *((capped_row, s) for s in CAPPED),
        *((entropy_row, s) for s in ENTROPIES),
    ]
    if args.tiny:
        wanted = [
            (rotary_row, (1, 2, 16, 8)),
            (norm_row, (64, 32)),
            (capped_row, (1, 2, 64, 16)),
            (entropy_row, (2048, 16, 50)),
        ]
    results, started = list[dict[str, Any]](), time.monotonic()
    for measure, sizes in wanted:
        if time.monotonic() - started > args.seconds:
            print(f"{sizes}: not started, time is up")
            continue
        torch._dynamo.reset()
        try:
            results.append(measure(sizes, args.device, dtype))
        except Exception as e:
            print(f"{sizes}: {type(e).__name__}: {str(e)[:300]}", flush=True)
            continue
        print(json.dumps(results[-1]), flush=True)
        keep(args.json, SOURCES, args.device, 30, results)


if __name__ == "__main__":
    main()
