"""Attention written out, ``softmax(q @ k.T * scale + mask) @ v``: torch's ``scaled_dot_product_attention``.

Three spellings of the softmax: in the dtype of its input, in float32, and in float32 and back to 16 bits. Dropout that
drops nothing is taken out first; dropout that drops is left alone, since it would draw other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import BFloat16, Float, Float16, Float32
from torch import Tensor
from torch.nn import functional as F

from shiplap.rewrite.pattern import PatternRewrite
from shiplap.rewrite.program import Program
from shiplap.rewrite.shipped.no_ops import no_ops

__all__ = ["attention"]

Softmax = Callable[[Tensor], Tensor]


def _written_out(kind: Any, softmax: Softmax) -> Callable[..., Tensor]:
    def pattern(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * scale
        return torch.matmul(softmax(scores if mask is None else scores + mask), v)

    shapes = {"q": "b h l e", "k": "b h s e", "v": "b h s d", "mask": "b 1 l s"}
    kinds = {name: kind[Tensor, shape] for name, shape in shapes.items()}
    pattern.__annotations__ |= kinds | {"mask": kinds["mask"] | None, "scale": float}
    return pattern


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).contiguous()


def _plain(scores: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1)


def _wide(scores: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1, dtype=torch.float32)


class Attention(PatternRewrite):
    """Proven on values as attention sees them: where the written-out form overflows, the fused one does not."""

    def programs(self) -> Iterator[Program]:
        dtype = DTYPES.get(self.name, torch.float32)
        rng = torch.Generator().manual_seed(0)
        for masked, dynamic in ((True, False), (False, False), (True, True)):
            q, k, v = (torch.randn(2, 3, n, e, generator=rng).to(dtype) for n, e in ((5, 8), (7, 8), (7, 6)))
            mask = torch.randn(2, 1, 5, 7, generator=rng).to(dtype) if masked else None
            yield Program(self.pattern, (q, k, v, mask, 0.35), f"{dtype}, mask={masked}, dynamic={dynamic}", dynamic)


SPELLINGS: dict[str, tuple[Any, Softmax]] = {
    "attention": (Float, _plain),
    "attention_float32": (Float32, _wide),
    "attention_bfloat16": (BFloat16, lambda scores: _wide(scores).to(torch.bfloat16)),
    "attention_float16": (Float16, lambda scores: _wide(scores).to(torch.float16)),
}
DTYPES = {"attention_bfloat16": torch.bfloat16, "attention_float16": torch.float16}
SIZES = tuple(f"{dim} >= 1" for dim in "bhlse")
# Where torch has a fused kernel for CUDA that pays. Flash: 16 bits, one head dim of up to 256, no mask.
# Memory-efficient: masks too, but beyond 128 its accumulators leave the registers (head dim 1024: 0.34x of the
# written-out form), and float32 is slower than products in TF32 (0.81x, 12 heads of 64, 197 tokens, H200).
FUSED = (
    "q.device.type != 'cuda' or q.itemsize == 2 and e % 8 == 0 and d % 8 == 0",
    "q.device.type != 'cuda' or max(e, d) <= 128 or e == d and d <= 256 and mask is None",
)
attention = (
    no_ops,
    *(
        Attention(name, _written_out(kind, softmax), _attended, "pre-grad", (*SIZES, *FUSED), None, None)
        for name, (kind, softmax) in SPELLINGS.items()
    ),
)
