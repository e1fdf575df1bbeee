"""What is recorded without ``make_fx`` computes the same; what is not simple is left to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.nn import functional as F

from shiplap.torch_private.dynamo_record import record_graph

Fn = Callable[..., Any]


def of_fakes(fn: Fn, *given: Tensor) -> Any:
    """The graph of ``fn``, recorded under a fake mode as a rewrite is placed."""
    with FakeTensorMode() as mode:
        return record_graph(fn, [mode.from_tensor(t) for t in given])


def halves(x: Tensor, y: Tensor) -> list[Tensor]:
    a, b = x.chunk(2, -1)
    return [torch.cat((1 - a, b / 2), -1) * y[..., None, :1], x[:, ::2].transpose(0, 1)]


def attended(x: Tensor, y: Tensor) -> Tensor:
    mask = torch.where(y > 0, torch.full((), -1.5, dtype=x.dtype), 0.0)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask.expand(3, 4)[:, :1].expand(3, 3))


def normed(x: Tensor, y: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x.float(), (x.shape[-1],), None, 1e-6).to(x.dtype), y.T) + x.mT.sum()


@pytest.mark.parametrize("fn", [halves, attended, normed, lambda x, y: x, lambda x, y: [y.sin(), x]])
def test_the_graph_computes_what_the_function_does(fn: Fn) -> None:
    x, y = torch.randn(2, 3, 4), torch.randn(4) if fn is not normed else torch.randn(4, 5)
    graph = of_fakes(fn, x, y)
    graph.lint()
    wanted = fn(x, y)
    for got, want in zip(GraphModule({}, graph)(x, y), wanted if isinstance(wanted, list) else [wanted], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    for node in graph.nodes:
        assert node.op == "output" or "val" in node.meta


ELSEWHERE = torch.randn(4)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sin()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.clone().add_(1),
        lambda x: F.relu(x.clone(), inplace=True),
        lambda x: torch.sin(x, out=torch.empty_like(x)),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        without_gradient,
        lambda x: [x, 3],
    ],
    ids=["method", "inplace", "out", "constants", "mode", "a number"],
)
def test_what_is_not_simple_is_left_to_make_fx(fn: Fn) -> None:
    graph = of_fakes(fn, torch.randn(2, 4))
    assert graph is None or fn(torch.ones(2, 4))[1] == 3


@pytest.mark.parametrize("enabled", [True, False])
def test_a_mode_that_a_function_switches_is_switched_back(enabled: bool) -> None:
    def fails_within(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu"):
            return x.sin().add_(1)

    with torch.set_grad_enabled(enabled):
        assert of_fakes(without_gradient, torch.randn(2, 4)) is None
        assert of_fakes(fails_within, torch.randn(2, 4)) is None
        assert torch.is_grad_enabled() is enabled
    assert not torch.is_autocast_enabled("cpu")


def test_a_tensor_from_elsewhere_is_left_to_make_fx() -> None:
    with FakeTensorMode() as mode:
        other = mode.from_tensor(ELSEWHERE)
        assert record_graph(lambda x: x + other, [mode.from_tensor(torch.randn(2, 4))]) is None


def test_what_the_function_raises_is_raised() -> None:
    with pytest.raises(RuntimeError, match="size"):
        of_fakes(lambda x: x.view(3, 3), torch.randn(2, 4))
