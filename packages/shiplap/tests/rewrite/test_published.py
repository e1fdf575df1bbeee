"""RMS norm, rotary and GEGLU as they are published, and the few lines with which a user replaces each.

As a user writes them at the first try: nothing was added to make a proof succeed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

import shiplap as sl
from shiplap.rewrite import Match, NearMiss, prove_rewrite
from shiplap_testing.effort import sampled
from tests.rewrite.specimens import outcomes

Fn = Callable[..., Tensor]


def llama_norm(x: Float[Tensor, "*b n"], weight: Float[Tensor, "n"], eps: float) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def one_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def gemma_norm(x: Float[Tensor, "*b n"], weight: Float[Tensor, "n"], eps: float) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).type_as(x)


def shifted_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + weight.float(), eps).type_as(x)


def t5_norm(x: Float[Tensor, "*b n"], weight: Float[Tensor, "n"], eps: float) -> Tensor:
    scaled = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    if weight.dtype in (torch.float16, torch.bfloat16):
        scaled = scaled.to(weight.dtype)
    return weight * scaled


def image_gpt_norm(x: Float[Tensor, "*b n"], weight: Float[Tensor, "n"], eps: float) -> Tensor:
    return x / torch.sqrt(torch.mean(torch.square(x), axis=-1, keepdim=True) + eps) * weight  # type: ignore[call-overload,no-any-return]


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def llama_rotary(x: Float[Tensor, "b h l d"], cos: Float[Tensor, "b l d"], sin: Float[Tensor, "b l d"]) -> Tensor:
    return (x * cos.unsqueeze(1)) + (rotate_half(x) * sin.unsqueeze(1))


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    (c, d), (s, t) = cos.unsqueeze(1).chunk(2, -1), sin.unsqueeze(1).chunk(2, -1)
    return torch.cat((a * c - b * s, b * d + a * t), -1)


def neox_rotary(x: Float[Tensor, "b h l d"], cos: Float[Tensor, "b l r"], sin: Float[Tensor, "b l r"]) -> Tensor:
    """Of the first ``r`` of ``d``: no size says that ``r <= d``, and none has to."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat((turned * cos.unsqueeze(1) + rotate_half(turned) * sin.unsqueeze(1), rest), -1)


def of_a_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    return torch.cat((by_halves(x[..., :width], cos, sin), x[..., width:]), -1)


def gptj_rotary(x: Float[Tensor, "b l h d"], sin: Float[Tensor, "b l 1 d"], cos: Float[Tensor, "b l 1 d"]) -> Tensor:
    mixed = torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1).flatten(-2)
    return (x * cos) + (mixed * sin)


def by_neighbours(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    pairs = (a * cos[..., ::2] - b * sin[..., ::2], b * cos[..., 1::2] + a * sin[..., 1::2])
    return torch.stack(pairs, -1).flatten(-2)


def gemma_mlp(
    x: Float[Tensor, "*b k"], gate: Float[Tensor, "n k"], up: Float[Tensor, "n k"], down: Float[Tensor, "k n"]
) -> Tensor:
    return F.linear(F.gelu(F.linear(x, gate), approximate="tanh") * F.linear(x, up), down)


def one_product(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    a, b = F.linear(x, torch.cat((gate, up))).chunk(2, -1)
    return F.linear(F.gelu(a, approximate="tanh") * b, down)


def t5_mlp(x: Float[Tensor, "*b k"], wi_0: Float[Tensor, "n k"], wi_1: Float[Tensor, "n k"]) -> Tensor:
    h = F.linear(x, wi_0)
    inner = math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))
    return 0.5 * h * (1.0 + torch.tanh(inner)) * F.linear(x, wi_1)


def fused_gelu(x: Tensor, wi_0: Tensor, wi_1: Tensor) -> Tensor:
    a, b = F.linear(x, torch.cat((wi_0, wi_1))).chunk(2, -1)
    return F.gelu(a, approximate="tanh") * b


def phi3_mlp(x: Float[Tensor, "*b k"], weight: Float[Tensor, "m k"]) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return up * F.silu(gate)


