"""Linear layers on CUDA: quantise or lift the activations, multiply with one form of the weight, apply the scales."""

from __future__ import annotations

import torch
from torch import Tensor

from shiplap_slidesparse import lt, ops
from shiplap_slidesparse.cuda import activations
from shiplap_slidesparse.cuda.configs import default_lift, default_quantise
from shiplap_slidesparse.cuda.finish import finish_product
from shiplap_slidesparse.formats import DEPTH, ROWS, dense_depth, lifted_depth

__all__ = ["dense_8bit", "dense_16bit", "slide_8bit", "slide_16bit"]

_SPARSE = {torch.bfloat16: ops.sparse_mm_bf16, torch.float16: ops.sparse_mm_fp16}


def _quantise_activations(x: Tensor, dtype: torch.dtype, pairs: int) -> tuple[Tensor, Tensor]:
    """Return the rows of ``x`` quantised to ``dtype`` and lifted, and the float32 scale of each row. Lifting writes
    overlapping windows of four elements side by side. Rows of zeros pad the number of rows to a multiple of 16.
    ``pairs`` is the number of pairs in a group of the weight's pattern (4 for 6:8). The kernel is launched without
    torch's dispatcher, whose call would cost as much as the other steps.
    """
    m, k = x.shape
    rows = -(-m // ROWS) * ROWS
    q = x.new_empty(rows, lifted_depth(k, pairs), dtype=dtype)
    scale = x.new_empty(rows, dtype=torch.float32)
    activations.launch_quantise(x, pairs, q=q, scale=scale, **default_quantise({"k": k}))
    return q, scale


def _lift_activations(x: Tensor, pairs: int) -> Tensor:
    """Return the rows of ``x`` lifted, that is, with their overlapping windows of four elements written side by side.
    Rows of zeros pad the number of rows to a multiple of 16. ``pairs`` is the number of pairs in a group of the
    weight's pattern (4 for 6:8). The kernel is launched without torch's dispatcher, whose call would cost as much as
    the other steps.
    """
    m, k = x.shape
    out = x.new_empty(-(-m // ROWS) * ROWS, lifted_depth(k, pairs))
    activations.launch_lift(x, pairs, out=out, **default_lift({"k": k, "pairs": pairs}))
    return out


def slide_8bit(
    dtype: torch.dtype,
    x: Tensor,
    scale: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    pairs: int,
    layout: int,
    out: Tensor,
) -> None:
    """Write the result of a linear layer on ``x`` to ``out``. Its 8-bit weight ``packed`` is in the format of sparse
    tensor cores, whose number is ``layout``, and ``scale`` holds the scale of each weight row. ``x`` is quantised to
    ``dtype`` and lifted (overlapping windows of four elements written side by side). ``pairs`` is the number of pairs
    in a group of the weight's pattern.
    """
    q, rows = _quantise_activations(x, dtype, pairs)
    n = dense_depth(scale.shape[0])  # len() of a tensor costs a microsecond
    if dtype == torch.int8:
        total = ops.sparse_mm_int8(q, packed, n, layout)
    elif x.dtype == torch.bfloat16:
        total = ops.sparse_mm_fp8(q, packed, n, layout)
    else:  # what is written as bfloat16 has lost what these types keep
        total = lt.multiply_weight(q, packed, n, torch.float32, sparse=True)
    finish_product(total, rows, scale, bias, out)


def dense_8bit(dtype: torch.dtype, x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the result of a linear layer on ``x`` to ``out``. Its ``weight`` is a row-major 8-bit matrix ``[n, k]``,
    and ``scale`` holds the scale of each weight row. ``x`` is quantised to ``dtype`` first.
    """
    q, rows = _quantise_activations(x, dtype, 2)
    if dtype == torch.int8:
        finish_product(ops.mm_int8(q, weight), rows, scale, bias, out)
    elif x.dtype != torch.bfloat16:
        finish_product(lt.multiply_weight(q, weight, len(weight), torch.float32, sparse=False), rows, scale, bias, out)
    # Without padding and bias the product applies both scales itself and writes the result.
    elif bias is None and out.shape[0] == q.shape[0]:
        ops.mm_fp8.out(q, weight, rows, scale, out=out)
    else:
        finish_product(ops.mm_fp8(q, weight, rows, scale), None, None, bias, out)


def slide_16bit(x: Tensor, packed: Tensor, n: int, bias: Tensor | None, pairs: int, layout: int, out: Tensor) -> None:
    """Write the result of a linear layer on ``x`` to ``out``. Its 16-bit weight ``packed`` has ``n`` rows and is in the
    format of sparse tensor cores, whose number is ``layout``. ``pairs`` is the number of pairs in a group of the
    weight's pattern (4 for 6:8).
    """
    whole = x.shape[0] % ROWS == 0 and x.shape[1] % DEPTH == 0 and not x.data_ptr() & 15  # a view begins anywhere
    lifted = x if pairs == 2 and whole else _lift_activations(x, pairs)
    total = _SPARSE[x.dtype](lifted, packed, dense_depth(n), layout)
    finish_product(total, None, None, bias, out)


def dense_16bit(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``x @ weight.T + bias`` to ``out``. ``weight`` is a row-major 16-bit matrix ``[n, k]``, and ``bias`` may be
    None.
    """
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
