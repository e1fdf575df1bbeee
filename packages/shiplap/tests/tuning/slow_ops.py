"""Ops with which tuning takes longer than anyone waits: in the sampler, in a kernel, at an import."""

from __future__ import annotations

import threading

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl

awake = threading.Event()  # set: nothing is slow any more
entered: list[str] = []


def sleep(where: str) -> None:
    entered.append(where)
    awake.wait(100)


@sl.op("tune_slow::quick")
def quick(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + 1


@quick.kernel("cpu", name="plain")
def _(x, *, out):
    torch.add(x, 1, out=out)


@sl.op("tune_slow::sampled")
def sampled(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + 1


@sampled.samples
def _(rng, sizes, dtype, device):
    sleep("sampler")
    return (torch.randn(sizes["n"], generator=rng).to(device, dtype),)


@sl.op("tune_slow::stuck")
def stuck(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + 1


@stuck.kernel("cpu", name="kernel", configs=[{"BLOCK": block} for block in (16, 32, 64)])
def _(x, *, out, BLOCK):
    sleep("kernel")
    torch.add(x, 1, out=out)


@sl.op("tune_slow::last")
def last(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + 1
