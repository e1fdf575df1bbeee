"""Ten-line rewrites as users write them, for models as they are published: proven at the first try, and placed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from shiplap.rewrite import Match, NearMiss, rewrite, rewrites
from shiplap.rewrite.shipped import no_ops
from shiplap_testing.effort import sampled
from tests.rewrite.specimens import outcomes


def llama_norm(x: Float[Tensor, "*b n"], weight: Float[Tensor, "n"], eps: float) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def one_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotary(q: Float[Tensor, "b h l d"], cos: Float[Tensor, "b 1 l d"], sin: Float[Tensor, "b 1 l d"]) -> Tensor:
    return (q * cos) + (rotate_half(q) * sin)


def by_halves(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = q.chunk(2, -1)
    (c, d), (s, t) = cos.chunk(2, -1), sin.chunk(2, -1)
    return torch.cat((a * c - b * s, b * d + a * t), -1)


def geglu(x: Float[Tensor, "*b k"], gate: Float[Tensor, "n k"], up: Float[Tensor, "n k"]) -> Tensor:
    return F.gelu(F.linear(x, gate), approximate="tanh") * F.linear(x, up)


def one_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    a, b = F.linear(x, torch.cat((gate, up))).chunk(2, -1)
    return F.gelu(a, approximate="tanh") * b


NORM = rewrite(llama_norm, one_norm)
ROTARY = rewrite(rotary, by_halves, where=["d % 2 == 0"])


@pytest.mark.parametrize("made", sampled([NORM, ROTARY, rewrite(geglu, one_product)], 1), ids=lambda r: r.name)
def test_it_is_proven_at_the_first_try(made: Any) -> None:
    assert rewrites(made).rewrites == (made,)


def published(x: Tensor, weight: Tensor) -> Tensor:
    """Another spelling of each call, as in Gemma, T5 or a model of one's own."""
    dtype = x.dtype
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-6)).type(dtype)).sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pattern_serves_all_dtypes(dtype: torch.dtype) -> None:
    (match,) = outcomes(NORM, published, torch.randn(2, 3, 8, dtype=dtype), torch.randn(8, dtype=dtype))
    assert isinstance(match, Match), match


def test_a_norm_of_a_transposed_tensor_is_laid_out_as_before() -> None:
    x, weight = torch.randn(2, 3, 4, 8).transpose(1, 2), torch.randn(8)
    (match,) = outcomes(NORM, lambda x, w: llama_norm(x, w, 1e-6), x, weight)
    assert isinstance(match, Match), match


def scores(q: Float[Tensor, "b h l e"], k: Float[Tensor, "b h s e"]) -> Tensor:
    return torch.matmul(q, k.transpose(2, 3)).sin()


def same_scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhle,bhse->bhls", q, k).sin()


@pytest.mark.parametrize(
    "swap",
    sampled(
        [
            lambda k: k.transpose(-1, -2),
            lambda k: k.transpose(3, 2),
            lambda k: k.permute(0, 1, 3, 2),
            lambda k: k.mT,
            lambda k: k.swapaxes(-2, -1),
            lambda k: torch.permute(k, (0, 1, -1, -2)),
        ],
        3,
    ),
)
def test_a_transpose_is_one_call_however_it_is_spelled(swap: Any) -> None:
    made = rewrite(scores, same_scores, samples=lambda: [(torch.randn(2, 3, 4, 5), torch.randn(2, 3, 6, 5))])
    (placed,) = outcomes(made, lambda q, k: (q @ swap(k)).sin(), torch.randn(2, 3, 4, 5), torch.randn(2, 3, 6, 5))
    assert isinstance(placed, Match), placed
    (miss,) = outcomes(made, lambda q, k: (q @ k.transpose(1, 3)).sin(), *(torch.randn(2, 3, 3, 3) for _ in "qk"))
    assert isinstance(miss, NearMiss)


def test_a_set_may_hold_the_same_rewrite_twice() -> None:
    assert rewrites(no_ops, no_ops).rewrites == (no_ops,)
