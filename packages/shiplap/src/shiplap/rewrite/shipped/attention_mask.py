"""Rewrite the mask of a ``scaled_dot_product_attention`` call so that torch can use its fastest kernel.

Models whose attention is torch's fused call by default build their mask under ``torch.compile`` even if it hides
nothing, or only later columns: a compiled graph takes no decision on values. torch's flash kernel takes no mask, so
that a call with such a mask runs on a slower kernel. If a mask is computed from sizes alone, its values are known while
the graph is compiled. The rewrite then leaves out a mask that hides nothing, and replaces one that hides later columns
by ``is_causal``. A bias of each head, as in T5 and Swin, is given to the kernel that was measured to be fastest for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from shiplap.declare.code_digest import code_digest
from shiplap.rewrite.base import Rewrite, short_digest
from shiplap.rewrite.graph import describe_node, fake_tensor, place_replacement
from shiplap.rewrite.match import Level, Match, Outcome
from shiplap.rewrite.normalize_call import canonical_arguments
from shiplap.rewrite.obstacle import RewriteObstacle
from shiplap.rewrite.passthrough_ops import torch_call_name
from shiplap.rewrite.program import Program, proving, seeded_draw
from shiplap.rewrite.shipped.constant_masks import (
    buffers_behind,
    constant_buffers,
    hidden_part_of_step,
    simplify_masks,
)
from shiplap.rewrite.shipped.scores import ScoreStep
from shiplap.torch_private.attention_kernels import attend_by_efficient_kernel
from shiplap.torch_private.dynamo import guard_values

FUSED_CALL = "scaled_dot_product_attention"
BIAS_COLUMNS = 16  # torch's memory-efficient kernel reads rows of a bias that begin at multiples of so many columns
# A bias of each head, bfloat16 (H200, torch 2.11, 2026-11-29), cuDNN's kernel, which torch takes, beside the
# memory-efficient one: 3 heads of 32 with 49 tokens 1287 us and 351 us, 1344 us and 548 us with a bias of each window;
# 12 heads of 64 with 128 tokens 197 us and 347 us, with 256 tokens 81 us and 167 us.
MOST_TOKENS_OF_EFFICIENT_KERNEL = 64


class AttentionMaskRewrite(Rewrite):
    """A rewrite that simplifies masks and biases of ``scaled_dot_product_attention`` calls."""

    name = "attention_mask"
    level: Level = "pre-grad"
    anchors = frozenset({FUSED_CALL})

    def __init__(self, *, constant_buffers: bool = False) -> None:
        """Set the option. If ``constant_buffers`` is true, compiled code relies on the values of masks in buffers of
        modules. A write to such a buffer that torch does not count is then not seen.
        """
        self.constant_buffers = constant_buffers

    @property
    def digest(self) -> str:
        """A digest of the code that finds and changes fused calls of attention."""
        of = code_digest(AttentionMaskRewrite.apply, _replace_mask, _plan_call, _FusedCall, simplify_masks)
        return short_digest(of, self.constant_buffers)

    def programs(self) -> Iterator[Program]:
        """Return an iterator over the programs on which the rewrite is proven. A program is a function with arguments.
        Each calls the fused attention with a mask as models build it.
        """
        return _programs()

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Replace the masks of fused attention calls in ``graph``, in place. Yield a ``Match`` for each call that is
        changed, and a ``NearMiss`` with the reason for each that would be changed but for one obstacle. Calls without a
        mask, and those whose mask depends on inputs, are passed over.
        """
        # A list, since replacements add nodes to the graph and remove others.
        for node in list(graph.nodes):
            if torch_call_name(node) == FUSED_CALL:
                try:
                    with constant_buffers(self.constant_buffers):
                        outcome = _replace_mask(graph, node)
                except RewriteObstacle as e:
                    outcome = self.near_miss(e, of=2)
                if outcome is not None:
                    yield outcome


