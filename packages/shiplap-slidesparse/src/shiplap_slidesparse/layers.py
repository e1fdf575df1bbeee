"""Whole linear layers as ops: operands of any size, results in the dtype of the input, scales and bias applied.

Each op takes up to two forms of the weight: *dense* (pruned, quantised) and *packed*. Both are the same numbers, so
kernels that read one or the other are candidates of one choice, made by ``sl.tune`` per bucket of rows, and a sparse
kernel that is slower is never chosen. One of the forms may be None, to save memory.
"""

from __future__ import annotations

import torch
from jaxtyping import BFloat16, Float, Float8e4m3fn, Float16, Float32, Int8, Int64, UInt8
from torch import Tensor

import shiplap as sl
from shiplap.plugin_api import error
from shiplap_slidesparse import formats
from shiplap_slidesparse.ops import expand_packed, product_of_transposed, round_to_dtype
from shiplap_slidesparse.quantise import quantise_rows

INT8_DEPTH = 65536  # lifted for any pattern, sums of int8 stay below 2^31
MOST_EXPERTS = 1024
_EXPERTS = ("experts >= 1", f"experts <= {MOST_EXPERTS}", "rows % experts == 0")
_REQUIRES = ("pairs >= 2", "pairs <= 8", "layout >= 0", "layout <= 1")


def _dense_weight(
    dense: Tensor | None, packed: Tensor | None, n: int, k: int, pairs: int, layout: int, dtype: torch.dtype
) -> Tensor:
    """Return the weight as a row-major matrix ``[n, k]``. It is ``dense`` if that is given, and otherwise the expanded
    ``packed``. ``pairs`` is the number of pairs in a group of the pattern, and ``layout`` is the number of the packed
    format. Raise ``SL211`` if both are None.
    """
    if dense is not None:
        return dense
    if packed is None:
        raise error(
            "SL211",
            where="slidesparse linear layer",
            got="neither a dense nor a packed weight",
            expected="one of them",
            fix="call pack() on the weight, and pass keep= to keep one of its forms",
        )
    slid = expand_packed(packed, formats.dense_depth(n), formats.lifted_depth(k, pairs), dtype, layout)
    return formats.unslide_weight(slid, k, formats.Pattern(pairs))[:n]


