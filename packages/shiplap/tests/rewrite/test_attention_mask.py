"""Masks of torch's fused attention call: left out where sizes alone show that they hide nothing, or later columns."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

import shiplap as sl
from shiplap.rewrite import Match
from shiplap.rewrite.graph import remove_dead_calls
from shiplap.rewrite.shipped import attention_mask, everything
from shiplap.rewrite.shipped.attention_mask import _is_fast_on_efficient_kernel
from shiplap.torch_private.inductor_passes import capture_graph
from tests.rewrite.specimens import near, outcomes

FUSED = F.scaled_dot_product_attention


def args() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 5, 4, generator=g) for _ in range(3)]


def causal_as_transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Positions, compared, and a mask of padding without padding."""
    rows, columns = torch.arange(5)[None, None, :, None], torch.arange(5)[None, None, None, :]
    seen = (columns <= rows).expand(2, 1, 5, 5) & torch.ones(2, 1, 1, 5, dtype=torch.bool)
    return FUSED(q, k, v, attn_mask=seen, dropout_p=0.0, scale=0.3, is_causal=False)


def causal_in_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return FUSED(q, k, v, torch.zeros(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf))


def hides_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return FUSED(q, k, v, attn_mask=torch.arange(5)[None, None, :, None].expand(2, 1, 5, 5) >= 0)


@pytest.mark.parametrize(
    ("fn", "causal"), [(causal_as_transformers, True), (causal_in_numbers, True), (hides_nothing, False)]
)
@pytest.mark.parametrize("train", [False, True])
def test_a_mask_of_sizes_alone_is_left_out(fn: Callable[..., Tensor], causal: bool, train: bool) -> None:
    leaves = [a.requires_grad_(train) for a in args()]
    graph = capture_graph(fn, leaves, "pre-grad", dynamic=False).graph
    (outcome,) = attention_mask.apply(graph)
    assert isinstance(outcome, Match)
    graph.eliminate_dead_code()
    (call,) = (n for n in graph.nodes if n.op == "call_function")
    assert call.kwargs["is_causal"] is causal
    assert call.kwargs["attn_mask"] is None
    got, want = GraphModule({}, graph)(*leaves), fn(*leaves)
    got = got[0] if isinstance(got, tuple) else got
    assert torch.allclose(got, want, atol=1e-6)


def test_a_compiled_model_agrees() -> None:
    torch.compiler.reset()
    leaves = [a.requires_grad_() for a in args()]
    with sl.rewrites(attention_mask) as placed:
        got = torch.compile(causal_as_transformers, fullgraph=True)(*leaves)
    assert [m.rewrite for m in placed.matches] == ["attention_mask"]
    assert attention_mask in everything
    want = causal_as_transformers(*leaves)
    assert torch.allclose(got, want, atol=1e-6)
    grads = [torch.autograd.grad(y.square().sum(), leaves) for y in (got, want)]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*grads, strict=True))


def test_a_dead_call_of_a_method_of_objects_stays() -> None:
    """The namespace of torch's operators is a Python object, whose own ``__le__`` is no operator."""
    graph = Graph()
    x = graph.placeholder("x")
    compared = graph.call_method("__le__", (x, x))
    graph.output((x,))
    for node in (x, compared):
        node.meta["example_value"] = torch.empty(2)
    remove_dead_calls(graph)
    assert compared in graph.nodes


def a_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(5)
    return FUSED(q, k, v, attn_mask=(at[:, None] - at).abs() < 2)


def more_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Aligned to the last key, as with a cache: is_causal aligns to the first."""
    seen = torch.ones(3, 5, dtype=torch.bool).tril(2)
    return FUSED(q[:, :, 2:], k, v, attn_mask=seen)


def by_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return FUSED(q, k, v, attn_mask=(k[:, :1, None, :, 0] > -9).expand(2, 1, 5, 5))


def no_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return FUSED(q, k, v, is_causal=True)


def mask_and_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's documentation forbids it, and its kernels hide what either hides. torch 2.15 raises an error."""
    return FUSED(q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.bool), is_causal=True)


