"""Attention in the ways in which models write it. The rewrite is proven on these programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from shiplap.rewrite.program import Program, seeded_draw

# The number that models fill into masked scores in place of minus infinity.
LOWEST_FLOAT32 = torch.finfo(torch.float32).min


def _attend_scaled_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v`` whose scores are multiplied by a number before adding ``mask``."""
    return F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.35 + mask, dim=-1) @ v


def _attend_scaled_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v``. The queries are multiplied by a number, ``mask`` is added to the
    scores, and a dropout that drops nothing is applied to the weights.
    """
    scores = (q * 0.35) @ k.transpose(-2, -1)
    return F.dropout((scores + mask).softmax(dim=-1), 0.1, False) @ v


def _divided_in_float32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v``. The scores are divided by a number, and ``mask`` is added to
    them. The softmax is computed in float32, and its result is cast back to the dtype of ``q``.
    """
    scores = torch.matmul(q, k.mT) / math.sqrt(8.0)
    return torch.matmul(F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype), v)


def _biased_twice(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v`` with three changes of its scores. ``bias``, of shape ``[rows,
    columns, heads]``, is added to them, they are multiplied by a number, and ``mask`` is added.
    """
    by_head = bias.permute(2, 0, 1).unsqueeze(0)  # the last dim is not dense, as in T5
    weights = torch.nn.functional.softmax(((q @ k.transpose(3, 2)) + by_head) * 0.5 + mask, -1)
    return weights.type(v.dtype) @ v


def _attend_with_filled_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v`` whose scores are set to the lowest number of float32 where
    ``mask`` exceeds 0.5.
    """
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)).masked_fill(mask > 0.5, LOWEST_FLOAT32)
    return torch.matmul(scores.float().softmax(-1).to(v.dtype), v)


def _attend_with_kept_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v`` whose scores are kept where ``mask`` exceeds 0.5. Elsewhere
    ``torch.where`` sets them to the lowest number of float32.
    """
    scores = torch.where(mask > 0.5, q @ k.transpose(-1, -2), LOWEST_FLOAT32)
    return scores.softmax(-1) @ v


def _attend_with_zeroed_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v`` in which the weights of masked columns are set to 0 after the
    softmax. All columns of row 0 are masked.
    """
    hidden = (mask > 0.5) | (torch.arange(5) == 0)[:, None]
    weights = F.softmax((q @ k.mT).masked_fill(hidden, LOWEST_FLOAT32), -1).masked_fill(hidden, 0.0)
    return weights @ v


def _attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v`` with a causal mask that is computed from sizes alone. As in
    models, positions are compared first, and the mask is then added as numbers.
    """
    at = torch.arange(5).unsqueeze(0).expand(2, -1)
    seen = at[:, None, None, :] <= at[:, None, :, None]
    mask = torch.where(seen, torch.zeros((), dtype=torch.float32), LOWEST_FLOAT32)
    return F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.35 + mask, dim=-1) @ v


def _in_batches(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v``, in which batch and heads are one dim. ``baddbmm`` computes the
    scores and adds ``bias`` to them. ``mask`` is added before the softmax.
    """
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=0.35)
    weights = F.softmax(scores.view(2, 3, 5, 7) + mask, dim=-1).view(6, 5, 7)
    return torch.bmm(weights, v)


def _attend_with_capped_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v`` whose scores ``tanh`` limits to the range from -5 to 5 before
    ``mask`` is added.
    """
    scores = torch.tanh(q @ k.transpose(2, 3) * 0.35 / 5.0) * 5.0 + mask
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def _with_a_sink(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v`` with ``mask`` and an attention sink. A column of the logits
    ``sink``, one per head, is joined to the scores before the softmax. The column of its weights is dropped afterwards.
    """
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.35 + mask
    scores = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(2, -1, 5, -1)], dim=-1)
    weights = F.softmax(scores - scores.max(dim=-1, keepdim=True).values, dim=-1, dtype=scores.dtype)
    return torch.matmul(weights[..., :-1], v)


