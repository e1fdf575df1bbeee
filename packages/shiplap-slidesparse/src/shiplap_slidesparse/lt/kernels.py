"""The products on CUDA: cuBLASLt and cuSPARSELt behind the C ABI, with plans kept by their library (csrc/lt).

The key of a plan has sizes, types, scaling, algorithm and device, which a call has in its arguments and its config. No
handle passes through a schema: an integer that stands for memory would be baked into compiled graphs, exported programs
and their caches, and would mean nothing in the next process.
"""

from __future__ import annotations

import shiplap as sl
from shiplap.plugin_api import check_configs
from shiplap_slidesparse import ops
from shiplap_slidesparse.lt.native import LIBRARY

__all__ = ["DEFAULT", "DENSE", "NAME", "SPARSE", "WORKSPACE"]

NAME = "lt"  # of the kernels, in choices and tables

# Bytes, as plan.h has them: no plan takes more. Those of cuSPARSELt grow with the weight.
WORKSPACE = 32 << 20
SPARSE_WORKSPACE = f"{WORKSPACE} + n * k // 4"

DENSE: tuple[sl.Op, ...] = (ops.mm_int8, ops.mm_fp8)
SPARSE: tuple[sl.Op, ...] = (ops.sparse_mm_int8, ops.sparse_mm_fp8, ops.sparse_mm_bf16, ops.sparse_mm_fp16)

# The library's own choice. What else there is depends on sizes, device and version: ``tuning.py`` asks. VERSION is that
# of the cuSPARSELt whose algorithm ALG is; another one takes its own choice instead (0: any).
DEFAULT = {"ALG": -1, "SPLIT_K": 0, "VERSION": 0}


def _bind_product(op: sl.Op, workspace: str, config: dict[str, int]) -> None:
    """Bind the C function ``slidesparse_lt_<name of the op>`` as the CUDA kernel of the product ``op``. ``workspace``
    is the expression for the number of its scratch bytes. ``config`` holds the number of the default algorithm.
    """
    symbol = f"slidesparse_lt_{op.spec.opname}"
    op.kernel("cuda", sl.cabi(LIBRARY, symbol, align=16), name=NAME, workspace=workspace, configs=[config])
    op.buckets(n="exact", k="exact")  # weights have few sizes, and the best algorithm hangs on each


_RANGES = {"ALG": (-1, 1 << 15), "SPLIT_K": (-1, 64), "VERSION": (0, 1 << 31)}

# The library refuses an algorithm that it does not know; what is no number of one does not get there.
check_configs("cuda", NAME, lambda config: all(isinstance(v, int) and v in range(*_RANGES[n]) for n, v in config.items))

for _op in DENSE:
    _bind_product(_op, str(WORKSPACE), {"ALG": -1})
for _op in SPARSE:
    _bind_product(_op, SPARSE_WORKSPACE, DEFAULT)