@pytest.mark.parametrize("fn", [a_window, more_keys, by_values, no_mask, mask_and_causal])
def test_other_calls_stay(fn: Callable[..., Tensor]) -> None:
    try:
        fn(*args())
    except RuntimeError as refused:
        pytest.skip(str(refused))
    assert outcomes(attention_mask, fn, *args()) == []


def test_dropout_keeps_its_kernel() -> None:
    def drops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FUSED(q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.bool), dropout_p=0.1)

    miss = near(attention_mask, drops, *args())
    assert (miss.obstacle, "drops weights at random" in miss.reason) == ("mode", True)


@pytest.mark.parametrize("learned", [False, True])
def test_a_fill_without_effect_is_taken_off_a_bias(learned: bool) -> None:
    def t5(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, other: Tensor) -> Tensor:
        seen = torch.ones(2, 1, 1, 5, dtype=torch.bool).expand(2, 1, 5, 5)
        return FUSED(q, k, v, attn_mask=torch.where(seen, bias[None], other), scale=1.0)

    given = [*args(), torch.randn(3, 5, 5), torch.full((), -math.inf).requires_grad_(learned)]
    graph = capture_graph(t5, given, "pre-grad", dynamic=False).graph
    found = list(attention_mask.apply(graph))
    # A learned number would lose its gradient of 0.
    assert len(found) == (not learned)
    if found:
        graph.eliminate_dead_code()
        assert not any("where" in str(n.target) for n in graph.nodes)


def test_a_fill_with_an_effect_stays() -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        seen = torch.arange(5)[None, :] < 4
        return FUSED(q, k, v, attn_mask=torch.where(seen, bias[None], -math.inf))

    assert outcomes(attention_mask, masked, *args(), torch.randn(3, 5, 5)) == []


def held(*shape: int, dtype: torch.dtype = torch.bfloat16, learns: bool = False) -> Tensor:
    with FakeTensorMode():
        return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=learns)


@pytest.mark.parametrize(
    ("tokens", "heads", "dtype", "learns", "fast"),
    [
        (49, 3, torch.bfloat16, False, True),
        (49, 3, torch.float32, False, False),
        (49, 3, torch.bfloat16, True, False),
        (49, 1, torch.bfloat16, False, False),
        (64, 3, torch.bfloat16, False, True),
        (128, 3, torch.bfloat16, False, False),
    ],
)
def test_few_tokens_with_a_bias_of_heads_take_the_efficient_kernel(
    tokens: int, heads: int, dtype: torch.dtype, learns: bool, fast: bool
) -> None:
    q, k, v = (held(8, 3, tokens, 32, dtype=dtype) for _ in range(3))
    bias = held(1, heads, tokens, tokens, dtype=dtype, learns=learns)
    assert _is_fast_on_efficient_kernel(q, k, v, bias) is fast


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("lead", [1, 8])
def test_the_efficient_kernel_agrees(lead: int) -> None:
    q, k, v = (torch.randn(8, 3, 49, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(lead, 3, 49, 49, device="cuda", dtype=torch.bfloat16)

    def swin(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return FUSED(q, k, v, attn_mask=bias, scale=0.2)

    with torch.no_grad(), sl.rewrites(attention_mask) as placed:
        got = torch.compile(swin, dynamic=False)(q, k, v, bias)  # the next case would make a size dynamic
    assert placed.matches
    assert torch.allclose(got.float(), swin(*(t.float() for t in (q, k, v, bias))), atol=3e-2)


def filled_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(5, 5)
    mask[2:].narrow(1, 0, 2).fill_(-torch.inf)
    return FUSED(q, k, v, attn_mask=mask)


def assigned_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(5, 5, dtype=torch.bool)
    rows = mask[2:]
    rows[:, :2] = False
    return FUSED(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("fn", [filled_through_a_view, assigned_through_a_view])
def test_a_mask_that_is_written_through_a_view_stays(fn: Callable[..., Tensor]) -> None:
    graph = capture_graph(fn, args(), "pre-grad", dynamic=False).graph
    assert list(attention_mask.apply(graph)) == []
