"""The CPU kernels of ``ops.py``: C functions, and the convolution as a template that looks neighbours up itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import shiplap as sl
from shiplap_sparse3d import ops

__all__ = ["CPU_FLOATS", "LIBRARY", "OUT_COORDS_SPACE", "bind_kernel"]

LIBRARY = Path(__file__).parent / "libshiplap_sparse3d.so"


def bind_kernel(
    op: sl.Op, workspace: str | None = None, *, strided: tuple[str, ...] = (), dtypes: tuple[str, ...] = ()
) -> None:
    """Bind the C function ``sparse3d_<name of the op>`` of this package's library as the CPU kernel of ``op``.
    ``workspace`` is the expression for the number of scratch bytes. ``strided`` names inputs that may have any strides.
    ``dtypes`` are the dtypes that the kernel accepts. If ``workspace`` is None, the kernel needs no scratch memory. If
    ``dtypes`` is empty, it accepts all dtypes that the op declares.
    """
    kernel = sl.cabi(LIBRARY, f"sparse3d_{op.spec.opname}", strided=strided)
    op.kernel("cpu", kernel, workspace=workspace, dtypes=dtypes)


_BOUND = ops.OUT_COORDS_BOUND
# Pages are touched as the hash set grows, so memory follows the outputs found and not this bound.
OUT_COORDS_SPACE = (
    f"24 * n + 16 * pow2ceil(max(2 * {_BOUND}, 16)) + 16 * {_BOUND} + 8 * (kernel[0] + kernel[1] + kernel[2]) + 49664"
)
_SINGLE_OR_DOUBLE = ("float32", "float64")
CPU_FLOATS = ("bfloat16", "float16", *_SINGLE_OR_DOUBLE)  # whose sums are float32 at least

bind_kernel(ops.unique_coords, "24 * n + 49408")
bind_kernel(ops.segment_mean, dtypes=_SINGLE_OR_DOUBLE)
bind_kernel(ops.subm_table, "24 * n + 49472")
bind_kernel(ops.out_coords, OUT_COORDS_SPACE)
bind_kernel(ops.conv_table, "24 * (n + m) + 49792")
bind_kernel(ops.transpose_table)
_SUM = "max(itemsize, 4)"  # bytes of a sum
_WIDENED = "(4 // itemsize // 2)"  # 1 for elements of 16 bits, else 0
_UNSORTED = "64 * cdiv(m * k, 16)"
bind_kernel(
    ops.conv,
    f"(k * cg * groups * 16 * cdiv(co // groups, 16) + 16 * cdiv(co, 16)) * {_SUM} + {_UNSORTED}"
    f" + threads * (2112 * k + 64 * cdiv(k, 16) + (1 - {_WIDENED}) * 65536 + 4 * {_WIDENED}"
    " * (max(65536, 256 * groups * cdiv(co // groups, 16)) + max(8192, 192 * cdiv(ci, 16))))",
    strided=("weight",),
    dtypes=CPU_FLOATS,
)
bind_kernel(
    ops.conv_weight_grad,
    f"k * max(co * 16 * cdiv(ci // groups, 16), 32 * cdiv(co, 16)) * {_SUM} + 64 * cdiv(k, 8) + {_UNSORTED}"
    f" + threads * (2048 * (cdiv(ci, 16) + cdiv(co, 16) + min(1, groups - 1)) * {_SUM} + 4160 * k + 64 * cdiv(k, 16))",
    dtypes=CPU_FLOATS,
)

# --- the convolution as a template ------------------------------------------------------------------------------------

Sizes = Mapping[str, Any]
TILE = 16384  # sums of a tile: with the weights of a tap they stay in the second cache


def _conv_tile_configs(sizes: Sizes) -> tuple[dict[str, int], ...]:
    """Return the configurations of the template of the CPU convolution, a tuple of one dict with the sizes of a tile.

    ``BN``, the number of output channels, is ``sizes["co"]`` rounded up to a multiple of 32, at most 256.
    Each neighbour is then looked up once. ``BM``, the number of rows, is 16 to 256, so that the sums of a tile fit the
    second-level cache.
    """
    wide = min(256, -(-max(sizes["co"], 1) // 32) * 32)
    return ({"BM": max(16, min(256, TILE // wide)), "BN": wide},)


def _accepts_tiles(sizes: Sizes, dtypes: Mapping[str, torch.dtype], config: Mapping[str, Any]) -> bool | str:
    """Return True if the tiled CPU convolution accepts a call with these sizes and dtypes. Otherwise return the reason
    as a string. ``config`` is not used.
    """
    if "order" in dtypes:
        return "a sorted table: those are for GPUs"
    if sizes["groups"] != 1:
        return f"{sizes['groups']} groups of channels"
    if odd := sorted({str(d) for d in dtypes.values()} - {"torch.float32", "torch.bfloat16", "torch.int32"}):
        return f"{odd[0]} is neither float32 nor bfloat16"
    if empty := [name for name in ("n", "m", "k", "ci", "co") if sizes[name] == 0]:
        return f"{empty[0]} = 0"
    return True


# Level with the C kernel and a kernel of what follows, which need no compiler: docs/design/0009-sparse3d-cpu.md.
ops.conv.template(
    "cpu",
    "conv.cpp.jinja",
    configs=_conv_tile_configs,
    innermost={"feats": "ci", "table": "k"},
    supports=_accepts_tiles,
    default=False,
)
