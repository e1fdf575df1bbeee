"""gradient: autograd through the reference is the law, where it is not the derivative of the reference's values."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.audit.check import Observation
from shiplap.audit.checks.gradient import DECLINED, observe_gradient
from shiplap.dispatch import Op
from shiplap.sampling.samples import Samples


class Doubled(torch.autograd.Function):
    """The identity, with twice its gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad


def _through(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + (x.round() - x).detach()


def _frozen(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    with torch.no_grad():
        scale = x.square().sum() + 1
    return x / scale


def _doubled(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return Doubled.apply(x) * 1


REFERENCES = {
    "through": (_through, lambda x, grad: grad),
    "frozen": (_frozen, lambda x, grad: grad / (x.square().sum() + 1)),
    "doubled": (_doubled, lambda x, grad: 2 * grad),  # a wrong backward inside the reference is declared all the same
}


def _observe(op: Op) -> Observation:
    """Return what the check sees on one sample in float64."""
    samples = Samples(op, 1, "cpu")
    case = samples.make(samples.base.but(dtypes={"Float": "float64"}))
    assert case is not None
    return observe_gradient(op, case)


def _declare(ns: str, name: str, factor: float) -> Op:
    """Return an op with the reference ``name``, whose backward is that of its autograd, multiplied by ``factor``."""
    reference, derivative = REFERENCES[name]
    op = sl.op(f"{ns}::{name}")(reference)

    @op.backward
    def _(grad, saved, needs):
        return {"x": derivative(saved.x, grad) * factor}

    return op


@pytest.mark.parametrize("name", REFERENCES)
def test_a_gradient_that_the_reference_stops_or_changes_is_its_autograd(ns, name):
    seen = _observe(_declare(ns, name, 1))
    assert (seen.problem, seen.skip, seen.note) == ("", "", DECLINED)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_wrong_backward_of_such_a_reference_is_found(ns, name):
    """Half of the gradient of ``doubled`` is the derivative of its values, and wrong all the same."""
    assert _observe(_declare(ns, name, 0.5)).problem.startswith("leaf inputs, gradients of x: d/dx")


@pytest.mark.parametrize("factor", [0, 1])
def test_an_argument_whose_gradient_is_stopped_has_a_gradient_of_zero(ns, factor):
    @sl.op(f"{ns}::shifted")
    def shifted(x: Float[Tensor, "n"], by: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + by.detach()

    @shifted.backward
    def _(grad, saved, needs):
        return {"x": grad, "by": grad * factor}

    seen = _observe(shifted)
    assert ("d/dby is not zero" in seen.problem) == bool(factor)
    assert bool(seen.problem) == bool(factor)
    assert not seen.skip


def test_gradients_of_finite_differences_are_still_compared_elsewhere(ns):
    @sl.op(f"{ns}::squared")
    def squared(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x.square()

    @squared.backward
    def _(grad, saved, needs):
        return {"x": 2 * saved.x * grad}

    seen = _observe(squared)
    assert (seen.problem, seen.skip, seen.note) == ("", "", "")
