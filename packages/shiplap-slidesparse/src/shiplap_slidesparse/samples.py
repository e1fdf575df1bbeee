"""The samples of the audit and the tuner: weights of the pattern, packed for the device that they are drawn for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

import shiplap as sl
from shiplap_slidesparse import formats, layers, lt, ops
from shiplap_slidesparse.quantise import quantise_weight


def pack_for(slid: Tensor, layout: int) -> tuple[Tensor, int]:
    """Return the 2:4 weight ``slid`` (at most two non-zeros in each four elements) packed for its device, and the
    number of the packed format. Raise ``ValueError`` if ``layout`` is the number of another format than the device's.
    """
    if slid.device.type == "cuda" and lt.available(slid.device, slid.dtype) is True:
        return lt.compress_weight(slid), ops.CUSPARSELT
    if layout != ops.PORTABLE:
        raise ValueError(f"layout {layout} on {slid.device}")  # a sample that there is not
    return formats.compress_two_of_four(slid), ops.PORTABLE


def _draw_matrix(rng: Generator, rows: int, columns: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Return a random matrix on ``device``. The values of an int8 matrix are uniformly distributed from -127 to 127.
    Those of any other matrix are normally distributed.
    """
    if dtype == torch.int8:
        return torch.randint(-127, 128, (rows, columns), generator=rng).to(device, dtype)
    return torch.randn(rows, columns, generator=rng).to(device, dtype)


def _draw_scale(rng: Generator, rows: int, device: Any) -> Tensor:
    """Return random float32 scales ``[rows]`` between 1/128 and 3/128 on ``device``."""
    return (torch.rand(rows, generator=rng) + 0.5).to(device) / 64


def _two_of_four(rng: Generator, n: int, k: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Return a random 2:4 weight ``[n, k]``. It is pruned on ``device``, since pruning large weights takes seconds on a
    CPU.
    """
    return formats.prune(_draw_matrix(rng, n, k, dtype, device).float(), "2:4").to(dtype)


def _sample_sparse_op(op: sl.Op, dtype: torch.dtype) -> None:
    """Declare how samples of the arguments of the sparse product ``op`` are drawn."""

    @op.samples
    def _(rng: Generator, sizes: dict[str, Any], device: Any) -> tuple[Any, ...]:
        """Return a random operand, a packed 2:4 weight (two non-zeros in each four elements), the number of its rows
        and the number of its packed format.
        """
        m, n, k = sizes["m"], sizes["n"], sizes["k"]
        packed, layout = pack_for(_two_of_four(rng, n, k, dtype, device), sizes["layout"])
        return _draw_matrix(rng, m, k, dtype, device), packed, n, layout


def _sample_dense_op(op: sl.Op, dtype: torch.dtype) -> None:
    """Declare how samples of the arguments of the dense product ``op`` are drawn."""

    @op.samples
    def _(rng: Generator, sizes: dict[str, Any], device: Any) -> tuple[Any, ...]:
        """Return two random operands. For ``ops.mm_fp8``, which applies scales, return the scales of both operands,
        too.
        """
        m, n, k = sizes["m"], sizes["n"], sizes["k"]
        operands = _draw_matrix(rng, m, k, dtype, device), _draw_matrix(rng, n, k, dtype, device)
        scales = (_draw_scale(rng, m, device), _draw_scale(rng, n, device)) if op is ops.mm_fp8 else ()
        return *operands, *scales


def _sample_layer_op(op: sl.Op, stored: torch.dtype) -> None:
    """Declare how samples of the arguments of the layer ``op`` are drawn. Its weights are stored in the dtype
    ``stored``.
    """

    @op.samples
    def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
        """Return random activations, the scales of a pruned weight (or its number of rows in 16 bits), the row-major
        weight and the packed weight. They are followed by a bias, the number of the pattern's pairs and the number of
        the packed format. Raise ``ValueError`` if ``sizes["absent"]`` names both weights.
        """
        m, n, k, pairs = sizes["m"], sizes["n"], sizes["k"], sizes["pairs"]
        if {"dense", "packed"} <= set(sizes["absent"]):
            raise ValueError("a layer without a weight")
        pruned = formats.prune(torch.randn(n, k, generator=rng).to(device), formats.Pattern(pairs))
        eight = stored.itemsize == 1
        weight, scale = quantise_weight(pruned, stored) if eight else (pruned.to(stored), pruned[:0])
        slid = formats.slide_weight(formats.pad_matrix(weight, formats.dense_depth(n), k), formats.Pattern(pairs))
        packed, layout = pack_for(slid, sizes["layout"])
        x = torch.randn(m, k, generator=rng).to(device, dtype if eight else stored)
        bias = torch.randn(n, generator=rng).to(x)
        return x, scale if eight else n, weight, packed, bias, pairs, layout


def _sample_experts_op(op: sl.Op, stored: torch.dtype) -> None:
    """Declare how samples of the arguments of the experts' product ``op`` are drawn. Its weights are stored in the
    dtype ``stored``.
    """

    @op.samples
    def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
        """Return random activations, the number of the expert of each row (some have none), scales and weight, and the
        number of experts.
        """
        m, k, rows, experts = sizes["m"], sizes["k"], sizes["rows"], sizes["experts"]
        weight, scale = quantise_weight(torch.randn(rows, k, generator=rng).to(device), stored)
        chosen = torch.randint(0, experts + 1, (m,), generator=rng).to(device)  # some have no expert
        return torch.randn(m, k, generator=rng).to(device, dtype), chosen, scale, weight, experts


_DRAWN: dict[Callable[[sl.Op, torch.dtype], None], dict[torch.dtype, sl.Op]] = {
    _sample_sparse_op: {
        torch.int8: ops.sparse_mm_int8,
        torch.float8_e4m3fn: ops.sparse_mm_fp8,
        torch.bfloat16: ops.sparse_mm_bf16,
        torch.float16: ops.sparse_mm_fp16,
    },
    _sample_experts_op: {torch.int8: layers.experts_int8, torch.float8_e4m3fn: layers.experts_fp8},
    _sample_dense_op: {torch.int8: ops.mm_int8, torch.float8_e4m3fn: ops.mm_fp8},
    _sample_layer_op: {
        torch.int8: layers.linear_int8,
        torch.float8_e4m3fn: layers.linear_fp8,
        torch.bfloat16: layers.linear_bf16,
        torch.float16: layers.linear_fp16,
    },
}

for _draw, _ops in _DRAWN.items():
    for _dtype, _op in _ops.items():
        _draw(_op, _dtype)