def two_products(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = weight.chunk(2)
    return F.linear(x, up) * F.silu(F.linear(x, gate))


def diffusers_mlp(x: Float[Tensor, "*b k"], weight: Float[Tensor, "m k"], bias: Float[Tensor, "m"]) -> Tensor:
    hidden, gate = F.linear(x, weight, bias).chunk(2, dim=-1)
    return hidden * F.gelu(gate)


def two_biased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    (first, second), (left, right) = weight.chunk(2), bias.chunk(2)
    return F.linear(x, first, left) * F.gelu(F.linear(x, second, right))


def root_norm(x: Float[Tensor, "*b n"], weight: Float[Tensor, "n"], eps: float) -> Tensor:
    rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
    return x / (rms + eps) * weight


def by_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * weight / (x.norm(2, -1, keepdim=True) / math.sqrt(x.shape[-1]) + eps)


def rolled_rotary(x: Float[Tensor, "b h l d"], cos: Float[Tensor, "l d"], sin: Float[Tensor, "l d"]) -> Tensor:
    return x * cos + torch.roll(x, x.shape[-1] // 2, -1) * sin


def joined_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * sin


def complex_rotary(x: Float[Tensor, "b l h d"], freqs: Float[Tensor, "b l r 2"]) -> Tensor:
    """Of neighbours. It raises for most layouts: what a model computes in one of them is no question."""
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = turned * torch.view_as_complex(freqs.float().contiguous())[:, :, None, :]
    return torch.view_as_real(turned).flatten(3).type_as(x)


def by_pairs(x: Tensor, freqs: Tensor) -> Tensor:
    a, b = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    c, s = freqs.float()[:, :, None].unbind(-1)
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(3).type_as(x)


PAIRS: dict[Fn, Fn] = {
    llama_norm: one_norm,
    gemma_norm: shifted_norm,
    t5_norm: one_norm,
    image_gpt_norm: one_norm,
    llama_rotary: by_halves,
    neox_rotary: of_a_part,
    gptj_rotary: by_neighbours,
    root_norm: by_norm,
    rolled_rotary: joined_rotary,
    complex_rotary: by_pairs,
    gemma_mlp: one_product,
    t5_mlp: fused_gelu,
    phi3_mlp: two_products,
    diffusers_mlp: two_biased,
}
SHORTEST = "diffusers_mlp"  # whose proof takes the least time


@pytest.mark.parametrize(
    "pattern",
    sampled(PAIRS, long=[f.__name__ for f in PAIRS if f.__name__ != SHORTEST], name=lambda f: f.__name__),
    ids=lambda f: f.__name__,
)
def test_it_is_proven_at_the_first_try(pattern: Fn) -> None:
    made = sl.rewrite(pattern, PAIRS[pattern], name=pattern.__name__)
    assert {f.check: f.verdict for f in prove_rewrite(made)} == dict.fromkeys(
        ("fires", "deterministic", "outputs", "strides", "aliasing", "mutation", "gradients"), "ok"
    )


@pytest.mark.long
def test_a_wrong_rewrite_is_refused() -> None:
    def turned_back(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        return by_neighbours(x, -sin, cos)

    made = sl.rewrite(gptj_rotary, turned_back)
    with pytest.raises(sl.ShiplapError, match=r"SL801(.|\n)*outputs"):
        sl.rewrites(made)


def test_what_is_computed_from_sizes_is_a_number_in_a_model() -> None:
    def norm(x: Tensor, weight: Tensor, width: float = 8**-0.5) -> Tensor:
        return (x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) * width + 1e-6) * weight).sin()

    made, given = sl.rewrite(root_norm, by_norm), (torch.randn(2, 3, 8), torch.randn(8))
    (match,) = outcomes(made, norm, *given)
    assert isinstance(match, Match), match
    (miss,) = outcomes(made, lambda x, w: norm(x, w, 0.5), *given)
    assert isinstance(miss, NearMiss)
    assert "0.5" in miss.reason


def test_a_list_of_one_size_is_the_size() -> None:
    made, given = (
        sl.rewrite(rolled_rotary, joined_rotary),
        [torch.randn(2, 3, 5, 8), torch.randn(5, 8), torch.randn(5, 8)],
    )
    (match,) = outcomes(made, lambda x, cos, sin: (x * cos + torch.roll(x, 4, -1) * sin).sin(), *given)
    assert isinstance(match, Match), match
    (miss,) = outcomes(made, lambda x, cos, sin: (x * cos + torch.roll(x, 3, -1) * sin).sin(), *given)
    assert isinstance(miss, NearMiss)
    assert "3" in miss.reason


def powers(x: Tensor, weight: Tensor) -> Tensor:
    return (x * torch.pow((x * x).mean(-1, keepdim=True) + 1e-6, -0.5) * weight).sin()


def squared(x: Tensor, weight: Tensor) -> Tensor:
    return (weight * (torch.rsqrt(torch.mean(torch.square(x.float()), axis=-1, keepdims=True) + 1e-6) * x)).sin()


@pytest.mark.parametrize("model", [powers, squared])
def test_a_power_is_one_call_however_it_is_spelled(model: Fn) -> None:
    made = sl.rewrite(llama_norm, one_norm)
    (match,) = outcomes(made, model, torch.randn(2, 3, 8), torch.randn(8))
    assert isinstance(match, Match), match


def test_another_power_is_a_near_miss() -> None:
    made = sl.rewrite(llama_norm, one_norm)

    def cubed(x: Tensor, weight: Tensor) -> Tensor:
        return (weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6))).sin()

    (miss,) = outcomes(made, cubed, torch.randn(2, 3, 8), torch.randn(8))
    assert isinstance(miss, NearMiss)
    assert "exponent=3" in miss.reason


def refused(pattern: Fn, replacement: Fn) -> str:
    with pytest.raises(sl.ShiplapError) as e:
        sl.rewrites(sl.rewrite(pattern, replacement, name="odd"))
    return str(e.value)


def test_a_pattern_that_runs_on_no_sizes_says_so() -> None:
    def sum_of(x: Float[Tensor, "b n"], y: Float[Tensor, "b m"]) -> Tensor:
        return (x + y).sin()

    text = refused(sum_of, lambda x, y: (y + x).sin())
    assert "SL804" in text
    assert "it raises on sizes(b=" in text
    assert "must match the size" in text
    assert "where=" in text


def test_a_pattern_without_annotations_is_told_which() -> None:
    text = refused(lambda x, eps: torch.rsqrt(x.sin() + eps), lambda x, eps: 1 / (x.sin() + eps).sqrt())
    assert 'x: Float[Tensor, "*b n"]' in text
