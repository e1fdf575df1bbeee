"""The places where ``scaled_dot_product_attention`` is faster than Inductor's code for an attention as it is
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import value
from shiplap.rewrite.shipped import softcap
from shiplap.rewrite.shipped.scores import Obstructed, Scores, Step

# Steps that become a boolean mask of the fused kernel.
MASKS = frozenset({"fill", "keep"})
LONG = 256  # tokens from which a bias of each head was measured to pay


def required(out: Node, above: Scores, held: Sequence[Tensor], shape: Sequence[Any]) -> None:
    """Raise where the attention that ends in ``out`` is no faster with a fused kernel, or was never measured."""
    if softcap.is_capped(above):
        if reason := softcap.declined(held, shape):
            raise Obstructed(out, "cost", reason, softcap.FLEX, 2)
    elif reason := _declined(held, above):
        raise Obstructed(out, "cost", reason)


def _declined(held: Sequence[Any], above: Scores) -> str:
    """Return the reason where torch has no fused kernel for CUDA that pays, empty where it has one.

    Flash: 16 bits, one head dim of up to 256, no mask. Memory-efficient: masks too, but beyond 128 its accumulators
    leave the registers (head dim 1024: 0.34x of the written-out form), and float32 is slower than products in TF32
    (0.81x, 12 heads of 64, 197 tokens, H200). A mask that all heads share pays (local attention of 1024 tokens 3.1x,
    H100, cuDNN's kernel).
    """
    q, _, v = held
    if q.device.type != "cuda":
        return ""
    if above.sinks:
        return "a sink makes keys and masks one column longer, which was not measured on CUDA"
    e, d = q.shape[-1], v.shape[-1]
    if q.itemsize != 2 or e % 8 or d % 8:
        return f"torch's fused kernels pay for 16 bits and heads that are multiples of 8; these are {q.dtype}, {e}, {d}"
    biases = [step.given for step in above.steps if step.kind in ("add", *MASKS)]
    of_heads = [s for s in above.steps if s.kind in ("add", *MASKS) and _of_heads(s.given)]
    if reason := next(filter(None, (_of_each_head(s, held) for s in of_heads)), ""):
        return reason
    if max(e, d) <= 128 or (e == d and d <= 256 and not biases):
        return ""
    return f"torch's fused kernels pay for heads of up to 128, or of 256 without a mask; these are of {e} and {d}"


def _of_each_head(step: Step, of: Sequence[Any]) -> str:
    """Return the reason why a bias that differs from head to head does not pay, empty for a bias that was measured to
    pay.

    12 heads of 64, bfloat16, H100, torch 2.11, 2026-11-26. 512 tokens, a bias that all batches share: 125 us with
    cuDNN's kernel, 305 us with the memory-efficient one, 387 us as Inductor writes it, and 538 us for a bias whose last
    dim is not dense, as T5 has it. 3 heads of 32, 49 tokens (Swin): 1241 us, and 836 us as Inductor writes it.
    """
    held, width = value(step.given), max(of[0].shape[-1], of[2].shape[-1])
    sizes = "x".join(map(str, held.shape))
    what = f"the bias {step.given.name} of {sizes} differs from head to head: torch's fused kernels pay for one"
    if step.kind != "add" or any(not (isinstance(n, int) and n == 1) for n in held.shape[:-3]):
        return f"{what} that is added and that all batches share"
    if not all(isinstance(n, int) and n >= LONG and n % 8 == 0 for n in held.shape[-2:]) or width > 128:
        return f"{what} of at least {LONG} tokens, a multiple of 8, and heads of up to 128"
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (*of, held))
    return f"{what} without a gradient" if learns else ""


def _of_heads(bias: Any) -> bool:
    """Whether the third dim from the end, that of the heads, is not broadcast."""
    held = value(bias) if isinstance(bias, Node) else None
    return isinstance(held, Tensor) and held.dim() > 2 and held.shape[-3] != 1
