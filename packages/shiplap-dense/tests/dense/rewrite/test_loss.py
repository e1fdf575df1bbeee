"""The loss of a linear layer in models: proven, placed through what models do to logits, and stopped with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shiplap as sl
from shiplap.rewrite import Match, NearMiss
from shiplap.rewrite.graph import fake_value
from shiplap.torch_private.inductor_passes import capture_graph
from shiplap_dense.rewrites import linear_loss

(LOSS,) = linear_loss(always=True)


def drawn(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(*shape, 6, generator=rng), torch.randn(11, 6, generator=rng)
    return hidden, weight, torch.randint(0, 11, shape, generator=rng)


def outcomes(fn: Any, *args: Tensor, made: Any = LOSS) -> list[Match | NearMiss]:
    leaves = [a.detach().requires_grad_(a.is_floating_point()) for a in args]
    graph = capture_graph(fn, leaves, made.level, dynamic=False).graph
    applied = list(made.apply(graph))
    graph.lint()
    return applied


def test_it_is_proven():
    verdicts = {f.check: f.verdict for f in LOSS.findings}
    assert verdicts["fires"] == verdicts["outputs"] == verdicts["gradients"] == "ok"
    assert "fail" not in verdicts.values(), LOSS.findings


class Head(torch.nn.Module):
    """The end of a language model, with a loss as trainers write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 11, bias=False)
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.body(hidden).tanh())
        shifted = logits[:, :-1].contiguous()
        return self.loss(shifted.view(-1, shifted.size(-1)), labels[:, 1:].reshape(-1))


@pytest.mark.long
def test_a_model_trains_with_the_same_gradients():
    hidden, _, labels = drawn(3, 5)
    model = Head()
    model(hidden, labels).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with sl.rewrites(LOSS) as placed:
        torch.compile(model, fullgraph=True)(hidden, labels).backward()
    assert len(placed.matches) == 1
    for got, expected in zip((p.grad for p in model.parameters()), wanted, strict=True):
        torch.testing.assert_close(got, expected)


def missed(fn: Any, *args: Tensor, made: Any = LOSS) -> NearMiss:
    (outcome,) = outcomes(fn, *args, made=made)
    assert isinstance(outcome, NearMiss), outcome
    return outcome


def test_logits_that_are_returned_stay():
    def fn(hidden, weight, target):
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits, target), logits

    miss = missed(fn, *drawn(4))
    assert miss.obstacle == "user"
    assert "the graph returns it" in miss.reason


@pytest.mark.parametrize(
    ("between", "obstacle"),
    [
        (lambda y: y.softmax(-1), "operator"),
        (lambda y: y.roll(1, -1), "operator"),
        (lambda y: y[:, 1:], "operator"),
        (lambda y: 2 * torch.tanh(torch.tanh(y)), "operator"),
    ],
)
def test_what_changes_the_classes_is_a_near_miss(between, obstacle):
    miss = missed(lambda h, w, t: F.cross_entropy(between(F.linear(h, w)), t - t), *drawn(4))
    assert miss.obstacle == obstacle
    assert miss.fix or miss.reason


def test_weights_of_classes_and_probabilities_are_near_misses():
    hidden, weight, target = drawn(4)
    weighted = missed(
        lambda h, w, t: F.cross_entropy(F.linear(h, w), t, weight=w[:, 0].detach().abs()), hidden, weight, target
    )
    assert weighted.obstacle == "argument"
    soft = missed(lambda h, w: F.cross_entropy(F.linear(h, w), torch.full((4, 11), 1 / 11)), hidden, weight)
    assert soft.obstacle == "dtype"


def test_float64_and_deprecated_reductions_are_near_misses():
    hidden, weight, target = drawn(4)
    wide = missed(lambda h, w, t: F.cross_entropy(F.linear(h, w), t), hidden.double(), weight.double(), target)
    assert wide.obstacle == "dtype"
    summed = missed(lambda h, w, t: F.cross_entropy(F.linear(h, w), t, size_average=False), hidden, weight, target)
    assert summed.obstacle == "argument"


def test_the_size_of_symbolic_logits_adds_no_guard():
    (made,) = linear_loss()
    args = drawn(4)
    graph = capture_graph(lambda h, w, t: F.cross_entropy(F.linear(h, w), t), args, made.level, dynamic=True).graph
    tensors = [held for n in graph.nodes if isinstance(held := fake_value(n), Tensor)]
    env = next(size.node.shape_env for t in tensors for size in t.shape if isinstance(size, torch.SymInt))
    before = len(env.guards), dict(env.replacements)
    (outcome,) = made.apply(graph)
    assert outcome.obstacle == "cost"
    assert (len(env.guards), dict(env.replacements)) == before


def test_small_logits_cost_more_than_they_take():
    miss = missed(lambda h, w, t: F.cross_entropy(F.linear(h, w), t), *drawn(4), made=linear_loss()[0])
    assert miss.obstacle == "cost"
    assert "MB" in miss.reason


def test_a_loss_without_a_layer_is_nothing():
    assert (
        outcomes(lambda y, t: F.cross_entropy(y.sin(), t), torch.randn(4, 11), torch.zeros(4, dtype=torch.int64)) == []
    )