def _add_bias(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``total`` plus ``bias``, rounded to ``dtype``. ``total`` is a product in float32 or wider, and ``bias``
    may be None.
    """
    return round_to_dtype(total if bias is None else total + bias.to(total.dtype), dtype)


def _quantised_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of ``x`` and the 8-bit ``weight`` in the dtype of ``x``, with the scales of both and the bias
    applied. Each row of ``x`` is quantised to the dtype of the weight first.
    """
    q, scale_q = quantise_rows(x, torch.int8 if weight.dtype == torch.int8 else torch.float8_e4m3fn)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return _add_bias(product_of_transposed(q, weight).to(wide) * scale_q[:, None] * scale, bias, x.dtype)


@sl.op("slidesparse::linear_int8", requires=(*_REQUIRES, f"k <= {INT8_DEPTH}"))
def linear_int8(
    x: Float[Tensor, "m k"],
    scale: Float32[Tensor, "n"],
    dense: Int8[Tensor, "n k"] | None = None,
    packed: UInt8[Tensor, "_"] | None = None,
    bias: Float[Tensor, "n"] | None = None,
    pairs: int = 4,
    layout: int = 0,
) -> Float[Tensor, "m n"]:
    """Return ``x``, quantised per row, times an int8 weight and a ``scale`` per column, plus ``bias``.

    ``dense`` and ``packed`` are two forms of one weight. Raise ``SL211`` if both are None. ``pairs`` is the number of
    pairs in a group of the pattern. ``layout`` is the number of the packed format, 0 for the portable one and 1 for
    that of cuSPARSELt.
    """
    return _quantised_product(
        x, _dense_weight(dense, packed, len(scale), x.shape[1], pairs, layout, torch.int8), scale, bias
    )


@sl.op("slidesparse::linear_fp8", requires=_REQUIRES)
def linear_fp8(
    x: Float[Tensor, "m k"],
    scale: Float32[Tensor, "n"],
    dense: Float8e4m3fn[Tensor, "n k"] | None = None,
    packed: UInt8[Tensor, "_"] | None = None,
    bias: Float[Tensor, "n"] | None = None,
    pairs: int = 4,
    layout: int = 0,
) -> Float[Tensor, "m n"]:
    """Return ``x``, quantised per row, times a float8_e4m3fn weight and a ``scale`` per column, plus ``bias``.

    ``dense`` and ``packed`` are two forms of one weight. Raise ``SL211`` if both are None. ``pairs`` is the number of
    pairs in a group of the pattern. ``layout`` is the number of the packed format, 0 for the portable one and 1 for
    that of cuSPARSELt.
    """
    weight = _dense_weight(dense, packed, len(scale), x.shape[1], pairs, layout, torch.float8_e4m3fn)
    return _quantised_product(x, weight, scale, bias)


@sl.op("slidesparse::linear_bf16", requires=_REQUIRES)
def linear_bf16(
    x: BFloat16[Tensor, "m k"],
    n: int,
    dense: BFloat16[Tensor, "n k"] | None = None,
    packed: UInt8[Tensor, "_"] | None = None,
    bias: BFloat16[Tensor, "n"] | None = None,
    pairs: int = 4,
    layout: int = 0,
) -> BFloat16[Tensor, "m n"]:
    """Return ``x`` times a bfloat16 weight of ``n`` rows, plus ``bias``, summed in float32.

    ``dense`` and ``packed`` are two forms of one weight. Raise ``SL211`` if both are None. ``pairs`` is the number of
    pairs in a group of the pattern. ``layout`` is the number of the packed format, 0 for the portable one and 1 for
    that of cuSPARSELt.
    """
    weight = _dense_weight(dense, packed, n, x.shape[1], pairs, layout, torch.bfloat16)
    return _add_bias(product_of_transposed(x, weight), bias, torch.bfloat16)


@sl.op("slidesparse::linear_fp16", requires=_REQUIRES)
def linear_fp16(
    x: Float16[Tensor, "m k"],
    n: int,
    dense: Float16[Tensor, "n k"] | None = None,
    packed: UInt8[Tensor, "_"] | None = None,
    bias: Float16[Tensor, "n"] | None = None,
    pairs: int = 4,
    layout: int = 0,
) -> Float16[Tensor, "m n"]:
    """Return ``x`` times a float16 weight of ``n`` rows, plus ``bias``, summed in float32.

    ``dense`` and ``packed`` are two forms of one weight. Raise ``SL211`` if both are None. ``pairs`` is the number of
    pairs in a group of the pattern. ``layout`` is the number of the packed format, 0 for the portable one and 1 for
    that of cuSPARSELt.
    """
    weight = _dense_weight(dense, packed, n, x.shape[1], pairs, layout, torch.float16)
    return _add_bias(product_of_transposed(x, weight), bias, torch.float16)


def _experts_product(x: Tensor, chosen: Tensor, scale: Tensor, weight: Tensor, experts: int) -> Tensor:
    """Return the products of the rows of ``x`` with the 8-bit weights of their experts, in the dtype of ``x``. Each row
    is quantised first. ``chosen`` holds the number of the expert of each row. The result of a row is zeros if its
    number is not that of an expert.
    """
    total = x.new_zeros(x.shape[0], scale.shape[0] // experts)
    for number, (part, scales) in enumerate(zip(weight.chunk(experts), scale.chunk(experts), strict=True)):
        total = torch.where((chosen == number)[:, None], _quantised_product(x, part, scales, None), total)
    return total


@sl.op(
    "slidesparse::experts_int8",
    dims={"n": "rows // experts"},
    requires=(*_EXPERTS, f"k <= {INT8_DEPTH}"),
)
def experts_int8(
    x: Float[Tensor, "m k"],
    chosen: Int64[Tensor, "m"],
    scale: Float32[Tensor, "rows"],
    weight: Int8[Tensor, "rows k"],
    experts: int,
) -> Float[Tensor, "m n"]:
    """Return ``linear_int8`` of each row with the ``n`` rows of the weight that belong to its expert. A row without an
    expert gives zeros.
    """
    return _experts_product(x, chosen, scale, weight, experts)


@sl.op(
    "slidesparse::experts_fp8",
    dims={"n": "rows // experts"},
    requires=_EXPERTS,
)
def experts_fp8(
    x: Float[Tensor, "m k"],
    chosen: Int64[Tensor, "m"],
    scale: Float32[Tensor, "rows"],
    weight: Float8e4m3fn[Tensor, "rows k"],
    experts: int,
) -> Float[Tensor, "m n"]:
    """Return ``linear_fp8`` of each row with the ``n`` rows of the weight that belong to its expert. A row without an
    expert gives zeros.
    """
    return _experts_product(x, chosen, scale, weight, experts)


for _experts in (experts_int8, experts_fp8):
    _experts.sharding({"x": 0, "chosen": 0}, 0)
for _linear in (linear_int8, linear_fp8, linear_bf16, linear_fp16):
    # Rows only: the two forms of a weight cannot be cut alike, since what is packed has no dims. ``tensor_parallel``
    # cuts a layer before it is packed.
    _linear.sharding({"x": 0}, 0)
