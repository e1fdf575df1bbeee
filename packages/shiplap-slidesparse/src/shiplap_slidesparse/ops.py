"""The leaf ops, declared: activations quantised and lifted, and products of padded operands.

Contracts, layouts and whose business padding is: docs/design/0011-slidesparse.md. In short: ``quantise_*`` and ``lift``
take any size and return whole tiles (rows a multiple of 16, depth of 32, zeros in the padding); products take whole
tiles only. ``layers.py`` has the ops that take a user's sizes.
"""

from __future__ import annotations

import torch
from jaxtyping import BFloat16, Float, Float8e4m3fn, Float16, Float32, Int8, Int32, UInt8
from torch import Tensor

import shiplap as sl
from shiplap.plugin_api import error
from shiplap_slidesparse import formats
from shiplap_slidesparse.lt import weights
from shiplap_slidesparse.quantise import quantise_rows

__all__ = [
    "lift",
    "mm_fp8",
    "mm_int8",
    "quantise_fp8",
    "quantise_int8",
    "sparse_mm_bf16",
    "sparse_mm_fp8",
    "sparse_mm_fp16",
    "sparse_mm_int8",
]

PORTABLE, CUSPARSELT = 0, 1  # layouts of a packed weight

_LIFTED = {"mp": "cdiv(m, 16) * 16", "kq": "cdiv(cdiv(k, 2 * pairs) * 4 * (pairs - 1), 32) * 32"}
_PAIRS = ("pairs >= 2", "pairs <= 8")
_TILES = ("m % 16 == 0", "k % 32 == 0", "n % 32 == 0")
_INT32 = "k <= 131040"  # 128 * 128 * k stays below 2^31
_LAYOUTS = ("layout >= 0", "layout <= 1")


# --- activations ------------------------------------------------------------------------------------------------------


def _quantise_and_lift(x: Tensor, dtype: torch.dtype, pairs: int) -> tuple[Tensor, Tensor]:
    """Return the rows of ``x`` quantised to ``dtype`` and lifted, and the scale of each row. Lifting writes overlapping
    windows of four elements side by side. ``pairs`` is the number of pairs in a group of the weight's pattern (4 for
    6:8). Rows of zeros with the scale 1 pad the number of rows to a multiple of 16.
    """
    q, scale = quantise_rows(x, dtype)
    lifted = formats.lift_columns(q, pairs)
    return lifted, torch.cat((scale, scale.new_ones(lifted.shape[0] - x.shape[0])))


@sl.op("slidesparse::quantise_int8", dims=_LIFTED, requires=_PAIRS, outputs=("q", "scale"))
def quantise_int8(x: Float[Tensor, "m k"], pairs: int = 2) -> tuple[Int8[Tensor, "mp kq"], Float32[Tensor, "mp"]]:
    """Return the rows of ``x`` as int8 with a scale for each row, and lifted. ``quantise.py`` has the formula of the
    scale.

    Lifting writes overlapping windows of four neighbours side by side, ``pairs - 1`` of them for each group of
    ``pairs`` pairs. With 2 pairs nothing is duplicated, which suits dense and 2:4 weights. Rows and columns that are
    added hold zeros, with the scale 1. A row that holds NaN or an infinity is all zeros with the scale NaN.
    """
    return _quantise_and_lift(x, torch.int8, pairs)


@sl.op("slidesparse::quantise_fp8", dims=_LIFTED, requires=_PAIRS, outputs=("q", "scale"))
def quantise_fp8(
    x: Float[Tensor, "m k"], pairs: int = 2
) -> tuple[Float8e4m3fn[Tensor, "mp kq"], Float32[Tensor, "mp"]]:
    """Return the rows of ``x`` as float8_e4m3fn with a scale for each row, and lifted as by ``quantise_int8``."""
    return _quantise_and_lift(x, torch.float8_e4m3fn, pairs)


@sl.op("slidesparse::lift", dims=_LIFTED, requires=_PAIRS)
def lift(x: Float[Tensor, "m k"], pairs: int = 2) -> Float[Tensor, "mp kq"]:
    """Return the rows of ``x`` lifted, in their own dtype. Lifting writes overlapping windows of four neighbours side
    by side, ``pairs - 1`` of them for each group of ``pairs`` pairs. A 2:4 weight multiplied with lifted rows can have
    a pattern such as 6:8. Added rows and columns are zeros.
    """
    return formats.lift_columns(x, pairs)


# --- products ---------------------------------------------------------------------------------------------------------


