"""Masks that depend on sizes alone: what they hide is known while a graph is compiled."""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.nn import functional as F

from shiplap.rewrite import Match
from shiplap.rewrite.graph import mutates_argument
from shiplap.rewrite.shipped.attention import AttentionRewrite
from shiplap.torch_private.inductor_passes import capture_graph
from shiplap_testing.effort import sampled

module = import_module("shiplap.rewrite.shipped.constant_masks")
LOWEST = torch.finfo(torch.float32).min
SIZE = (2, 3, 6, 8)


def numbers(hidden: Tensor) -> Tensor:
    return torch.where(hidden, LOWEST, torch.zeros((), dtype=torch.float32))


def transformers(scores: Tensor) -> Tensor:
    """As transformers 5.23 builds it, with the table of packed sequences."""
    at = torch.arange(6).unsqueeze(0).expand(2, -1)
    packed = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, rows, columns = torch.arange(2)[:, None, None, None], torch.arange(6)[None, None, :, None], torch.arange(6)
    seen = batch.new_ones((), dtype=torch.bool) & (packed[batch, rows] == packed[batch, columns])
    seen = seen & (at[batch, columns] <= at[batch, rows])
    return scores + torch.where(seen.expand(2, -1, 6, 6), torch.zeros((), dtype=torch.float32), LOWEST)


def triangle(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)


def kept(scores: Tensor) -> Tensor:
    return torch.where(torch.ones(6, 6).tril() == 1, scores, LOWEST)


def nothing(scores: Tensor) -> Tensor:
    return scores + torch.zeros(2, 1, 6, 6)


def nothing_and_later(scores: Tensor) -> Tensor:
    return nothing(triangle(scores))


def local(scores: Tensor) -> Tensor:
    at = torch.arange(6)
    return scores + numbers((at[:, None] - at).abs() > 2)


def earlier(scores: Tensor) -> Tensor:
    return scores + numbers(torch.ones(6, 6, dtype=torch.bool).tril(-1))


def scaled_after(scores: Tensor) -> Tensor:
    return triangle(scores) * 2.0


def shifted(scores: Tensor) -> Tensor:
    return scores + numbers(torch.ones(6, 6, dtype=torch.bool).triu(1)) + torch.ones(6, 6)


def written(scores: Tensor) -> Tensor:
    mask = torch.zeros(6, 6)
    mask[0] = 1.0
    return scores + mask


CASES: list[tuple[Callable[[Tensor], Tensor], bool, bool]] = [  # whether is_causal, whether there is a mask left
    (transformers, True, False),
    (triangle, True, False),
    (kept, True, False),
    (nothing, False, False),
    (nothing_and_later, True, False),
    (local, False, True),
    (earlier, False, True),
    (scaled_after, False, True),
    (shifted, False, True),
]


@pytest.mark.parametrize(("mask", "causal", "left"), CASES, ids=lambda c: c.__name__ if callable(c) else None)
@pytest.mark.parametrize("train", sampled([False, True], long=["False"]))
def test_a_mask_becomes_what_it_hides(mask: Callable[[Tensor], Tensor], causal: bool, left: bool, train: bool) -> None:
    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(mask(torch.matmul(q, k.transpose(2, 3)) * 0.3), -1) @ v

    torch._dynamo.reset()
    q, k, v = (torch.randn(SIZE).requires_grad_(train) for _ in range(3))
    calls = list[dict[str, Any]]()

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        (outcome,) = AttentionRewrite(always=True).apply(gm.graph)
        assert isinstance(outcome, Match), outcome
        calls.extend(dict(n.kwargs) for n in gm.graph.nodes if "scaled_dot_product" in str(n.target))
        gm.recompile()
        return gm

    got = torch.compile(attended, backend=backend, fullgraph=True)(q, k, v)
    torch.testing.assert_close(got, attended(q, k, v))
    (call,) = calls
    assert (call["is_causal"], call["attn_mask"] is not None) == (causal, left)
    if train:
        mine, own = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (got, attended(q, k, v)))
        torch.testing.assert_close(mine, own)


def test_a_mask_of_the_caller_stays() -> None:
    def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        mask = numbers((torch.arange(6)[:, None] < torch.arange(6)) | ~seen[:, None, None, :])
        return F.softmax(torch.matmul(q, k.transpose(2, 3)) + mask, -1) @ v

    args = [*(torch.randn(SIZE) for _ in range(3)), torch.ones(2, 6, dtype=torch.bool)]
    graph = capture_graph(attended, args, "pre-grad", dynamic=False).graph
    assert all(isinstance(o, Match) for o in AttentionRewrite(always=True).apply(graph))
    (call,) = (n for n in graph.nodes if "scaled_dot_product" in str(n.target))
    assert call.kwargs["attn_mask"] is not None
    assert call.kwargs["is_causal"] is False


def test_sizes_that_vary_stay() -> None:
    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2])
        return F.softmax(torch.matmul(q, k.transpose(2, 3)) + numbers(at[:, None] < at), -1) @ v

    graph = capture_graph(attended, [torch.randn(SIZE) for _ in range(3)], "pre-grad", dynamic=(6,)).graph
    list(AttentionRewrite(always=True).apply(graph))
    assert not any(n.kwargs.get("is_causal") for n in graph.nodes)


def test_a_mask_that_is_too_large_or_too_far_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture_graph(lambda x: triangle(x), [torch.randn(2, 6, 6)], "pre-grad", dynamic=False).graph
    fill = next(n for n in graph.nodes if "masked_fill" in str(n.target))
    mask = fill.args[1]
    assert module._classify_mask("fill", mask) == "later"
    for name in ("MOST_MASK_ELEMENTS", "MOST_MASK_CALLS"):
        with monkeypatch.context() as within:
            within.setattr(module, name, 1)
            assert module._classify_mask("fill", mask) == ""


def test_a_mask_that_is_written_to_is_not_computed() -> None:
    graph = capture_graph(written, [torch.randn(2, 6, 6)], "pre-grad", dynamic=False).graph
    zeros = next(n for n in graph.nodes if "zeros" in str(n.target))
    assert any(mutates_argument(n) for n in zeros.users)
    assert module._classify_mask("add", zeros) == ""


@pytest.mark.parametrize("target", [operator.and_, operator.or_, operator.not_])
def test_an_operator_whose_name_ends_like_a_write_writes_nothing(target: Any) -> None:
    graph = Graph()
    node = graph.call_function(target, (graph.placeholder("a"), graph.placeholder("b")))
    assert not mutates_argument(node)
    assert mutates_argument(graph.call_function(operator.iand, node.args))
    assert mutates_argument(graph.call_function(torch.relu_, node.args[:1]))


def test_a_bias_ahead_of_a_factor_is_multiplied_by_it() -> None:
    """The factor was moved to the queries, and the bias was not multiplied: results were wrong."""

    def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, by: Tensor) -> Tensor:
        return F.softmax((q @ k.transpose(-1, -2) + bias) * by, -1) @ v

    args = [*(torch.randn(SIZE) for _ in range(3)), torch.randn(2, 1, 6, 6), torch.rand(3, 1, 1) + 0.5]
    placed = list[Any]()

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        placed.extend(AttentionRewrite(always=True).apply(gm.graph))
        gm.recompile()
        return gm

    with torch.no_grad():
        got = torch.compile(attended, backend=backend)(*args)
    assert [type(p) for p in placed] == [Match]
    torch.testing.assert_close(got, attended(*args))
