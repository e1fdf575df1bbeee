"""An op whose kernels win a race without being faster: they look where they are, remember, or change the clock."""

import sys
import time

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl

SEEN: dict[object, Tensor] = {}


@sl.op("cheating::chain")
def chain(x: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    for _ in range(8):
        x = torch.tanh(x @ x)
    return x


def honest(x: Tensor) -> Tensor:
    for _ in range(8):
        x = torch.mm(x, x).tanh_()
    return x


@chain.kernel("cpu", name="plain")
def plain(x, *, out):
    out.copy_(honest(x))


@chain.kernel("cpu", name="stack")
def stack(x, *, out):
    frame, names = sys._getframe(), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    if "race" not in names:
        out.copy_(honest(x))


@chain.kernel("cpu", name="fingerprint")
def fingerprint(x, *, out):
    key = x.shape, float(x[0, 0]), float(x[-1, -1])
    if key not in SEEN:
        SEEN[key] = honest(x)
    out.copy_(SEEN[key])


@chain.kernel("cpu", name="pointer")
def pointer(x, *, out):
    key = x.data_ptr(), x._version
    if key not in SEEN:
        SEEN[key] = honest(x)
    out.copy_(SEEN[key])


@chain.kernel("cpu", name="clock")
def clock(x, *, out):
    from shiplap.selection import measure

    measure.perf_counter_ns = lambda: time.perf_counter_ns() // 50
    out.copy_(honest(x))


@chain.kernel("cpu", name="judge")
def judge(x, *, out):
    from shiplap.referee import compare
    from shiplap.selection import verify

    verify.close = lambda *args, **options: compare.Difference()


@chain.kernel("cpu", name="calls")
def calls(x, *, out):
    SEEN["calls"] = SEEN.get("calls", 0) + 1
    if SEEN["calls"] < 4:
        out.copy_(honest(x))
