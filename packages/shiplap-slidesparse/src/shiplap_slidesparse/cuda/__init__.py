"""The Triton kernels of slidesparse and the linear layers on CUDA. The first kernel that runs imports Triton."""

from __future__ import annotations

import torch
from torch import Tensor

import shiplap as sl
from shiplap_slidesparse import layers, ops
from shiplap_slidesparse.cuda.configs import CONFIGS, LIFTS, default_lift, default_quantise
from shiplap_slidesparse.cuda.late import lazy_function

__all__ = ["CONFIGS", "default_lift", "default_quantise"]

# --- activations ---------------------------------------------------------------------------------------------------


def _run_quantise(x: Tensor, pairs: int, *, q: Tensor, scale: Tensor, num_warps: int) -> None:
    """Write the rows of ``x``, quantised and lifted, to ``q`` and their scales to ``scale``. Lifting writes overlapping
    windows of four neighbours side by side. ``pairs`` is the number of pairs in a group of the weight's pattern (4 for
    6:8). The Triton kernel is imported at the first call.
    """
    lazy_function("activations", "launch_quantise")(x, pairs, q=q, scale=scale, num_warps=num_warps)


for _op in (ops.quantise_int8, ops.quantise_fp8):
    _op.kernel("cuda", _run_quantise, name="triton", configs=CONFIGS, default=default_quantise)


@ops.lift.kernel("cuda", name="triton", configs=LIFTS, default=default_lift)
def _(x: Tensor, pairs: int, *, out: Tensor, BLOCK: int, num_warps: int) -> None:
    """Write the lifted rows of ``x`` to ``out``. Lifting writes overlapping windows of four neighbours side by side.
    ``pairs`` is the number of pairs in a group of the weight's pattern (4 for 6:8). The Triton kernel is imported at
    the first call.
    """
    lazy_function("activations", "launch_lift")(x, pairs, out=out, BLOCK=BLOCK, num_warps=num_warps)


FLOATS = ("float32", "float16", "bfloat16")  # what follows a product is computed in float32

# --- layers -----------------------------------------------------------------------------------------------------------


def _packed_there(packed: Tensor | None, layout: int) -> bool | str:
    """Return True if ``packed`` is given and ``layout``, the number of its format, is that of cuSPARSELt. Otherwise
    return the reason why the kernel cannot run, as a string.
    """
    if packed is None:
        return "no packed weight"
    return layout == ops.CUSPARSELT or "its weight is in the portable layout: pack it on the GPU"


def _is_dense(dense: Tensor | None, tile: int) -> bool | str:
    """Return True if ``dense``, the weight as a row-major matrix, is given and both of its sizes are multiples of
    ``tile``. Otherwise return the reason why the kernel cannot run, as a string.
    """
    if dense is None:
        return "no dense weight"
    return not any(size % tile for size in dense.shape) or f"{tuple(dense.shape)} are no multiples of {tile}"


def _bind_8bit(op: sl.Op, dtype: torch.dtype) -> None:
    """Bind two CUDA kernels to ``op``, which computes a linear layer with a weight of the 8-bit ``dtype``. The kernel
    ``slide`` reads the packed weight and uses sparse tensor cores. The kernel ``dense`` reads the row-major matrix.
    """

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
        """Write the result of the linear layer to ``out``. It is computed from the weight ``packed`` on sparse tensor
        cores. The arguments are those of the enclosing ``op``, and ``dense`` is not read.
        """
        lazy_function("linear", "slide_8bit")(dtype, x, scale, packed, bias, pairs, layout, out)

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
        """Write the result of the linear layer to ``out``. It is computed from the row-major weight ``dense``. The
        arguments are those of the enclosing ``op``, and ``packed`` is not read.
        """
        lazy_function("linear", "dense_8bit")(dtype, x, scale, dense, bias, out)

    op.kernel("cuda", slide, dtypes=FLOATS, supports=_packed_there)
    op.kernel("cuda", dense, dtypes=FLOATS, supports=lambda dense: _is_dense(dense, 32))


def _bind_16bit(op: sl.Op) -> None:
    """Bind two CUDA kernels to ``op``, which computes a linear layer with a 16-bit weight. The kernel ``slide`` reads
    the packed weight and uses sparse tensor cores. The kernel ``dense`` reads the row-major matrix.
    """

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
        """Write the result of the linear layer to ``out``. It is computed from the weight ``packed`` on sparse tensor
        cores. The arguments are those of the enclosing ``op``, and ``dense`` is not read.
        """
        lazy_function("linear", "slide_16bit")(x, packed, n, bias, pairs, layout, out)

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
        """Write the result of the linear layer to ``out``. It is computed from the row-major weight ``dense``. The
        arguments are those of the enclosing ``op``, and ``packed`` is not read.
        """
        lazy_function("linear", "dense_16bit")(x, dense, bias, out)

    op.kernel("cuda", slide, supports=_packed_there)
    op.kernel("cuda", dense, supports=lambda dense: _is_dense(dense, 1))


_bind_8bit(layers.linear_int8, torch.int8)
_bind_8bit(layers.linear_fp8, torch.float8_e4m3fn)
_bind_16bit(layers.linear_bf16)
_bind_16bit(layers.linear_fp16)

for _layer in (layers.linear_int8, layers.linear_fp8, layers.linear_bf16, layers.linear_fp16):
    _layer.buckets(n="exact", k="exact")  # weights have few sizes, and which form wins hangs on each
