"""A matrix product for ``tune_gpu.py``, with good, wrong and hostile kernels: in a file that workers can import."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.kernels.triton import triton_launcher


@triton.jit
def _tiled(
    a_ptr,
    b_ptr,
    out_ptr,
    m,
    n,
    k,
    steps,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr = 8,
):
    program = tl.program_id(0)
    across, down = tl.cdiv(n, BN), tl.cdiv(m, BM)
    group = program // (GROUP * across)
    rows = min(down - group * GROUP, GROUP)
    row = group * GROUP + (program % (GROUP * across)) % rows
    column = (program % (GROUP * across)) // rows
    rm, rn, rk = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    am, bn = rm % m, rn % n
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(steps):
        ks = step * BK + rk
        a = tl.load(a_ptr + am[:, None] * k + ks[None, :], mask=ks[None, :] < k, other=0.0)
        b = tl.load(b_ptr + ks[:, None] * n + bn[None, :], mask=ks[:, None] < k, other=0.0)
        total = tl.dot(a, b, total)
    inside = (rm[:, None] < m) & (rn[None, :] < n)
    tl.store(out_ptr + rm[:, None] * n + rn[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _trespass(out_ptr, far):
    tl.store(out_ptr + far, 1.0)


tiled, trespass = triton_launcher(_tiled), triton_launcher(_trespass)

CONFIGS = [
    {"BM": bm, "BN": bn, "BK": bk, "STAGES": stages, "WARPS": warps}
    for bm, bn, bk, stages, warps in itertools.product((16, 64, 128), (64, 128, 256), (32, 64), (3, 4), (4, 8))
    if (bm * bk + bk * bn) * 2 * stages <= 220_000 and not (bm == 16 and warps == 8)
]


def prior(sizes: dict[str, int], config: dict[str, int]) -> float:
    """Time in units of one tile's products: waves of programs, each limited by its loads or its products."""
    programs = -(-sizes["m"] // config["BM"]) * -(-sizes["n"] // config["BN"])
    waves = -(-programs // 132)
    work = config["BM"] * config["BN"] / 4096 + (config["BM"] + config["BN"]) / 96
    return waves * work * (1.15 if config["BK"] == 32 else 1.0) * (1.1 if config["WARPS"] == 4 and work > 5 else 1.0)


@sl.op("tune_gpu::mm")
def mm(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    return a @ b


@sl.op("tune_gpu::hostile")
def hostile(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    return a @ b


def _launch(a: Tensor, b: Tensor, out: Tensor, steps: int, config: dict[str, int]) -> None:
    m, k = a.shape
    n = b.shape[1]
    grid = (-(-m // config["BM"]) * -(-n // config["BN"]),)
    tiled[grid](
        a.contiguous(),
        b.contiguous(),
        out,
        m,
        n,
        k,
        steps,
        BM=config["BM"],
        BN=config["BN"],
        BK=config["BK"],
        num_stages=config["STAGES"],
        num_warps=config["WARPS"],
    )


@mm.kernel("cuda", name="cublas")
def _(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    torch.mm(a, b, out=out)


@mm.kernel("cuda", name="tiled", configs=CONFIGS, default={**CONFIGS[0]}, prior=prior)
def _(a: Tensor, b: Tensor, *, out: Tensor, **config: Any) -> None:
    _launch(a, b, out, -(-a.shape[1] // config["BK"]), config)


@hostile.kernel("cuda", name="cut", configs=[CONFIGS[0]])
def _(a: Tensor, b: Tensor, *, out: Tensor, **config: Any) -> None:
    """The loop ends after one step: the fastest, and wrong."""
    _launch(a, b, out, 1, config)


@hostile.kernel("cuda", name="trespass")
def _(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """An illegal access, of which the device does not recover."""
    torch.mm(a, b, out=out)
    trespass[(1,)](out, 1 << 46)


@hostile.kernel("cuda", name="synchronises")
def _(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """Right, but not to be captured."""
    torch.mm(a, b, out=out)
    torch.cuda.synchronize()


@hostile.kernel("cuda", name="right")
def _(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    torch.mm(a, b, out=out)
