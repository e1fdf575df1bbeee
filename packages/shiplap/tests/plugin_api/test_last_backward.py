"""``is_last_backward``: a backward of a graph that is freed, and everything that makes it another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shiplap.plugin_api import is_last_backward

SEEN: list[bool] = []


class Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        SEEN.append(is_last_backward())
        return grad * 2


@pytest.mark.parametrize(
    ("options", "last"), [({}, True), ({"retain_graph": True}, False), ({"create_graph": True}, False)]
)
def test_a_graph_that_is_kept_may_run_again(options, last):
    SEEN.clear()
    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Watched.apply(x).sum(), x, **options)
    assert [last] == SEEN


def test_a_trace_and_code_outside_of_a_backward_are_no_last_backward():
    SEEN.clear()
    x = torch.ones(3, requires_grad=True)
    make_fx(lambda x: torch.autograd.grad(Watched.apply(x).sum(), x)[0])(x)
    assert SEEN == [False]
    assert not is_last_backward()