def product_of_transposed(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right.T``. If ``left`` is int8, the product is exact, in int32. Otherwise it is float32, or
    float64 if ``left`` is float64.
    """
    if left.dtype == torch.int8:
        return (left.to(torch.float64) @ right.to(torch.float64).t()).to(torch.int32)
    wide = torch.float64 if left.dtype == torch.float64 else torch.float32
    return left.to(wide) @ right.to(wide).t()


def round_to_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``value`` in ``dtype``. A float64 value is returned as it is, since the audit runs references in double
    precision.
    """
    return value if value.dtype == torch.float64 else value.to(dtype)


def expand_packed(packed: Tensor, n: int, k: int, dtype: torch.dtype, layout: int) -> Tensor:
    """Return a packed weight as a row-major matrix ``[n, k]`` with at most two non-zeros in each four neighbours.
    ``layout`` is the number of the packed format. Raise ``SL211`` for cuSPARSELt's format on a device other than a GPU.
    """
    if layout == PORTABLE:
        return formats.decompress_two_of_four(packed, n, k, dtype)
    if packed.device.type != "cuda":
        raise error(
            "SL211",
            where="slidesparse",
            got=f"a weight packed by cuSPARSELt on {packed.device}",
            expected="the portable layout",
            fix="pack the weight on the device that uses it",
        )
    return weights.expand_weight(packed, n, k, dtype)


@sl.op("slidesparse::mm_int8", requires=(*_TILES, _INT32))
def mm_int8(q: Int8[Tensor, "m k"], weight: Int8[Tensor, "n k"]) -> Int32[Tensor, "m n"]:
    """Return ``q @ weight.T`` of int8 operands, summed exactly in int32."""
    return product_of_transposed(q, weight)


@sl.op("slidesparse::mm_fp8", requires=_TILES)
def mm_fp8(
    q: Float8e4m3fn[Tensor, "m k"],
    weight: Float8e4m3fn[Tensor, "n k"],
    scale_q: Float32[Tensor, "m"],
    scale_weight: Float32[Tensor, "n"],
) -> BFloat16[Tensor, "m n"]:
    """Return ``(q @ weight.T) * scale_q[:, None] * scale_weight``, rounded once."""
    return round_to_dtype(product_of_transposed(q, weight) * scale_q[:, None] * scale_weight, torch.bfloat16)


@sl.op("slidesparse::sparse_mm_int8", requires=(*_TILES, _INT32, *_LAYOUTS))
def sparse_mm_int8(q: Int8[Tensor, "m k"], packed: UInt8[Tensor, "_"], n: int, layout: int = 0) -> Int32[Tensor, "m n"]:
    """Return ``q @ weight.T`` in int32, with a packed 2:4 weight ``[n, k]``, two of whose four elements may be
    non-zero. ``layout`` is the number of the packed format. Raise ``SL211`` if ``packed`` has the wrong size.
    """
    return product_of_transposed(q, expand_packed(packed, n, q.shape[1], torch.int8, layout))


@sl.op("slidesparse::sparse_mm_fp8", requires=(*_TILES, *_LAYOUTS))
def sparse_mm_fp8(
    q: Float8e4m3fn[Tensor, "m k"], packed: UInt8[Tensor, "_"], n: int, layout: int = 0
) -> BFloat16[Tensor, "m n"]:
    """Return ``q @ weight.T``, summed in float32, without scales, which the caller applies. The packed weight ``[n,
    k]`` is 2:4, that is, two of each four elements may be non-zero. ``layout`` is the number of the packed format.
    """
    return round_to_dtype(
        product_of_transposed(q, expand_packed(packed, n, q.shape[1], torch.float8_e4m3fn, layout)), torch.bfloat16
    )


@sl.op("slidesparse::sparse_mm_bf16", requires=(*_TILES, *_LAYOUTS))
def sparse_mm_bf16(
    x: BFloat16[Tensor, "m k"], packed: UInt8[Tensor, "_"], n: int, layout: int = 0
) -> BFloat16[Tensor, "m n"]:
    """Return ``x @ weight.T``, summed in float32. The packed weight ``[n, k]`` is 2:4, that is, two of each four
    elements may be non-zero. ``layout`` is the number of the packed format.
    """
    return round_to_dtype(
        product_of_transposed(x, expand_packed(packed, n, x.shape[1], torch.bfloat16, layout)), torch.bfloat16
    )


@sl.op("slidesparse::sparse_mm_fp16", requires=(*_TILES, *_LAYOUTS))
def sparse_mm_fp16(
    x: Float16[Tensor, "m k"], packed: UInt8[Tensor, "_"], n: int, layout: int = 0
) -> Float16[Tensor, "m n"]:
    """Return ``x @ weight.T``, summed in float32. The packed weight ``[n, k]`` is 2:4, that is, two of each four
    elements may be non-zero. ``layout`` is the number of the packed format.
    """
    return round_to_dtype(
        product_of_transposed(x, expand_packed(packed, n, x.shape[1], torch.float16, layout)), torch.float16
    )
