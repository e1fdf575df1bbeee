"""The CPU kernels: C functions with the names of the ops (``csrc/``), with VNNI for integers where the CPU has it."""

from __future__ import annotations

from pathlib import Path

import shiplap as sl
from shiplap_slidesparse import layers, ops

LIBRARY = Path(__file__).parent / "libshiplap_slidesparse.so"
FLOATS = ("float32", "bfloat16", "float16")

# In bytes; the formulas of csrc/*.cpp. A block is 16 rows of a weight, decoded.
_ROWS = "threads * (5 * k + 192)"  # a row being quantised, as floats and as bytes
_INT8 = "threads * 16 * (2 * {k} + 31) + min(m, 256) * (3 * {k} + 101) + 320"  # blocks, panels, rows beside them
_FLOATS = "4 * (m + threads * 16) * k + 64"
_DEPTH = "max(k, cdiv(cdiv(k, 2 * pairs) * 4 * (pairs - 1), 32) * 32)"
_INT8_LAYER = f"m * {_DEPTH} + {_INT8.format(k=_DEPTH)} + 4 * m + {_ROWS} + 256"
_FP8_LAYER = f"(5 * m + 64 * threads) * {_DEPTH} + 4 * m + {_ROWS} + 384"
_EXPERTS = f"8 * (m + experts) + 4 * m + {_ROWS} + 512"
_FLOAT_LAYER = f"4 * (m * ({_DEPTH} + k + 16) + threads * 16 * {_DEPTH}) + 256"


def _bind_kernel(op: sl.Op, workspace: str | None = None, dtypes: tuple[str, ...] = ()) -> None:
    """Bind the C function ``slidesparse_<name of the op>`` of the library as the CPU kernel of ``op``. ``workspace`` is
    the expression for the number of scratch bytes, or None for no scratch memory. ``dtypes`` are those that the kernel
    accepts. If it is empty, the kernel accepts all dtypes that the op declares.
    """
    op.kernel("cpu", sl.cabi(LIBRARY, f"slidesparse_{op.spec.opname}"), workspace=workspace, dtypes=dtypes)


def _bind_layer_kernels(op: sl.Op, workspace: str, dtypes: tuple[str, ...] = ()) -> None:
    """Bind one C function as two CPU kernels of ``op``, an op that computes a linear layer. The kernel ``slide`` reads
    the packed sparse weight, and the kernel ``dense`` reads the row-major matrix. ``workspace`` is the expression for
    the number of scratch bytes. ``dtypes`` are those that the kernels accept. If it is empty, they accept all dtypes
    that the op declares.
    """
    for name, slide in (("slide", 1), ("dense", 0)):
        kernel = sl.cabi(LIBRARY, f"slidesparse_{op.spec.opname}")
        op.kernel("cpu", kernel, name=name, workspace=workspace, dtypes=dtypes, configs=[{"SLIDE": slide}])


_bind_kernel(ops.quantise_int8, _ROWS)
_bind_kernel(ops.quantise_fp8, _ROWS)
_bind_kernel(ops.lift)
_bind_kernel(ops.mm_int8, _INT8.format(k="k"))
_bind_kernel(ops.mm_fp8, _FLOATS)
_bind_kernel(ops.sparse_mm_int8, _INT8.format(k="k"))
_bind_kernel(ops.sparse_mm_fp8, _FLOATS)
_bind_kernel(ops.sparse_mm_bf16, _FLOATS)
_bind_kernel(ops.sparse_mm_fp16, _FLOATS)
_bind_layer_kernels(layers.linear_int8, _INT8_LAYER, FLOATS)
_bind_layer_kernels(layers.linear_fp8, _FP8_LAYER, FLOATS)
_bind_kernel(layers.experts_int8, f"m * k + {_INT8.format(k='k')} + {_EXPERTS}", FLOATS)
_bind_kernel(layers.experts_fp8, f"(5 * m + 64 * threads) * k + {_EXPERTS}", FLOATS)
_bind_layer_kernels(layers.linear_bf16, _FLOAT_LAYER)
_bind_layer_kernels(layers.linear_fp16, _FLOAT_LAYER)
