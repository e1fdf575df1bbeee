"""Rotary embeddings in spellings that the programs of the proof lack: found by what they compute, and that alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from shiplap.rewrite import Match, NearMiss
from shiplap.rewrite.shipped.rotary import Rotary, rotary
from shiplap.torch_private.inductor_passes import capture_graph
from shiplap_testing.effort import sampled
from tests.rewrite.specimens import near, outcomes

module = import_module("shiplap.rewrite.shipped.rotary")
Spelled = Callable[[Tensor, Tensor, Tensor], Tensor]


def subtracted(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = torch.split(x, x.shape[-1] // 2, -1)
    return x * cos - torch.cat([second, -first], dim=-1) * sin


def neighbours_by_view(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    mixed = torch.stack([b.neg(), a], -1).reshape_as(x)
    return cos * x + mixed * sin


def multiplied_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    c, s = cos[..., :half], sin[..., :half]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * c - b * s, a * s + b * c), dim=-1)


def complex_numbers(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    angles = torch.complex(cos[..., ::2], sin[..., ::2])
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * angles
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def of_one_cache(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """torchtune: cosines and sines are one tensor, indexed for each use."""
    cache = torch.stack([cos[..., ::2], sin[..., ::2]], -1)
    a = x.float().reshape(*x.shape[:-1], -1, 2)
    first = a[..., 0] * cache[..., 0] - a[..., 1] * cache[..., 1]
    return torch.stack([first, a[..., 1] * cache[..., 0] + a[..., 0] * cache[..., 1]], -1).flatten(3).type_as(x)


def rolled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    sign = torch.cat([-torch.ones(half), torch.ones(half)])
    return x * cos + x.roll(half, -1) * sign * sin


def by_addcmul(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    a, b, c, s = x[..., :half], x[..., half:], cos[..., :half], sin[..., :half]
    return torch.cat([torch.addcmul(a * c, b, s, value=-1), torch.addcmul(b * c, a, s)], -1)


def of_whole_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One cosine and one sine for both elements of a pair, with a last dim of 1."""
    pairs, c, s = x.view(*x.shape[:-1], -1, 2), cos[..., ::2, None], sin[..., ::2, None]
    mixed = torch.stack([-pairs[..., 1], pairs[..., 0]], -1)
    return (pairs * c + mixed * s).view(x.shape)


def given(*, like: tuple[int, ...] = (2, 3, 6, 8)) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(like), torch.randn(like[-2:]), torch.randn(like[-2:])


SPELLINGS = [subtracted, neighbours_by_view, multiplied_first, complex_numbers]
SPELLINGS += [of_one_cache, rolled, by_addcmul, of_whole_pairs]


@pytest.mark.parametrize("fn", sampled(SPELLINGS, 4))
def test_another_spelling_is_found_and_computes_the_same(fn: Spelled) -> None:
    args = given()
    captured = capture_graph(fn, list(args), "pre-grad", dynamic=False)
    placed = [o for o in Rotary(always=True).apply(captured.graph) if isinstance(o, Match)]
    assert [m.rewrite for m in placed] == ["rotary"]
    made = torch.fx.GraphModule({}, captured.graph)
    order = [args[role] for role in captured.roles.values() if isinstance(role, int)]
    torch.testing.assert_close(made(*order)[0], fn(*args), rtol=1e-5, atol=1e-5)


