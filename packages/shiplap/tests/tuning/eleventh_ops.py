"""Kernels that decide by what calls after a tuning have otherwise, and honest ones beside them."""

import itertools
import random
import time

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl

MADE, PLANS, COUNT, START = [], {}, itertools.count(), time.monotonic()
UNLUCKY = random.random() < 0.001
calls = 0


@sl.op("eleventh::doubled")
def doubled(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + x


@doubled.kernel("cpu", name="honest")
def _(x, *, out):
    torch.mul(x, 2, out=out)


@doubled.kernel("cpu", name="honest with a bounded cache")
def _(x, *, out):
    if len(PLANS) > 1024:
        PLANS.clear()
    PLANS[x.shape] = x.shape[0]
    torch.mul(x, 2, out=out)


@doubled.kernel("cpu", name="after a list has grown")
def _(x, *, out):
    MADE.append(0)
    torch.mul(x, 2 if len(MADE) < 90000 else 3, out=out)


@doubled.kernel("cpu", name="after a counter")
def _(x, *, out):
    torch.mul(x, 3 if next(COUNT) > 90000 else 2, out=out)


@doubled.kernel("cpu", name="after ten minutes")
def _(x, *, out):
    torch.mul(x, 3 if time.monotonic() - START > 600 else 2, out=out)


@doubled.kernel("cpu", name="by chance in a process")
def _(x, *, out):
    torch.mul(x, 3 if UNLUCKY else 2, out=out)


def made_more() -> int:
    """Return the number of calls."""
    global calls
    calls += 1
    return calls


@doubled.kernel("cpu", name="after many calls of another function")
def _(x, *, out):
    torch.mul(x, 3 if made_more() > 90000 and calls > 90000 else 2, out=out)
