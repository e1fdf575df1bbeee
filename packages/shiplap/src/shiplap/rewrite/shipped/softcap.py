"""Attention whose scores are capped by ``tanh`` (Gemma 2), which ``scaled_dot_product_attention`` cannot compute.

The steps stay as they are, on one block of query rows after the other, so that the scores of a block stay in the cache.
8 heads of 64, float32, compiled, one thread of a loaded CPU (torch 2.13, 2026-11-23), the least of 12 turns: with 1024
tokens 237 ms for 367 ms as written, whose control was 376 ms. With 256 tokens the control varied too much for a
conclusion: 3.6 and 6.8 ms for one code, 7.9 ms in blocks. The code was timed as functions, not in a model. On a GPU
Inductor's code is faster (H100, torch 2.11, bfloat16, 8 heads of 256): 115 us against 308 us in blocks with 1024
tokens, 722 against 1125 with 4096.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shiplap.rewrite.shipped.scores import ScoresOfAttention, ScoreStep

LEAST_BYTES_OF_SCORES = 16 << 20  # bytes of scores from which blocks are placed
BYTES_OF_BLOCK = 4 << 20  # bytes of the scores of a block
MOST_BLOCKS = 16  # blocks: each is code of its own
FLEX_ATTENTION_FIX = (
    "torch.nn.attention.flex_attention has a score_mod for it: attn_implementation='flex_attention' in transformers"
)


def has_tanh_cap(scores: ScoresOfAttention) -> bool:
    """Return whether the attention applies ``tanh`` to its scores, which limits them to a range."""
    return any(step.kind == "cap" for step in scores.steps)


def why_blocks_do_not_pay(held: Sequence[Any], shape: Sequence[Any]) -> str:
    """Return the reason why attention in blocks of query rows is not faster than the model's own calls. Return an empty
    string if it is faster. ``held`` are the fake queries, keys and values, and ``shape`` is the shape of the scores.
    """
    what = "tanh caps the scores, and scaled_dot_product_attention has no cap; "
    q = held[0]
    if q.device.type != "cpu":
        return f"{what}blocks of rows are slower on a GPU, and were measured on no other device than a CPU"
    if torch.is_grad_enabled() and any(t.requires_grad for t in held):
        return f"{what}blocks of rows were not measured with gradients"
    if not all(isinstance(n, int) for n in shape):
        return f"{what}the number of blocks of rows is fixed, and these sizes are symbols"
    size = math.prod(shape) * q.itemsize
    return (
        ""
        if size >= LEAST_BYTES_OF_SCORES
        else f"{what}blocks of rows pay from {LEAST_BYTES_OF_SCORES >> 20} MiB of scores on, these are {size} bytes"
    )


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, scores: ScoresOfAttention, given: Sequence[Any]) -> Tensor:
    """Return the attention ``softmax(steps(q @ k)) @ v``, computed in blocks of query rows. ``scores.steps`` are the
    calls on the scores, such as a cap or a mask, and ``given`` holds the tensor of each call or None. ``k`` has the
    dims ``[..., width, keys]``.
    """
    rows = q.shape[-2]
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    size = math.prod(n for n in lead if isinstance(n, int)) * k.shape[-1] * q.itemsize
    # At least two blocks, at most MOST_BLOCKS, and as near to BYTES_OF_BLOCK as these bounds allow.
    high = (
        max(-(-rows // MOST_BLOCKS), min(BYTES_OF_BLOCK // max(size, 1), -(-rows // 2)), 1)
        if isinstance(rows, int)
        else rows
    )
    starts = range(0, rows, high) if isinstance(rows, int) else (0,)
    blocks = [_attend_block(q, k, v, scores, given, slice(a, a + high)) for a in starts]
    return torch.cat(blocks, -2) if len(blocks) > 1 else blocks[0]


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, scores: ScoresOfAttention, given: Sequence[Any], rows: slice
) -> Tensor:
    """Return the attention of the query rows ``rows``. The calls ``scores.steps``, such as a cap or a mask, are applied
    to the scores. ``given`` holds the tensor of each call or None. 16-bit scores are normalized in float32.
    """
    made = q[..., rows, :] @ k
    if scores.scale != 1:
        made = made * scores.scale
    for step, tensor in zip(scores.steps, given, strict=True):
        made = _apply_step(step, made, _rows_of_operand(tensor, rows))
    # 16-bit scores are normalised in float32, as the models do it.
    return made.float().softmax(-1).to(v.dtype) @ v if made.itemsize < 4 else made.softmax(-1) @ v


def _rows_of_operand(given: Any, rows: slice) -> Any:
    """Return the rows ``rows`` of ``given``, a mask, a bias or a factor. A tensor that has one row for all, and a value
    that is no tensor, is returned unchanged.
    """
    return given[..., rows, :] if isinstance(given, Tensor) and given.dim() > 1 and given.shape[-2] != 1 else given


def _apply_step(step: ScoreStep, scores: Tensor, given: Any) -> Tensor:
    """Return ``scores`` after the call ``step`` of an attention, such as a factor, a bias or a mask. ``given`` is the
    tensor of the call, or None.
    """
    if step.kind == "scale":
        return scores * step.number
    if step.kind == "cap":
        return scores.tanh()
    assert isinstance(given, Tensor)
    if step.kind == "stretch":
        return scores * given
    if step.kind == "add":
        return scores + (given if step.number == 1 else given * step.number)
    mask = given if given.dtype == torch.bool else given != 0
    return scores.masked_fill(mask if step.kind == "fill" else ~mask, step.number)
