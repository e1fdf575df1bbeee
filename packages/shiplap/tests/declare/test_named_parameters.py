"""Functions of an author are called by the names of their parameters, whatever the order in which these stand."""

from functools import partial

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.declare.named_parameters import bind_names
from shiplap_testing.support import fails

V = Float[Tensor, "n"]
X, Y = torch.full((3,), 5.0), torch.full((3,), 2.0)


@pytest.fixture
def minus(ns):
    @sl.op(f"{ns}::minus")
    def minus(x: V, y: V, by: float = 2.0) -> V:
        return x - by * y

    return minus


def swapped(y, by, x):
    return x - by * y


def swapped_into(out, by, y, x):
    out.copy_(x - by * y)


def by_keyword(*, y, x, by):
    return x - by * y


def partly(x, **rest):
    return x - rest["by"] * rest["y"]


def positional_only(by, y, x, /):
    return x - by * y


KERNELS = {f.__name__: f for f in (swapped, swapped_into, by_keyword, partly, positional_only)}
KERNELS["partial"] = partial(lambda scale, by, y, x: scale * (x - by * y), 1.0)
KERNELS["own default"] = lambda y, x, by=7.0, more=1: x - by * y * more


@pytest.mark.parametrize("name", KERNELS)
def test_arguments_reach_the_parameters_of_their_names(minus, name):
    minus.kernel("cpu", KERNELS[name])
    assert minus(X, Y).tolist() == [1, 1, 1]
    assert minus(X, Y, 1.0).tolist() == [3, 3, 3]
    assert torch.compile(lambda x, y: minus(x, y) + 1, backend="aot_eager")(X, Y).tolist() == [2, 2, 2]


def test_parameters_that_cannot_be_read_are_refused(minus):
    got, fix = "sub, whose parameters cannot be read", "write a function with named parameters that calls sub"
    with fails("SL122", got=got, expected="sub(x, y, by, *, out)", fix=fix):
        minus.kernel("cpu", torch.sub)


def test_supports_names_the_arguments_that_it_looks_at(minus):
    minus.kernel("cpu", lambda x, y, by: x * 0, name="zero", supports=lambda by, x: (by == 1.0 and len(x) > 2) or "no")
    minus.kernel("cpu", swapped, name="other", supports=lambda by: by != 1.0)
    assert minus(X, Y).tolist() == [1, 1, 1]
    assert minus(X, Y, 1.0).tolist() == [0, 0, 0]
    for wrong, got in ((lambda z: True, "nothing is called 'z'"), (lambda *a: True, "*a has no names")):
        with fails("SL122", got, where=f"{minus.spec.name}, supports= of kernel swapped"):
            minus.kernel("cpu", swapped, supports=wrong)


def test_the_gradient_is_called_by_name(minus):
    @minus.backward
    def _(needs, saved, grad):
        return {"x": grad, "y": -saved.by * grad if needs.y else None}

    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    minus(x, y).sum().backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([1, 1, 1], [-2, -2, -2])
    assert torch.func.grad(lambda x: minus(x, Y).sum())(X).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("parameters", "got"),
    [
        ("*three", "*three has no names"),
        ("grad, *rest", "*rest has no names"),
        ("ctx, grad", "nothing is called 'ctx'"),
        ("ctx, saved, needs", "nothing is called 'ctx'"),
        ("x, saved, needs", "nothing is called 'x'"),
        ("grad, kept, needs", "nothing is called 'kept'"),
        ("saved, needs", "the parameter 'grad' is missing"),
    ],
)
def test_a_gradient_of_other_names_is_refused(minus, parameters, got):
    with fails("SL110", got, expected="def _(grad, saved, needs)"):
        minus.backward(eval(f"lambda {parameters}: {{}}"))


def test_a_builder_takes_what_it_names(minus):
    minus.samples(lambda sizes, rng: (*torch.randn(2, sizes["n"], generator=rng), sizes["by"]))
    assert [f.verdict for f in sl.audit(minus, checks=("numerics",), seed=0)] == ["ok"]
    expected = "parameters among rng, sizes, dtype, device"
    with fails("SL123", "nothing is called 'size'", where=f"{minus.spec.name}, samples", expected=expected):
        minus.samples(lambda rng, size, dtype, device: ())


def test_a_parameter_that_is_required():
    def both(x, y):
        return x - y

    required = {"id": "SL123", "where": "demo::f", "required": ("y",)}
    assert bind_names(both, ("x", "y"), **required) is both
    assert bind_names(lambda x, **rest: x - rest["y"], ("x", "y"), **required)(3, 1) == 2
    with fails("SL123", "no parameter 'y'"):
        bind_names(lambda x: x, ("x", "y"), **required)
    with fails("SL123", "nothing is called 'z'"):
        bind_names(lambda x, y, z: x, ("x", "y"), **required)
