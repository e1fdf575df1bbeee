"""The leaf products on CUDA: cuBLASLt and cuSPARSELt behind the C ABI, plans kept by their library (csrc/lt).

A plan is found by what it depends on: sizes, types, scaling, algorithm and device, which a call has in its arguments
and its config. No handle passes through a schema: an integer that stands for memory would be baked into compiled
graphs, exported programs and their caches, and mean nothing in the next process.
"""

from __future__ import annotations

import shiplap as sl
from shiplap.kernels.slidesparse import ops
from shiplap.kernels.slidesparse.lt.native import LIBRARY

__all__ = ["DEFAULT", "DENSE", "SPARSE", "WORKSPACE"]

WORKSPACE = 32 << 20  # kWorkspace of plan.h: no plan takes more

DENSE = (ops.mm_int8, ops.mm_fp8)
SPARSE = (ops.sparse_mm_int8, ops.sparse_mm_fp8, ops.sparse_mm_bf16, ops.sparse_mm_fp16)

# The library's own choice. What else there is depends on sizes, device and version: ``tuning.py`` asks. VERSION is that
# of the cuSPARSELt whose algorithm ALG is; another one takes its own choice instead (0: any).
DEFAULT = {"ALG": -1, "SPLIT_K": 0, "VERSION": 0}


def _bind(op: sl.Op, config: dict[str, int]) -> None:
    symbol = f"slidesparse_lt_{op.spec.opname}"
    op.kernel("cuda", sl.cabi(LIBRARY, symbol), name="lt", workspace=str(WORKSPACE), configs=[config])
    op.buckets(n="exact", k="exact")  # weights have few sizes, and the best algorithm hangs on each


for _op in DENSE:
    _bind(_op, {"ALG": -1})
for _op in SPARSE:
    _bind(_op, DEFAULT)