def _rescaled_by_a_sink(q: Tensor, k: Tensor, v: Tensor, by: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v``, multiplied by ``sigmoid(logsumexp(scores) - sink)``. That factor
    is the share of weight that a column of the logits ``sink`` would leave to the keys. The scores are multiplied by
    ``by``, and ``mask`` is added to them.
    """
    scores = torch.matmul(q, k.transpose(2, 3)) * by + mask
    left = (torch.logsumexp(scores, dim=-1) - sink.view(1, -1, 1)).to(torch.float32).sigmoid()
    out = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
    return out * left.unsqueeze(-1).to(out.dtype)


def _of_channels(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return the sine of the attention of ``q``, ``k`` and ``v``. They have the dims batch, channels and tokens, in
    this order. ``bias`` is added to the scores.
    """
    weights = (q.transpose(-2, -1) @ k * 0.35 + bias).softmax(dim=-1)
    return (v @ weights.transpose(-1, -2)).sin()


def _by_einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the sine of the attention of ``q``, ``k`` and ``v``, whose two products are written with ``einsum``.
    ``mask`` is added to the scores.
    """
    weights = F.softmax(torch.einsum("ibnd,jbnd->bnij", q, k) * 0.35 + mask, dim=3)
    return torch.einsum("bnij,jbnd->ibnd", weights, v).sin()


def attention_programs() -> Iterator[Program]:
    """Yield the programs on which the rewrite of attention is proven. A program is a function with arguments. Together
    they compute attention in the ways in which models write it, some in 16 bits or with symbolic sizes.
    """
    drawn = seeded_draw()
    q, k, v, of_batch = (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (2, 1, 5, 7)
    yield Program(_attend_scaled_scores, drawn(q, k, (2, 3, 7, 6), of_batch), "a mask for each batch")
    yield Program(_attend_scaled_queries, drawn(q, k, v, (5, 7)), "scaled queries", constants=(3,))
    for dtype in (torch.bfloat16, torch.float16):
        args = drawn(q, k, v, (2, 1, 1, 7), dtype=dtype)
        yield Program(_divided_in_float32, args, f"softmax in float32, {dtype}", constants=(3,))
    biased = drawn(q, (2, 1, 7, 8), v, (5, 7, 3), of_batch)
    yield Program(_biased_twice, biased, "a bias that is scaled", constants=(4,))
    batches = drawn((6, 5, 8), (6, 7, 8), (6, 7, 6), (6, 1, 7), of_batch)
    yield Program(_in_batches, batches, "baddbmm and views")
    yield Program(_attend_causally, drawn(q, q, q), "a mask that hides what comes later")
    yield Program(
        _attend_with_capped_scores,
        drawn(q, k, v, of_batch, dtype=torch.bfloat16),
        "capped scores, bfloat16",
        constants=(3,),
    )
    yield Program(_with_a_sink, drawn(q, k, v, of_batch, (3,)), "a sink", constants=(3,))
    rescaled = drawn(q, k, v, (3, 1, 1), of_batch, (3,))
    yield Program(_rescaled_by_a_sink, rescaled, "a learned temperature, rescaled by a sink", constants=(4,))
    yield Program(_of_channels, drawn((2, 8, 5), (2, 8, 7), (2, 6, 7), (5, 7)), "three dims, channels before tokens")
    by_einsum = drawn((5, 2, 3, 8), (7, 2, 3, 8), (7, 2, 3, 8), of_batch)
    yield Program(_by_einsum, by_einsum, "by einsum", constants=(3,))
    masks: tuple[tuple[Callable[..., Tensor], tuple[int, ...]], ...] = (
        (_attend_with_filled_mask, of_batch),
        (_attend_with_kept_scores, (5, 7)),
        (_attend_with_zeroed_rows, of_batch),
    )
    for fn, shape in masks:
        yield Program(fn, drawn(q, k, v, shape), fn.__name__, train=False)
    yield Program(_attend_scaled_scores, drawn(q, k, v, (1, 3, 5, 7)), "a mask for each head, dynamic", dynamic=(5, 7))
