"""The conditions under which torch's fused attention is faster than Inductor's code for attention as written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_value
from shiplap.rewrite.obstacle import RewriteObstacle
from shiplap.rewrite.shipped import softcap
from shiplap.rewrite.shipped.scores import ScoresOfAttention, ScoreStep

# Steps that become a boolean mask of the fused kernel.
MASKING_STEPS = frozenset({"fill", "keep"})
LEAST_TOKENS_FOR_BIAS = 256  # tokens from which a bias of each head was measured to pay


def require_speedup(out: Node, above: ScoresOfAttention, held: Sequence[Tensor], shape: Sequence[Any]) -> None:
    """Raise ``RewriteObstacle`` at ``out``, the result of an attention, if a fused kernel is not faster for the
    attention, or was never measured for it. ``above`` are the scores, ``shape`` is their shape, and ``held`` are the
    fake queries, keys and values.
    """
    if softcap.has_tanh_cap(above):
        if reason := softcap.why_blocks_do_not_pay(held, shape):
            raise RewriteObstacle(out, "cost", reason, softcap.FLEX_ATTENTION_FIX, 2)
    elif reason := _why_no_fused_kernel(held, above):
        raise RewriteObstacle(out, "cost", reason)


# torch's flash kernel takes 16-bit dtypes, one head dim of up to 256 and no mask. The memory-efficient kernel takes
# masks, but its accumulators leave the registers for head dims beyond 128: with 1024 it has 0.34 times the speed of the
# model's own calls. In float32 it is slower than products in TF32 (0.81 times, 12 heads of 64, 197 tokens, H200). A
# mask that all heads share pays (local attention of 1024 tokens, H100, cuDNN's kernel: 3.1 times as fast).
def _why_no_fused_kernel(held: Sequence[Any], above: ScoresOfAttention) -> str:
    """Return the reason why no fused kernel of torch for CUDA is faster for the scores ``above``. ``held`` are the fake
    queries, keys and values. Return an empty string if a fused kernel is faster, and for all other devices.
    """
    q, _, v = held
    if q.device.type != "cuda":
        return ""
    if above.sinks:
        return "a sink makes keys and masks one column longer, which was not measured on CUDA"
    e, d = q.shape[-1], v.shape[-1]
    if q.itemsize != 2 or e % 8 or d % 8:
        return f"torch's fused kernels pay for 16 bits and heads that are multiples of 8; these are {q.dtype}, {e}, {d}"
    biases = [step.given for step in above.steps if step.kind in ("add", *MASKING_STEPS)]
    of_heads = [s for s in above.steps if s.kind in ("add", *MASKING_STEPS) and _differs_between_heads(s.given)]
    if reason := next(filter(None, (_why_bias_does_not_pay(s, held) for s in of_heads)), ""):
        return reason
    if max(e, d) <= 128 or (e == d and d <= 256 and not biases):
        return ""
    return f"torch's fused kernels pay for heads of up to 128, or of 256 without a mask; these are of {e} and {d}"


# 12 heads of 64, bfloat16, 512 tokens, a bias that all batches share (H100, torch 2.11, 2026-11-26): 125 us with
# cuDNN's kernel, 305 us with the memory-efficient one, 387 us as Inductor writes it. If the last dim of the bias is not
# dense, as in T5, it takes 538 us. 3 heads of 32, 49 tokens (Swin): 1241 us with a fused kernel, 836 us as Inductor
# writes it.
def _why_bias_does_not_pay(step: ScoreStep, of: Sequence[Any]) -> str:
    """Return the reason why a fused kernel is not faster for an attention with a mask or bias ``step`` that differs
    from head to head. Return an empty string if it was measured to be faster. ``of`` holds the fake queries, keys and
    values.
    """
    held, width = fake_value(step.given), max(of[0].shape[-1], of[2].shape[-1])
    sizes = "x".join(map(str, held.shape))
    what = f"the bias {step.given.name} of {sizes} differs from head to head: torch's fused kernels pay for one"
    if step.kind != "add" or any(not (isinstance(n, int) and n == 1) for n in held.shape[:-3]):
        return f"{what} that is added and that all batches share"
    if (
        not all(isinstance(n, int) and n >= LEAST_TOKENS_FOR_BIAS and n % 8 == 0 for n in held.shape[-2:])
        or width > 128
    ):
        return f"{what} of at least {LEAST_TOKENS_FOR_BIAS} tokens, a multiple of 8, and heads of up to 128"
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (*of, held))
    return f"{what} without a gradient" if learns else ""


def _differs_between_heads(bias: Any) -> bool:
    """Return whether ``bias`` is a tensor of at least three dims whose third dim from the end, the heads, has another
    size than 1.
    """
    held = fake_value(bias) if isinstance(bias, Node) else None
    return isinstance(held, Tensor) and held.dim() > 2 and held.shape[-3] != 1
