"""Where the gradient of a reference jumps, each value within the jump is right."""

import math

import pytest
import torch

from shiplap.judge import gradient_jumps as jumps
from shiplap.judge.gradient_jumps import gradient_jumps, settle_jumps
from shiplap.judge.problem import JudgeProblem


@pytest.fixture(autouse=True)
def all_points(monkeypatch):
    """Look at as many points on a busy machine as on another."""
    monkeypatch.setattr(jumps, "SECONDS", math.inf)


def settled(call, x, change):
    """Return how many elements still differ from the gradient of ``call`` at ``x``, and the share of its jumps.

    ``change(x, gradient)`` is the gradient of a candidate.
    """
    problem = JudgeProblem("it", call, call)
    seeds = [torch.randn_like(call(x))]
    own, wide = (problem.gradients((x,), seeds, wide=wide) for wide in (False, True))
    got, share = settle_jumps([change(x, own[0], seeds[0])], wide, gradient_jumps(problem, (x,), seeds), [0])
    return int((got[0] - wide[0]).abs().gt(1e-5).sum()), share


def with_ties():
    return torch.cat([torch.randn(39), torch.tensor([0.5])])[torch.randint(0, 40, (12, 67))]


def by_topk(x, own, seed):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(x.topk(x.shape[1], 1, largest=False).values, x, seed)[0]


def to_the_first(x, own, seed):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(x.max(1).values, x, seed)[0]


@pytest.mark.parametrize(
    ("call", "change"),
    [
        (lambda x: x.sort(1).values, by_topk),
        (lambda x: x.amax(1), to_the_first),
        (lambda x: torch.relu(x - 0.5), lambda x, own, seed: torch.where(x == 0.5, seed, own)),
    ],
    ids=["sort", "maximum", "relu"],
)
def test_another_choice_among_equal_values_is_right(call, change):
    differ, share = settled(call, with_ties(), change)
    assert differ == 0
    assert 0 < share < 1


@pytest.mark.parametrize(
    "call",
    [lambda x: x.sort(1).values, lambda x: torch.relu(x), lambda x: torch.tanh(x) * x.exp()],
    ids=["sort", "relu", "smooth"],
)
def test_a_wrong_gradient_stays_wrong_where_nothing_jumps(call):
    x = torch.randn(16, 32)
    differ, share = settled(call, x, lambda x, own, seed: own * 1.01)
    assert share == 0
    assert differ > 200


def test_a_value_beyond_the_jump_is_wrong():
    x = torch.zeros(64)
    assert settled(torch.relu, x, lambda x, own, seed: seed)[0] == 0
    assert settled(torch.relu, x, lambda x, own, seed: -seed)[0] == 64


@pytest.mark.parametrize("refusal", [ValueError, AssertionError, IndexError])
def test_without_a_point_next_to_the_arguments_nothing_is_settled(refusal):
    def refuses(x):
        if not bool((x == 0).all()):
            raise refusal("zeros alone")
        return x * 1

    assert settled(refuses, torch.zeros(5), lambda x, own, seed: own + 1) == (5, 0.0)


def test_a_lack_of_memory_is_no_refusal():
    def lacks(x):
        if not bool((x == 0).all()):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return x * 1

    with pytest.raises(RuntimeError, match="allocate memory"):
        settled(lacks, torch.zeros(5), lambda x, own, seed: own + 1)


def test_no_jump_is_looked_for_next_to_float8():
    problem = JudgeProblem("it", lambda x, scale: torch.relu(x), lambda x, scale: torch.relu(x))
    args = torch.zeros(8), torch.ones(3).to(torch.float8_e4m3fn)
    assert gradient_jumps(problem, args, [torch.ones(8)]) == []
