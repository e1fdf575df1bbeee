"""Ops whose candidates are slow, wrong, or hostile: importable, so that a worker can import them."""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap.declare.config import Config
from shiplap.tuning.candidate import Candidate, ReferenceCandidate, kernel_candidates


@sl.op("tune_test::mm")
def mm(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    time.sleep(0.01)  # never the fastest, on a busy machine either
    return a @ b


@mm.kernel("cpu", name="right", configs=[{"WAIT": 3000}, {"WAIT": 300}])
def right(a, b, *, out, WAIT):
    time.sleep(WAIT * 1e-6)
    torch.mm(a, b, out=out)


@mm.kernel("cpu", name="cut", configs=[{"PARTS": 10}, {"PARTS": 2}])
def cut(a, b, *, out, PARTS):
    """The K loop ends early: fast, plausible, wrong."""
    k = a.shape[1] // PARTS
    torch.mm(a[:, :k], b[:k], out=out)


@sl.op("tune_test::hostile")
def hostile(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + 1


_CALLS: Counter[str] = Counter()  # in a form that the search of a source does not find


@hostile.kernel(
    "cpu", name="hostile", configs=[{"HOW": h} for h in ("crash", "hang", "exit", "raise", "late", "print")]
)
def _(x, *, out, HOW):
    if HOW == "crash":
        ctypes.string_at(0)
    if HOW == "hang":
        time.sleep(1000)
    if HOW == "exit":
        os._exit(3)
    if HOW == "raise":
        raise ValueError("never")
    if HOW == "print":
        os.write(1, b"{not json}\n")
    torch.add(x, 1, out=out)
    _CALLS.update([HOW])
    if _CALLS["late"] > 16:
        ctypes.string_at(0)


@sl.op("tune_test::pick")
def pick(x: Float[Tensor, "n c"], rows: Int64[Tensor, "m"]) -> Float[Tensor, "m c"]:
    return x[rows]


@pick.kernel("cpu", name="identity")
def _(x, rows, *, out):
    """Right where ``rows`` are zeros, as benchmark inputs of Inductor are."""
    out.copy_(x[:1].expand_as(out))


@pick.kernel("cpu", name="gather")
def _(x, rows, *, out):
    torch.index_select(x, 0, rows, out=out)


@sl.op("tune_test::turn")
def turn(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return -x


@turn.kernel("cpu", name="turned")
def _(x, *, out):
    torch.neg(x, out=out)


@turn.kernel("cpu", name="less")
def _(x, *, out):
    torch.mul(x, -1, out=out)


@dataclass(frozen=True)
class Compiled(Candidate):
    """A candidate for :data:`hostile` whose compiler may take the process along."""

    config: Config
    kernel: str = "compiled"
    compiles: bool = True

    def precompile(self, args):
        if self.config.as_dict()["HOW"] == "crash":
            ctypes.string_at(0)
        if self.config.as_dict()["HOW"] == "hang":
            time.sleep(1000)

    def prepare(self, args):
        self.precompile(args)
        return lambda: (args[0] + 1,)


def compiled(op, drawn):
    """A provider of candidates, as ``tune.worker`` imports it."""
    return [ReferenceCandidate(op), *(Compiled(Config.of({"HOW": h, "N": n})) for n, h in enumerate(HOWS))]


def own(op, drawn):
    """A provider of an op's own kernels: what has a provider runs in one worker process for all candidates."""
    return kernel_candidates(op, drawn.device, drawn.call.env)


HOWS = ("well", "crash", "hang", "well")
