"""The kernels of slidesparse in Triton, and the linear layers on CUDA. Triton is imported when one of them runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import shiplap as sl
from shiplap_slidesparse import layers, ops

__all__ = ["CONFIGS", "default", "default_lift", "late"]

_found: dict[tuple[str, str], Callable[..., Any]] = {}


def late(module: str, name: str) -> Callable[..., Any]:
    """The function ``name`` of a module of this package, imported at the first call."""
    found = _found.get((module, name))
    if found is None:
        found = _found[module, name] = getattr(import_module(f"{__name__}.{module}"), name)
    return found


# --- activations: bound to the memory, so what counts is how much of it is under way at once --------------------------

CONFIGS = [{"num_warps": w} for w in (4, 8, 2, 16)]


def default(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Many rows under way hide more than many threads on one do: they meet twice in each."""
    return CONFIGS[0] if sizes["k"] > 1024 else CONFIGS[2]


def _quantise(x: Tensor, pairs: int, *, q: Tensor, scale: Tensor, num_warps: int) -> None:
    late("activations", "quantise")(x, pairs, q=q, scale=scale, num_warps=num_warps)


for _op in (ops.quantise_int8, ops.quantise_fp8):
    _op.kernel("cuda", _quantise, name="triton", configs=CONFIGS, default=default)

LIFTS = [{"BLOCK": b, "num_warps": w} for b, w in ((1024, 8), (512, 4), (1024, 4), (2048, 8), (2048, 16), (256, 4))]


def default_lift(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Few windows want few warps."""
    windows = (sizes["k"] // (2 * sizes["pairs"]) + 1) * (sizes["pairs"] - 1)
    return LIFTS[0] if windows > 1024 else LIFTS[1] if windows > 256 else LIFTS[5]


@ops.lift.kernel("cuda", name="triton", configs=LIFTS, default=default_lift)
def _(x: Tensor, pairs: int, *, out: Tensor, BLOCK: int, num_warps: int) -> None:
    late("activations", "lift")(x, pairs, out=out, BLOCK=BLOCK, num_warps=num_warps)


FLOATS = ("float32", "float16", "bfloat16")  # what follows a product is computed in float32

# --- layers -----------------------------------------------------------------------------------------------------------


def _packed_there(packed: Tensor | None, layout: int) -> bool | str:
    if packed is None:
        return "no packed weight"
    return layout == ops.CUSPARSELT or "its weight is in the portable layout: pack it on the GPU"


def _dense_there(dense: Tensor | None, tile: int) -> bool | str:
    if dense is None:
        return "no dense weight"
    return not any(size % tile for size in dense.shape) or f"{tuple(dense.shape)} are no multiples of {tile}"


def _bind_8bit(op: sl.Op, dtype: torch.dtype) -> None:
    def slide(
        x: Tensor,
        scale: Tensor,
        dense: Tensor | None,
        packed: Tensor,
        bias: Tensor | None,
        pairs: int,
        layout: int,
        *,
        out: Tensor,
    ) -> None:
        late("linear", "slide_8bit")(dtype, x, scale, packed, bias, pairs, layout, out)

    def dense(
        x: Tensor,
        scale: Tensor,
        dense: Tensor,
        packed: Tensor | None,
        bias: Tensor | None,
        pairs: int,
        layout: int,
        *,
        out: Tensor,
    ) -> None:
        late("linear", "dense_8bit")(dtype, x, scale, dense, bias, out)

    op.kernel("cuda", slide, dtypes=FLOATS, supports=lambda *a: _packed_there(a[3], a[6]))
    op.kernel("cuda", dense, dtypes=FLOATS, supports=lambda *a: _dense_there(a[2], 32))


def _bind_16bit(op: sl.Op) -> None:
    def slide(
        x: Tensor,
        n: int,
        dense: Tensor | None,
        packed: Tensor,
        bias: Tensor | None,
        pairs: int,
        layout: int,
        *,
        out: Tensor,
    ) -> None:
        late("linear", "slide_16bit")(x, packed, n, bias, pairs, layout, out)

    def dense(
        x: Tensor,
        n: int,
        dense: Tensor,
        packed: Tensor | None,
        bias: Tensor | None,
        pairs: int,
        layout: int,
        *,
        out: Tensor,
    ) -> None:
        late("linear", "dense_16bit")(x, dense, bias, out)

    op.kernel("cuda", slide, supports=lambda *a: _packed_there(a[3], a[6]))
    op.kernel("cuda", dense, supports=lambda *a: _dense_there(a[2], 1))


_bind_8bit(layers.linear_int8, torch.int8)
_bind_8bit(layers.linear_fp8, torch.float8_e4m3fn)
_bind_16bit(layers.linear_bf16)
_bind_16bit(layers.linear_fp16)

for _layer in (layers.linear_int8, layers.linear_fp8, layers.linear_bf16, layers.linear_fp16):
    _layer.buckets(n="exact", k="exact")  # weights have few sizes, and which form wins hangs on each