def _replace_mask(graph: Graph, node: Node) -> Outcome | None:
    """Replace the fused attention call ``node`` by one with a simpler mask. Return the ``Match``, or a ``NearMiss`` if
    the replacement is not possible. Return None if there is nothing to simplify. Raise ``RewriteObstacle`` if the call
    drops weights at random.
    """
    given = canonical_arguments(node)
    mask, qkv = given.get("attn_mask"), [given.get(name) for name in ("query", "key", "value")]
    held = [fake_tensor(n) for n in (*qkv, mask)]
    if not isinstance(mask, Node) or any(t is None or t.dim() < 2 for t in held):
        return None
    # torch's fused kernels hide later columns as well as what a mask hides, although its documentation forbids both.
    if given.get("is_causal", False) is not False:
        return None
    plan, bias = _plan_call(given, mask, held)
    if plan is None:
        return None
    if given.get("dropout_p", 0.0) != 0:
        what = "the call drops weights at random, and another kernel would draw other numbers"
        raise RewriteObstacle(node, "mode", what, "evaluate the model (model.eval()), or train it without dropout")
    bound = [(k, describe_node(n)) for k, n in zip(("q", "k", "v", "mask"), (*qkv, mask), strict=True)]
    args = [*qkv, *([bias] if bias is not None else [])]
    conditions = (n for n in mask.all_input_nodes if (t := fake_tensor(n)) is not None and t.dtype == torch.bool)
    buffers = buffers_behind([_as_step(mask), *(ScoreStep("keep", n) for n in conditions)])
    placed = place_replacement(
        graph, AttentionMaskRewrite.level, AttentionMaskRewrite.name, plan, args, [node], (), bound
    )
    for buffer in buffers if isinstance(placed, Match) else ():
        guard_values(buffer)
    return placed


def _plan_call(given: dict[str, Any], mask: Node, held: list[Any]) -> tuple[_FusedCall | None, Node | None]:
    """Return the fused call in place of the one with the arguments ``given``, as a function, and the node of the bias
    that it takes after queries, keys and values, or None if it takes none. The function is None if the call stays.

    ``mask`` is the mask of the call, and ``held`` are the fake queries, keys, values and mask.
    """
    q, k, v, fake_mask = held
    scale, gqa = given.get("scale"), bool(given.get("enable_gqa", False))
    hidden = hidden_part_of_step(_as_step(mask))
    if hidden == "nothing":
        return _FusedCall(scale, gqa), None
    if hidden == "later" and fake_mask.shape[-1] == q.shape[-2] == k.shape[-2]:
        return _FusedCall(scale, gqa, causal=True), None
    bias = _without_idle_fill(mask)
    fake_bias = fake_tensor(bias)
    assert fake_bias is not None
    if not fake_bias.is_floating_point() or fake_bias.dtype != q.dtype:
        return None, None
    efficient = not gqa and _is_fast_on_efficient_kernel(q, k, v, fake_bias)
    dense = _reads_sparse_rows(fake_bias)
    if bias is mask and not efficient and not dense:
        return None, None
    return _FusedCall(scale, gqa, dense=dense, efficient=efficient), bias


def _as_step(mask: Node) -> ScoreStep:
    """Return how the fused call applies ``mask`` to its scores. It keeps the scores where a boolean mask is true, and
    adds another mask to them.
    """
    held = fake_tensor(mask)
    return ScoreStep("keep" if held is not None and held.dtype == torch.bool else "add", mask)


def _without_idle_fill(mask: Node) -> Node:
    """Return the node of the bias that ``mask`` is, without a ``torch.where`` that fills in nothing. That is a call
    whose condition is computed from sizes alone and is true everywhere. Return ``mask`` itself if it is another call.

    transformers 5.17 merges T5's bias and the mask of padding in this way, even if there is no padding.
    """
    if torch_call_name(mask) != "where":
        return mask
    given = canonical_arguments(mask)
    condition, bias = given.get("condition"), given.get("input")
    held, made, other = fake_tensor(bias), fake_tensor(mask), fake_tensor(given.get("other"))
    if not isinstance(condition, Node) or not isinstance(bias, Node) or held is None or made is None:
        return mask
    # The rows and columns must be the bias's own, so that no size is lost with the condition.
    if held.dtype != made.dtype or tuple(held.shape[-2:]) != tuple(made.shape[-2:]) or held.dim() < 2:
        return mask
    # A tensor that is never picked has a gradient of 0, and without the call it would have none.
    if other is not None and other.requires_grad and torch.is_grad_enabled():
        return mask
    return bias if hidden_part_of_step(ScoreStep("keep", condition)) == "nothing" else mask


def _reads_sparse_rows(bias: Tensor) -> bool:
    """Return whether neighbours in a row of ``bias`` are apart in memory on a device where no fused kernel reads such
    a bias. torch then writes the scores out. In a proof the device does not matter.
    """
    apart = type(stride := bias.stride(-1)) is int and stride > 1 and bias.shape[-1] != 1
    return apart and (bias.device.type == "cuda" or proving.get())


