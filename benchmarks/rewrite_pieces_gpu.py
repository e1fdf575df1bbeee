"""Pieces of models for which a rewrite might pay on a GPU, each against torch.compile of what models write.

* ``capped``: attention whose scores are capped by ``tanh`` (Gemma 2), in blocks of rows as the rewrite has it on a CPU.
* ``rotary``: rotary embedding by halves, of queries and keys as a model has them, without the copy that is turned.
  ``normed``: behind an RMS norm of each head.
* ``biased``: attention with a bias that differs from head to head and that all batches share, as T5 has it: its last
  dim is not dense. ``of batches``: one that differs from batch to batch as well.
* ``layer norm``: ``layer_norm(x + residual)``, both results used. Nothing to place; how near is Inductor to a copy?
* ``cross entropy``: of a linear layer, forward and backward, in chunks of rows that are computed again. Memory beside
  time.

``again`` is the plain function compiled once more: the control. Medians of rounds that take turns, of calls that are
queued. All are compiled before one is timed, which waits for ``--after`` and has the device alone by ``--lock``.

    python benchmarks/rewrite_pieces_gpu.py [--json benchmarks/results/rewrite_pieces_gpu.json] [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from _queued import queued, told, waited
from _together import Alone
from rewrite import apart, keep
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shiplap as sl
from shiplap.rewrite.shipped import rms_norm
from shiplap.rewrite.shipped.attention import AttentionRewrite
from shiplap.rewrite.shipped.rotary import Rotary

SOURCES = (
    "benchmarks/rewrite_pieces_gpu.py",
    "packages/shiplap/src/shiplap/rewrite/shipped/attention.py",
    "packages/shiplap/src/shiplap/rewrite/shipped/softcap.py",
    "packages/shiplap/src/shiplap/rewrite/shipped/speedup_model.py",
    "packages/shiplap/src/shiplap/rewrite/shipped/rotary.py",
)
CAPPED = [(1, 8, 1024, 256), (1, 8, 4096, 256), (4, 16, 2048, 128)]  # batch, heads, tokens, width
ROTARIES = [(1, 32, 2048, 64), (2, 16, 1024, 128), (8, 32, 4096, 128)]  # batch, heads, tokens, width
NORMED = [(16, 16, 1024, 128), (4, 32, 4096, 64)]
BIASED = [(4096, 4, 64, 32), (512, 12, 128, 64), (64, 12, 256, 64), (32, 12, 512, 64), (8, 12, 1024, 64)]
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


def head_normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def normed_and_turned(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, by_q: Tensor, by_k: Tensor
) -> tuple[Tensor, Tensor]:
    return turned(head_normed(q, by_q), head_normed(k, by_k), cos, sin)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(3, 2)) + (bias.permute(2, 0, 1)[None] if bias.dim() == 3 else bias)
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)


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
    """What is known before anything is timed: ``calls`` are to be timed."""
    return {"case": name, "calls": calls, **more}


def measured(held: dict[str, Any], device: str) -> dict[str, Any]:
    calls = held.pop("calls")
    if device == "cuda":
        us, ratios = told({n: [s for s, _ in ts] for n, ts in queued(calls, 20, 0.01).items()})
    else:
        us, ratios = told(waited(calls, 10, device))
    return {"case": held.pop("case"), "us": us, "off over": ratios, **held}


def capped_row(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, Any]:
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    mask = torch.full((shape[2], shape[2]), torch.finfo(dtype).min, device=device, dtype=dtype).triu(1)[None, None]
    with torch.no_grad():
        calls = {name: ready(fresh(capped), q, k, v, mask) for name in ("off", "again")}
        with sl.rewrites(AttentionRewrite(always=True)) as placed:
            calls["on"] = ready(fresh(capped), q, k, v, mask)
        assert placed.matches
        exact = capped(q.float(), k.float(), v.float(), mask.float())
        errors = {n: float(f"{apart(call(), exact):.2g}") for n, call in calls.items()}
        return row(f"capped {'x'.join(map(str, shape))}", calls, device, error=errors)


def rotary_row(shape: tuple[int, ...], device: str, dtype: torch.dtype, *, normed: bool = False) -> dict[str, Any]:
    batch, heads, tokens, width = shape
    q, k = (torch.randn(batch, tokens, n, width, device=device, dtype=dtype) for n in (heads, max(heads // 4, 1)))
    angles = torch.randn(batch, tokens, width // 2, device=device).repeat(1, 1, 2)
    args = [q, k, angles.cos().to(dtype), angles.sin().to(dtype)]
    args += [torch.rand(width, device=device, dtype=dtype) for _ in range(2)] if normed else []
    fn: Callable[..., Any] = normed_and_turned if normed else turned
    before = (rms_norm,) if normed else ()
    with torch.no_grad():
        calls = {}
        with sl.rewrites(*before):
            calls |= {name: ready(fresh(fn), *args) for name in ("off", "again")}
        with sl.rewrites(*before, Rotary(always=True)) as placed:
            calls["on"] = ready(fresh(fn), *args)
        assert sum(m.rewrite == "rotary" for m in placed.matches) == 2
        exact = fn(*(a.double() for a in args))[0]
        errors = {n: float(f"{apart(call()[0], exact):.2g}") for n, call in calls.items()}
        name = f"{'normed ' if normed else ''}rotary {'x'.join(map(str, shape))}"
        return row(name, calls, device, error=errors)


def normed_row(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, Any]:
    return rotary_row(shape, device, dtype, normed=True)


def biased_row(shape: tuple[int, ...], device: str, dtype: torch.dtype, *, shared: bool = True) -> dict[str, Any]:
    batch, heads, tokens, width = shape
    q, k, v = (torch.randn(batch, tokens, heads, width, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
    sizes = (tokens, tokens, heads) if shared else (batch, heads, tokens, tokens)
    bias = torch.randn(sizes, device=device, dtype=dtype)
    with torch.no_grad():
        calls = {name: ready(fresh(biased), q, k, v, bias) for name in ("off", "again")}
        with sl.rewrites(AttentionRewrite(always=True)) as placed:
            calls["on"] = ready(fresh(biased), q, k, v, bias)
        assert placed.matches
        exact = biased(*(a[:2].float() if a.dim() == 4 else a.float() for a in (q, k, v, bias)))
        errors = {n: float(f"{apart(call()[:2], exact):.2g}") for n, call in calls.items()}
        kind = "" if shared else " of batches"
        return row(f"biased{kind} {'x'.join(map(str, shape))}", calls, device, error=errors)


def of_batches_row(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, Any]:
    return biased_row(shape, device, dtype, shared=False)


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
    parser.add_argument("--seconds", type=float, default=120.0, help="compile no further case after this time")
    parser.add_argument("--only", nargs="*", default=[""], help="kinds of cases with one of these in their name")
    parser.add_argument("--after", type=Path, help="time nothing before this file exists, or the seconds are over")
    parser.add_argument("--lock", default=os.devnull, help="file: who runs on the device has it locked")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes: whether each runs, not how fast")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    wanted: list[tuple[Callable[..., dict[str, Any]], tuple[int, ...]]] = [
        *((biased_row, s) for s in BIASED),
        (of_batches_row, BIASED[3]),
        *((normed_row, s) for s in NORMED),
        *((rotary_row, s) for s in ROTARIES),
        *((norm_row, s) for s in NORMS),
        *((capped_row, s) for s in CAPPED),
        *((entropy_row, s) for s in ENTROPIES),
    ]
    if args.tiny:
        wanted = [
            (biased_row, (2, 2, 16, 8)),
            (of_batches_row, (2, 2, 16, 8)),
            (normed_row, (1, 2, 16, 8)),
            (rotary_row, (1, 2, 16, 8)),
            (norm_row, (64, 32)),
            (capped_row, (1, 2, 64, 16)),
            (entropy_row, (2048, 16, 50)),
        ]
    compiled, started = list[dict[str, Any]](), time.monotonic()
    for measure, sizes in wanted:
        if not any(part in measure.__name__ for part in args.only):
            continue
        if time.monotonic() - started > args.seconds:
            print(f"{sizes}: not started, time is up")
            continue
        try:
            compiled.append(measure(sizes, args.device, dtype))
        except Exception as e:
            print(f"{sizes}: {type(e).__name__}: {str(e)[:300]}", flush=True)
    while args.after and not args.after.exists() and time.monotonic() - started < args.seconds:
        time.sleep(0.05)
    results = list[dict[str, Any]]()
    for held in compiled:
        with Alone(args.lock)():
            results.append(measured(held, args.device))
        print(json.dumps(results[-1]), flush=True)
        keep(args.json, SOURCES, args.device, 20, results)


if __name__ == "__main__":
    main()
