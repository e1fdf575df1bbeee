"""The ops that ``tuning_between.py`` tunes, in a module that processes of a tuning can import."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl

__all__ = ["CASES"]


@sl.op("tuning_between::mm")
def mm(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    return torch.tanh(a @ b)


@mm.kernel("cpu", name="parts", configs=[{"PARTS": count} for count in (1, 2, 4, 8, 16)])
def _(a: Tensor, b: Tensor, *, out: Tensor, PARTS: int) -> None:
    for rows, part in zip(a.chunk(PARTS), out.chunk(PARTS), strict=True):
        torch.mm(rows, b, out=part)
        part.tanh_()


@sl.op("tuning_between::gelu")
def gelu(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


@gelu.kernel("cpu", name="parts", configs=[{"PARTS": count} for count in (1, 2, 4, 8)])
def _(x: Tensor, *, out: Tensor, PARTS: int) -> None:
    for values, part in zip(x.chunk(PARTS), out.chunk(PARTS), strict=True):
        torch.mul(values, 0.5**0.5, out=part)
        part.erf_().add_(1).mul_(values).mul_(0.5)


CASES: dict[str, list[tuple[Any, list[dict[str, int]]]]] = {
    "six calls in two tunings": [
        (mm, [{"m": m, "n": 256, "k": 256} for m in (64, 256, 1024)]),
        (gelu, [{"n": n} for n in (1_000, 100_000, 1_000_000)]),
    ],
    "one call of 1,000 elements": [(gelu, [{"n": 1_000}])],
    "one product of 256": [(mm, [{"m": 256, "n": 256, "k": 256}])],
}
"""Name → the tunings: an op and the sizes of its calls."""
