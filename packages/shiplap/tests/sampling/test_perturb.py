"""Values that nobody knows, at the price of a copy: new each time, of the same kind, and others in places."""

import pytest
import torch
from jaxtyping import Bool, Float
from torch import Tensor

import shiplap as sl
from shiplap.sampling.fresh_arguments import FreshArguments
from shiplap.sampling.perturb import perturb_arguments, swap_stretches
from shiplap.sampling.recipe import SampleRecipe


@sl.op("nudge_test::product")
def product(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    return x @ w


@sl.op("nudge_test::kept")
def kept(x: Float[Tensor, "n"], keep: Bool[Tensor, "n"]) -> Float[Tensor, "n"]:
    return torch.where(keep, x, 0)


SIZES = {"n": 64, "k": 96, "m": 32}


def fresh(op, sizes, **rest):
    return FreshArguments(op, SampleRecipe().but(sizes=sizes, dtypes={"Float": "float32"}, **rest), "cpu")


def test_values_are_new_each_time_and_normal():
    cases = fresh(product, SIZES).cases(40)
    firsts = torch.stack([c.args[0].reshape(-1) for c in cases])
    assert len({tuple(row[:4].tolist()) for row in firsts}) == 40
    assert abs(float(firsts.mean())) < 0.02
    assert float(firsts.std()) == pytest.approx(1.0, abs=0.03)
    assert float(firsts.abs().max()) > 3.0, "with tails"
    correlated = torch.corrcoef(firsts).fill_diagonal_(0).abs()
    assert float(correlated.max()) < 0.2 or int((correlated > 0.2).sum()) <= 4, "two of 40 may come near each other"


def test_nobody_gets_what_was_drawn():
    source = fresh(product, SIZES)
    drawn = source._drawn.args[0]
    for case in source.cases(20):
        rolled = case.args[0].reshape(-1)
        assert not torch.equal(rolled.sort().values, drawn.reshape(-1).sort().values)


@pytest.mark.parametrize("sizes", [{"n": 1, "k": 1, "m": 1}, {"n": 0, "k": 3, "m": 2}, {"n": 2, "k": 1, "m": 1}])
def test_few_elements_are_enough(sizes):
    cases = fresh(product, sizes).cases(3)
    assert [c.args[0].shape for c in cases] == [(sizes["n"], sizes["k"])] * 3


def test_values_that_mean_something_are_drawn():
    """Truths, other kinds of values and other layouts: nothing is known of their sums."""
    (case,) = fresh(kept, {"n": 1000}).cases(1)
    assert case.args[1].dtype == torch.bool
    assert 300 < int(case.args[1].sum()) < 700
    assert not fresh(kept, {"n": 1000})._mixes
    assert not fresh(product, SIZES, values="ties")._mixes
    assert not fresh(product, SIZES, layouts={"x": "transposed"})._mixes
    assert fresh(product, SIZES)._mixes


@pytest.mark.parametrize("change", [perturb_arguments, swap_stretches])
def test_sums_and_shapes_stay(change):
    x, whole = torch.randn(64, 96), torch.arange(9)
    got, untouched, few = change((x, whole, torch.ones(3)))
    assert untouched is whole
    assert torch.equal(few, torch.ones(3))
    assert got.shape == x.shape
    assert torch.equal(got.reshape(-1).sort().values, x.reshape(-1).sort().values)
    assert not torch.equal(got, x)


def test_sometimes_few_elements_move_and_sometimes_half():
    x = torch.randn(4096)
    moved = [int((swap_stretches((x,))[0] != x).sum()) for _ in range(60)]
    assert min(moved) < 100
    assert max(moved) > 1900
