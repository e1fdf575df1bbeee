"""Audits of a kernel of which the interpreter runs one program after another. Run by test_interpreted.py."""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
from shiplap.audit import session
from shiplap.audit.child_process import ChildLimits


@triton.jit
def row_sums(x, out, m, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + row, tl.sum(tl.load(x + row * m + at, mask=at < m, other=0.0), 0))


@sl.op("interpreted::sums", requires=("m >= 1",))
def sums(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "n"]:
    return x.sum(1)


sums.kernel("cuda", sl.triton(row_sums, grid="n", arguments={"BLOCK": "pow2ceil(m)"}))

session.INTERPRETER_SECONDS = 0.1  # seconds for a launch: some hundred programs are too many
(found,) = sl.audit(sums, checks=("kernels",), seed=3)
result = {"kernels": [found.verdict, found.evidence]}


@sl.op("interpreted::endless", requires=("m >= 1",))
def endless(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "n"]:
    return x.sum(1)


@triton.jit
def slow_sums(x, out, m, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    for _ in range(1_000_000):
        tl.store(out + row, tl.sum(tl.load(x + row * m + at, mask=at < m, other=0.0), 0))


endless.kernel("cuda", sl.triton(slow_sums, grid="n", arguments={"BLOCK": "pow2ceil(m)"}))
torch.set_num_threads(1)
(found,) = sl.audit(endless, checks=("numerics",), seed=3, limits=ChildLimits(busy_s=2.0))
result["numerics"] = [found.verdict, found.evidence]
print(json.dumps(result))
