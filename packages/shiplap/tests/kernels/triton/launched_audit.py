"""Audits of ops whose kernels are plain Triton functions, interpreted. Run by test_launched.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from tests.gpu.launched_ops import layer_norm, momentum_


@triton.jit
def uneven(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * tl.where(at < 2, 2.0, 2.5), mask=at < n)


@sl.op("launched::wrong")
def wrong(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


wrong.kernel("cuda", sl.triton(uneven, grid="cdiv(n, BLOCK)", constants={"BLOCK": 32}), dtypes="float32")

found = {
    op.spec.opname: {f.check: [f.verdict, f.evidence[:200]] for f in sl.audit(op, checks=("numerics",), seed=3)}
    for op in (layer_norm, momentum_, wrong)
}
print(json.dumps(found))
