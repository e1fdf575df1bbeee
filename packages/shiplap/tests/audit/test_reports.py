"""Kinds of defects that the benchmark of public reports (``benchmarks/defects``) showed the audit to miss."""

import pytest
import torch
from jaxtyping import Float, Float16, Float32
from torch import Tensor

import shiplap as sl
from shiplap.audit.checks import gradient, special
from shiplap.sampling.samples import Samples

M = Float32[Tensor, "n c"]
both = pytest.mark.parametrize("wrong", [True, False])


def problem(op, kind):
    """Return the problem that ``special`` sees on its samples of one kind of values."""
    cases = [c for c in Samples(op, 0).special() if c.recipe.values == kind]
    assert cases
    return next((p for c in cases if (p := special.CHECK.observe(op, c).problem)), "")


@both
def test_a_maximum_that_starts_above_all_scores(ns, wrong):
    @sl.op(f"{ns}::softmax")
    def softmax(x: M) -> M:
        return torch.softmax(x, -1)

    @softmax.kernel("cpu")
    def _(x):
        high = x.amax(-1, keepdim=True).clamp_min(-5e4 if wrong else -torch.inf)
        scores = (x - high).exp()
        return scores / scores.sum(-1, keepdim=True)

    assert bool(problem(softmax, "sunk")) == wrong


@both
def test_small_results_that_no_large_ones_hide(ns, wrong):
    @sl.op(f"{ns}::softplus")
    def softplus(x: M) -> M:
        return torch.logaddexp(x, torch.zeros_like(x))

    @softplus.kernel("cpu")
    def _(x):
        y = (-x.abs()).exp()
        return x.clamp_min(0) + ((1 + y).log() if wrong else y.log1p())

    assert bool(problem(softplus, "low")) == wrong


@both
def test_a_nan_beside_masked_places(ns, wrong):
    @sl.op(f"{ns}::safe")
    def safe(x: M) -> M:
        return torch.where(x.isneginf().all(-1, keepdim=True), 0.0, torch.softmax(x, -1))

    @safe.kernel("cpu")
    def _(x):
        empty = torch.where(x.isnan() & wrong, -torch.inf, x).amax(-1, keepdim=True) == -torch.inf
        return torch.where(empty, 0.0, torch.softmax(x, -1))

    assert bool(problem(safe, "masked nan")) == wrong
    assert not problem(safe, "masked")


@both
def test_a_sum_that_overflows_where_the_mean_does_not(ns, wrong):
    @sl.op(f"{ns}::mean")
    def mean(x: Float16[Tensor, "n c"]) -> Float16[Tensor, "n"]:
        return x.mean(-1, dtype=torch.float32).to(x.dtype)

    @mean.kernel("cpu")
    def _(x):
        return (x.sum(-1, dtype=torch.float16 if wrong else torch.float32) / x.shape[1]).to(x.dtype)

    assert bool(problem(mean, "sunk")) == wrong  # near -32752


def declare_divergence(ns, *, zeros):
    @sl.op(f"{ns}::divergence")
    def divergence(p: Float[Tensor, "n c"], q: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
        return ((torch.xlogy(p, p) if zeros else p * p.log()) - p * q).sum(-1)

    @divergence.samples
    def _(rng, sizes, dtype, device):
        drawn = torch.randn(2, sizes["n"], sizes["c"], generator=rng)
        return drawn[0].softmax(-1).to(dtype), drawn[1].to(dtype)

    return divergence


@both
def test_zeros_among_the_numbers_of_a_builder(ns, wrong):
    op = declare_divergence(ns, zeros=True)

    @op.kernel("cpu")
    def _(p, q):
        return ((p * p.log() if wrong else torch.xlogy(p, p)) - p * q).sum(-1)

    assert bool(problem(op, "mostly zero")) == wrong


def test_a_builder_decides_where_the_reference_takes_no_zeros(ns):
    op = declare_divergence(ns, zeros=False)
    op.kernel("cpu", lambda p, q: (torch.xlogy(p, p) - p * q).sum(-1))
    case = next(c for c in Samples(op, 0).special() if c.recipe.values == "mostly zero")
    assert special.CHECK.observe(op, case).skip.startswith("the reference takes no zeros")


@pytest.mark.parametrize("power", [0, 2])
def test_long_gradients_are_compared_unless_their_cost_grows(ns, monkeypatch, power):
    @sl.op(f"{ns}::square")
    def square(x: M) -> M:
        return x * x

    samples, now = Samples(square, 0), [0.0]
    monkeypatch.setattr(gradient.time, "process_time", lambda: now[0])
    sizes = [65, 1025, 4096]
    cases = [c for n in sizes for c in samples._resized({"n": n})]
    seen = []
    for case in gradient._cases_while_quick(cases):
        n = dict(case.recipe.sizes)["n"]
        seen.append(n)
        now[0] += 0.03 + (1e-6 * n**power if power else 0)  # what each sample costs, and what grows
    assert seen == (sizes if power == 0 else [65, 1025])


def test_a_probability_has_another_value_than_its_default(ns):
    @sl.op(f"{ns}::dropped", requires=("0 <= p", "p < 1"))
    def dropped(x: M, p: float = 0.5) -> M:
        return x * (1 - p)

    assert {dict(c.recipe.scalars)["p"] for c in Samples(dropped, 0).scalars()} == {0.5, 0.25}