def _is_fast_on_efficient_kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> bool:
    """Return whether torch's memory-efficient kernel was measured to be faster than the kernel that torch takes for
    this attention. That is so for few tokens with a bias that differs from head to head, without gradients.
    """
    if q.device.type != "cuda" or q.itemsize != 2 or any(t.dim() != 4 for t in (q, k, v)) or bias.dim() < 3:
        return False
    # Called by name, the kernel gets no casts of autocast, reads dense rows only, and is not what a user ruled out.
    if any(t.dtype != q.dtype or t.stride(-1) != 1 for t in (q, k, v)):
        return False
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return False
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, bias))
    sizes = (*q.shape, *k.shape[-2:], v.shape[-1], *bias.shape)
    return (
        not learns
        and all(type(n) is int and n > 0 for n in sizes)
        and bias.shape[-3] != 1
        and q.shape[-1] % 8 == v.shape[-1] % 8 == 0
        and max(q.shape[-1], v.shape[-1]) <= 128
        and max(q.shape[-2], k.shape[-2]) <= MOST_TOKENS_OF_EFFICIENT_KERNEL
    )


@dataclass(frozen=True)
class _FusedCall:
    """The function that is traced in place of a fused attention call.

    Attributes:
        scale: the factor of the scores, or None for torch's default.
        gqa: whether groups of query heads share a head of keys and values.
        causal: whether the columns after the diagonal are hidden.
        dense: whether the bias is copied so that its rows are dense in memory.
        efficient: whether torch's memory-efficient kernel is called by name.
    """

    scale: float | None
    gqa: bool
    causal: bool = False
    dense: bool = False
    efficient: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the attention of the queries ``q``, the keys ``k`` and the values ``v``. ``bias`` is added to the
        scores unless it is None.
        """
        if bias is not None and self.dense:
            bias = bias.contiguous()
        if bias is not None and self.efficient:
            return self._call_efficient_kernel(q, k, v, bias)
        more: dict[str, Any] = {"enable_gqa": True} if self.gqa else {}
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=self.causal, scale=self.scale, **more)

    def _call_efficient_kernel(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Return the attention of ``q``, ``k`` and ``v`` with ``bias``, computed by torch's memory-efficient kernel.
        Rows of the bias are padded in memory, as torch does it ahead of this kernel.
        """
        rows, columns = q.shape[-2], k.shape[-2]
        lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        q, k, v = (t.expand(*lead, *t.shape[-2:]) for t in (q, k, v))
        bias = bias.expand(*bias.shape[:-2], rows, columns)
        bias = F.pad(bias, (0, -columns % BIAS_COLUMNS))[..., :columns].expand(*lead, rows, columns)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return attend_by_efficient_kernel(q, k, v, bias, scale)


def _attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v`` with a causal boolean mask that is computed from sizes alone."""
    at = torch.arange(5)
    seen = (at[None, :] <= at[:, None])[None, None].expand(2, 1, 5, 5)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.35)


def _attend_causally_in_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v`` with a causal mask that is added. It has the lowest number of its
    dtype in hidden columns.
    """
    lowest = torch.full((5, 5), torch.finfo(torch.float32).min)
    return F.scaled_dot_product_attention(q, k, v, lowest.triu(1)[None, None])


def _attend_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v`` with a boolean mask that hides nothing."""
    seen = torch.arange(7)[None, None, None, :] >= torch.zeros(2, dtype=torch.int64)[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.expand(2, 1, 5, 7))


def _attend_in_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v``, in which four heads of queries share two heads of keys, with a
    causal mask.
    """
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def _attend_with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return the attention of ``q``, ``k`` and ``v`` with ``bias``, of shape ``[rows, columns, heads]``. A mask that
    hides nothing is filled into the bias, as for T5.
    """
    by_head = bias.permute(2, 0, 1).unsqueeze(0)
    seen = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(seen, by_head, -math.inf), scale=1.0)


def _programs() -> Iterator[Program]:
    """Yield the programs on which the rewrite is proven."""
    drawn = seeded_draw()
    q, k = (2, 3, 5, 8), (2, 3, 7, 8)
    yield Program(_attend_causally, drawn(q, q, q), "a causal mask")
    yield Program(_attend_causally, drawn(q, q, q, dtype=torch.bfloat16), "a causal mask, bfloat16")
    yield Program(_attend_causally_in_numbers, drawn(q, q, q), "a causal mask that is added")
    yield Program(_attend_to_all, drawn(q, k, k), "a mask that hides nothing")
    yield Program(_attend_in_groups, drawn((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)), "groups of heads")
    yield Program(_attend_with_bias, drawn(q, k, k, (5, 7, 3)), "a bias whose rows are not dense")


attention_mask = AttentionMaskRewrite()
