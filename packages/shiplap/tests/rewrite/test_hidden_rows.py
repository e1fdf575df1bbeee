"""A mask that hides a row as a whole: attention is rewritten with the results of eager mode, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shiplap.rewrite import Match, NearMiss
from shiplap.rewrite.shipped.attention import AttentionRewrite
from shiplap_testing.effort import sampled

Model = Callable[..., Tensor]


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(q @ k.mT * 0.25 + mask, -1) @ v


def added_twice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax((q @ k.mT * 0.25 + mask) + mask, -1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax((q @ k.mT).masked_fill(mask < 0, max(-1e9, torch.finfo(q.dtype).min)), -1) @ v


def filled_with_infinity(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(torch.where(mask < 0, -torch.inf, q @ k.mT), -1) @ v


def strictly_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The first row sees no key, whatever ``mask`` is."""
    later = torch.ones(8, 8).triu(0)
    return F.softmax(q @ k.mT + later * -1e9, -1) @ v


def drawn(hidden: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    mask = torch.zeros(8, 8)
    mask[2], mask[4, 5:] = hidden, hidden
    return [t.to(dtype) for t in (*(torch.randn(2, 3, 8, 16, generator=rng) for _ in "qkv"), mask)]


def rewritten(model: Model, rewrite: AttentionRewrite) -> tuple[Model, list[Any]]:
    placed: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        placed.extend(rewrite.apply(gm.graph))
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(model, backend=backend), placed


@pytest.mark.parametrize("hidden", sampled([torch.finfo(torch.float32).min, -1e9, -torch.inf, -1e4], 2))
@pytest.mark.parametrize("model", [added, added_twice, filled, filled_with_infinity, strictly_causal])
def test_results_are_those_of_eager_mode(model: Model, hidden: float) -> None:
    compiled, placed = rewritten(model, AttentionRewrite(always=True))
    with torch.no_grad():
        got, expected = compiled(*drawn(hidden)), model(*drawn(hidden))
    assert [type(o) for o in placed] == [Match]
    # The steps between numbers near -20,000 are of 2e-3, so that the order of two sums shows.
    error = 2e-3 if hidden == -1e4 else 1e-5
    torch.testing.assert_close(got, expected, rtol=error, atol=error, equal_nan=True)


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float16, -65504.0), (torch.bfloat16, -3e38)])
@pytest.mark.parametrize("model", [added, filled])
def test_sixteen_bits_swallow_scores_as_in_eager_mode(model: Model, dtype: torch.dtype, hidden: float) -> None:
    compiled, placed = rewritten(model, AttentionRewrite(always=True))
    args = drawn(hidden, dtype)
    with torch.no_grad():
        got, expected = compiled(*args), model(*args)
    assert [type(o) for o in placed] == [Match]
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("model", [added, filled, filled_with_infinity, strictly_causal])
def test_gradients_are_those_of_eager_mode(model: Model) -> None:
    grads = []
    compiled, placed = rewritten(model, AttentionRewrite(always=True))
    for fn in (compiled, model):
        *leaves, mask = drawn(-1e9)
        leaves = [t.requires_grad_() for t in leaves]
        out = fn(*leaves, mask)
        grads.append(torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), leaves))
    (miss,) = placed
    assert isinstance(miss, NearMiss)
    assert miss.obstacle == "gradient"
    assert "may mask every key of a query" in miss.reason
    torch.testing.assert_close(*grads, equal_nan=True)


def biased(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A learned bias, the mask of a decoder and small numbers hide no row."""
    bias = F.linear(q, k[0, 0]) * 0.5 + torch.arange(8)
    mask = torch.full((8, 8), -torch.inf).triu(1)
    return F.softmax(q @ k.mT + mask + bias, -1) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    near = torch.arange(8)[:, None] - torch.arange(8)
    return F.softmax((q @ k.mT).masked_fill(near * near > 4, -1e9), -1) @ v


@pytest.mark.parametrize("model", [biased, windowed])
def test_masks_that_are_known_to_show_every_row_a_key_are_rewritten_with_gradients(model: Model) -> None:
    grads = []
    compiled, placed = rewritten(model, AttentionRewrite(always=True))
    for fn in (compiled, model):
        *leaves, mask = drawn(0.0)
        leaves = [t.requires_grad_() for t in leaves]
        grads.append(torch.autograd.grad(fn(*leaves, mask).square().sum(), leaves))
    assert [type(o) for o in placed] == [Match], placed
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_who_knows_that_each_row_sees_a_key_may_state_so() -> None:
    compiled, placed = rewritten(added, AttentionRewrite(always=True, visible_rows=True))
    *leaves, mask = drawn(0.0)
    compiled(*(t.requires_grad_() for t in leaves), mask).sum().backward()
    assert [type(o) for o in placed] == [Match]
    assert AttentionRewrite(visible_rows=True).digest != AttentionRewrite().digest


@pytest.mark.parametrize(
    ("model", "dtype", "calls"),
    [
        (filled, torch.float32, set()),
        (filled, torch.bfloat16, {"amax"}),
        (filled_with_infinity, torch.bfloat16, {"amax", "masked_fill"}),
        (added, torch.float32, {"amax", "masked_fill"}),
    ],
)
def test_only_what_a_mask_can_hide_is_restored(model: Model, dtype: torch.dtype, calls: set[str]) -> None:
    """Each of these calls is a pass over the mask, the queries or the result."""
    graphs: list[torch.fx.Graph] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        assert [type(o) for o in AttentionRewrite(always=True).apply(gm.graph)] == [Match]
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(*drawn(-1e9, dtype))
    (graph,) = graphs
    names = {getattr(n.target, "__name__", n.target) for n in graph.nodes if n.users}
    assert names & {"amax", "masked_fill"} == calls
    zeroed = sum("where" in n.name and n.meta["example_value"].shape[-1] == 16 for n in graph.nodes)
    assert zeroed == (model is filled and dtype is torch.bfloat16)