def reflected(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * sin


def shifted(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves of unequal size: what is mixed are no pairs."""
    return x * cos + torch.cat((-x[..., 3:], x[..., :3]), -1) * sin


def of_squares(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos * x + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@pytest.mark.parametrize("fn", [reflected, shifted, of_squares])
def test_what_only_looks_like_one_stays(fn: Spelled) -> None:
    placed = outcomes(Rotary(always=True), fn, *given())
    assert [type(o) for o in placed if isinstance(o, Match)] == []
    for miss in placed:
        assert isinstance(miss, NearMiss)
        assert "not turned by angles" in miss.reason


def by_matrices(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Flux: a matrix for each pair."""
    c, s = cos[..., ::2], sin[..., ::2]
    turn = torch.stack([c, -s, s, c], -1).unflatten(-1, (2, 2))
    a = x.reshape(*x.shape[:-1], -1, 1, 2)
    return (turn[..., 0] * a[..., 0] + turn[..., 1] * a[..., 1]).reshape(x.shape)


def by_einsum(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = cos[..., ::2], sin[..., ::2]
    turn = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
    return torch.einsum("lpij,bhlpj->bhlpi", turn, x.view(*x.shape[:-1], -1, 2)).reshape(x.shape)


@pytest.mark.parametrize("fn", [by_matrices, by_einsum])
def test_matrices_of_pairs_are_a_near_miss(fn: Spelled) -> None:
    (miss,) = outcomes(Rotary(always=True), fn, *given())
    assert isinstance(miss, NearMiss)
    assert "not turned by angles" in miss.reason
    assert miss.where.startswith(f"{__file__}:")


def scaled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((x * cos, x * sin), -1).unflatten(-1, (2, -1)).sum(-2)


def test_what_mixes_no_pairs_is_left_in_silence() -> None:
    assert outcomes(Rotary(always=True), scaled, *given()) == []


def llama(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def test_it_declines_where_it_does_not_pay() -> None:
    x, cos, sin = given()
    (placed,) = outcomes(rotary, llama, x, cos, sin)
    assert isinstance(placed, Match)
    assert len(placed.args) == 3
    narrow = near(rotary, llama, *(t.bfloat16() for t in (x, cos, sin)))
    assert narrow.obstacle == "cost"
    assert narrow.reason == "on a CPU the rewrite is slower for bfloat16 with pairs of halves"
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert isinstance(outcomes(rotary, llama, *(t.bfloat16() for t in (turned, cos, sin)))[0], Match)
    assert near(rotary, complex_numbers, x, cos, sin).obstacle == "cost"
    alone = near(rotary, multiplied_first, x, cos, sin)
    assert alone.reason == "the model multiplies each half of the last dim on its own already"


def test_on_a_gpu_it_pays_behind_a_norm_of_each_head() -> None:
    """Qwen3 ran 1.05 times as fast with it, and Llama, Gemma 2 and ModernBERT 0.95 to 0.98 times (H100)."""

    def normed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return llama(F.rms_norm(x, x.shape[-1:]).transpose(1, 2), cos, sin)

    def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return llama((x * 2).transpose(1, 2), cos, sin)

    x, cos, sin = given()
    for fn, why in ((normed, ""), (plain, "on a GPU it pays behind a norm of each head alone")):
        graph = capture_graph(fn, [x.transpose(1, 2).contiguous(), cos, sin], "pre-grad", dynamic=False).graph
        piece, turn = next(f for n in reversed(list(graph.nodes)) if isinstance(f := module._find_rotation(n), tuple))
        assert module._why_not_faster_on_cuda(piece, turn) == why
        assert "neighbours" in module._why_not_faster_on_cuda(piece, replace(turn, pairs="neighbours"))


def test_with_gradients_it_declines_for_a_tensor_that_is_not_transposed() -> None:
    x, cos, sin = given()
    (miss,) = outcomes(rotary, llama, x, cos, sin, train=True)
    assert isinstance(miss, NearMiss)
    assert "with gradients" in miss.reason


def test_long_sequences_are_looked_at_in_small() -> None:
    """The sizes of the graph would be 2**26 numbers: no part of this size is run."""
    with FakeTensorMode():
        x, cos, sin = torch.empty(8, 32, 4096, 64), torch.empty(4096, 64), torch.empty(4096, 64)
    assert isinstance(outcomes(rotary, llama, x, cos, sin)[0], Match)


def test_it_is_proven() -> None:
    assert {f.verdict for f in rotary.findings} == {"ok"}


def test_pairs_that_are_written_into_an_empty_tensor_are_a_near_miss() -> None:
    def wan(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.empty_like(x)
        out[..., 0::2] = a * cos - b * sin
        out[..., 1::2] = a * sin + b * cos
        return out.type_as(x)

    miss = near(rotary, wan, torch.randn(2, 3, 8), torch.randn(3, 4), torch.randn(3, 4))
    assert miss.obstacle == "mutation"
    assert "torch.stack" in miss.fix
    assert miss.where.startswith(f"{__file__}:")
