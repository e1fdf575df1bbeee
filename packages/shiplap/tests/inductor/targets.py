"""Ops of the fuse tests, in a module of their own so that a worker process can import them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int8
from torch import Tensor

import shiplap as sl

TILE = {"BM": 32, "BN": 64}
GOOD = {**TILE, "STEPS": "K", "WRECK": 0}
FAST_AND_WRONG = {**TILE, "STEPS": "K / 2", "WRECK": 0}
BROKEN = {**TILE, "STEPS": "no_such_name", "WRECK": 0}
CRASHING = {**TILE, "STEPS": "K", "WRECK": 1}
HANGING = {**TILE, "STEPS": "K", "WRECK": 2}


@sl.op("fusetest::qmm")
def qmm(x: Float[Tensor, "m k"], w: Int8[Tensor, "k n"], s: Float[Tensor, "n"]) -> Float[Tensor, "m n"]:
    """Product with weights of 8 bits and a scale per column."""
    return x @ (w.to(x.dtype) * s)


@qmm.samples
def _(rng: torch.Generator, sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    m, k, n = sizes["m"], sizes["k"], sizes["n"]
    w = torch.randint(-127, 128, (k, n), generator=rng, dtype=torch.int8)
    scale = (torch.rand(n, generator=rng) + 0.5) / 127
    return torch.randn(m, k, generator=rng).to(device, dtype), w.to(device), scale.to(device, dtype)


qmm.template("cpu", "qmm.cpp.jinja", configs=[GOOD, FAST_AND_WRONG, BROKEN, CRASHING])


@sl.op("fusetest::slow_mm")
def slow_mm(
    a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], bias: Float[Tensor, "n"] | None = None
) -> Float[Tensor, "m n"]:
    """A product that a library computes better."""
    out = (a[:, :, None] * b).sum(1)
    return out if bias is None else out + bias


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a @ b if bias is None else torch.addmm(bias, a, b)


slow_mm.template("cpu", product)


@sl.op("fusetest::twice")
def twice(x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Twice ``x``."""
    return x * 2 + 0.0


def sized(flaw: str) -> dict[str, Any]:
    """A config of ``twice`` with one of the flaws of its template, or with none."""
    return {"BM": 4, "BN": 64, "FLAW": flaw}


twice.template("cpu", "sized.cpp.jinja", configs=[sized("none")])


@sl.op("fusetest::scale_blocks")
def scale_blocks(x: Float[Tensor, "m n"], scales: Float[Tensor, "b"]) -> Float[Tensor, "m n"]:
    """``x`` times one scale for each 64 rows."""
    return x * scales.repeat_interleave(64)[: len(x), None]


@scale_blocks.samples
def _(rng: torch.Generator, sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """The number of blocks follows from that of rows, whatever ``sizes`` has for it."""
    rows, scales = torch.randn(sizes["m"], sizes["n"], generator=rng), torch.rand(-(-sizes["m"] // 64), generator=rng)
    return rows.to(device, dtype), scales.to(device, dtype)


scale_blocks.template("cpu", "blocks.cpp.jinja", configs=[{"BM": 4, "BN": 64}])
