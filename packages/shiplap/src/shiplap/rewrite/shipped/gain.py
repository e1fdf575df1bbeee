"""Where ``scaled_dot_product_attention`` is faster than what Inductor makes of an attention as it is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import value
from shiplap.rewrite.shipped import capped
from shiplap.rewrite.shipped.scores import Obstructed, Scores

__all__ = ["MASKS", "required"]

MASKS = frozenset({"fill", "keep"})


def required(out: Node, above: Scores, held: Sequence[Tensor], shape: Sequence[Any]) -> None:
    """Raise where the attention that ``out`` ends is no faster with a fused kernel, or where nobody measured it."""
    if capped.is_capped(above):
        if reason := capped.declined(held, shape):
            raise Obstructed(out, "cost", reason, capped.FLEX, 2)
    elif reason := _declined(held, above):
        raise Obstructed(out, "cost", reason)


def _declined(held: Sequence[Any], above: Scores) -> str:
    """Where torch has no fused kernel for CUDA that pays. Flash: 16 bits, one head dim of up to 256, no mask.
    Memory-efficient: masks too, but beyond 128 its accumulators leave the registers (head dim 1024: 0.34x of the
    written-out form), and float32 is slower than products in TF32 (0.81x, 12 heads of 64, 197 tokens, H200). Where a
    bias differs from head to head it is slower as well (H100, torch 2.11, whole models: T5 of 512 tokens 0.70x, Swin
    0.82x), unlike a mask that all heads share (BERT of 512 tokens 1.29x, Llama of 2048 1.51x)."""
    q, _, v = held
    if q.device.type != "cuda":
        return ""
    if above.sinks:
        return "a sink makes keys and masks one column longer, which was not measured on CUDA"
    e, d = q.shape[-1], v.shape[-1]
    if q.itemsize != 2 or e % 8 or d % 8:
        return f"torch's fused kernels pay for 16 bits and heads that are multiples of 8; these are {q.dtype}, {e}, {d}"
    biases = [step.given for step in above.steps if step.kind in ("add", *MASKS)]
    if (bias := next((b for b in biases if _of_heads(b)), None)) is not None:
        sizes = "x".join(map(str, value(bias).shape))
        return f"the bias {bias.name} of {sizes} differs from head to head: torch's fused kernels are slower with one"
    if max(e, d) <= 128 or (e == d and d <= 256 and not biases):
        return ""
    return f"torch's fused kernels pay for heads of up to 128, or of 256 without a mask; these are of {e} and {d}"


def _of_heads(bias: Any) -> bool:
    """Whether the third dim from the end, that of the heads, is not broadcast."""
    held = value(bias) if isinstance(bias, Node) else None
    return isinstance(held, Tensor) and held.dim() > 2 and held.shape[-3] != 1
