"""A gradient of a gradient is right, or refused by name: eagerly, by torch.func, forward over reverse."""

from __future__ import annotations

import warnings

import pytest
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

import shiplap as sl
from shiplap.declare.annotation import read_argument
from shiplap.dispatch.second_derivative import _fake_tensors
from shiplap_testing.support import fails

V = Float[Tensor, "n"]


def declare(ns, name, reference, backward, **keywords):
    op = sl.op(f"{ns}::{name}")(reference)
    op.backward(**keywords)(backward)
    return op


def exponential(x: V) -> V:
    return x.exp()


def detached(grad, saved, needs):
    return {"x": grad * saved.x.detach().exp()}


def without_gradients(grad, saved, needs):
    with torch.no_grad():
        factor = saved.x.exp()
    return {"x": grad * factor}


def written_to(grad, saved, needs):
    out = torch.empty_like(grad)
    with torch.no_grad():
        out[:] = grad * saved.x.exp()
    return {"x": out}


def by_numbers(grad, saved, needs):
    return {"x": grad * torch.tensor(saved.x.exp().tolist(), dtype=grad.dtype)}


def by_data(grad, saved, needs):
    return {"x": grad * saved.x.data.exp()}


def by_result(grad, saved, needs):
    return {"x": grad * saved.out}


def in_place(grad, saved, needs):
    return {"x": torch.empty_like(grad).copy_(grad).mul_(saved.out)}


def transformed(grad, saved, needs):
    return {"x": torch.func.vjp(torch.exp, saved.x)[1](grad)[0]}


def second(f, way):
    """The gradient of a function of the gradient of ``f``, by one of several ways."""
    x = torch.tensor([0.3, -0.2, 0.7], dtype=torch.float64)

    def total(t):
        return f(t).pow(3).sum()

    def penalty(gradient, t):
        return gradient.square().sum() + t.pow(3).sum()

    if way in ("create_graph", "ones"):
        x.requires_grad_()
        (g,) = torch.autograd.grad(f(x).sum() if way == "ones" else total(x), x, create_graph=True)
        return torch.autograd.grad(penalty(g, x), x)[0]
    if way == "mixed":
        x.requires_grad_()
        return torch.autograd.grad(penalty(torch.func.grad(total)(x), x), x)[0]
    if way == "func":
        return torch.func.grad(lambda t: penalty(torch.func.grad(total)(t), t))(x)
    return {"hessian": torch.func.hessian, "reverse": lambda f: torch.func.jacrev(torch.func.jacrev(f))}[way](total)(x)


WAYS = ("create_graph", "ones", "mixed", "func", "hessian", "reverse")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "backward", [detached, without_gradients, written_to, by_data, by_result, in_place, transformed]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_second_derivative_is_right(ns, backward, way):
    op = declare(ns, "f", exponential, backward)
    torch.testing.assert_close(second(op, way), second(torch.exp, way))


@pytest.mark.filterwarnings("ignore::shiplap.ShiplapNotice")
def test_numbers_taken_out_of_a_tensor(ns):
    op = declare(ns, "f", exponential, by_numbers)
    torch.testing.assert_close(second(op, "create_graph"), second(torch.exp, "create_graph"))


def test_the_reference_says_that_it_serves(ns):
    op = declare(ns, "f", exponential, detached)
    with pytest.warns(sl.ShiplapNotice, match=r"its reference gives the derivatives of its gradient .* detach\(\)"):
        second(op, "create_graph")
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        x = torch.ones(3, requires_grad=True)
        declare(ns, "g", exponential, detached)(x).sum().backward()
    assert not any("gives the derivatives" in str(each.message) for each in messages), "the first is the author's"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_author_says_once(ns, way):
    op = declare(ns, "f", exponential, by_result, once_differentiable=True)
    with fails("SL313", where=f"{ns}::f, its backward", got="declared once_differentiable=True"):
        second(op, way)


def test_once_is_refused_where_it_is_asked_for_and_not_before(ns):
    op = declare(ns, "f", exponential, by_result, once_differentiable=True)
    x = torch.ones(3, requires_grad=True)
    (g,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    torch.testing.assert_close(g, x.exp())
    torch.testing.assert_close(torch.func.grad(lambda t: op(t).sum())(torch.ones(3)), torch.ones(3).exp())
    with fails("SL313"):
        g.sum().backward()


def test_an_author_says_that_it_is_right(ns):
    op = declare(ns, "f", exponential, detached, once_differentiable=False)
    assert not torch.allclose(second(op, "create_graph"), second(torch.exp, "create_graph")), "taken as it is"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_gradient_op_without_a_gradient(ns, way):
    @sl.op(f"{ns}::times")
    def times(g: V, y: V) -> V:
        return g * y

    op = declare(ns, "f", exponential, lambda grad, saved, needs: {"x": times(grad, saved.out)})
    with fails("SL313", where=f"{ns}::f, its backward", got=f"{ns}::times, which has no backward"):
        second(op, way)
    kept = declare(ns, "g", exponential, lambda grad, saved, needs: {"x": times(grad, saved.x.exp())})
    torch.testing.assert_close(second(kept, way), second(torch.exp, way))


def test_a_gradient_declared_as_an_op(ns):
    @sl.op(f"{ns}::f")
    def f(x: V) -> V:
        return x.exp()

    @sl.op(f"{ns}::f_grad")
    def f_grad(grad: V, x: V) -> V:
        return grad * x.exp()

    f.backward(f_grad, once_differentiable=True)
    with fails("SL313"):
        second(f, "create_graph")


def sine(ns, name, backward, **keywords):
    @sl.op(f"{ns}::{name}", outputs=("out", "slope"), nondifferentiable="slope")
    def op(x: V) -> tuple[V, V]:
        return x.sin(), x.cos().detach()

    op.backward(**keywords)(backward)
    return lambda x: op(x)[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_saved_result_that_carries_no_gradient(ns, way):
    """It is a constant for autograd: with the argument beside it the derivative is the reference's, else refused."""
    alone = sine(ns, "alone", lambda grads, saved, needs: {"x": grads[0] * saved.slope})
    with fails("SL313", got="saved.slope, which carries no gradient"):
        second(alone, way)
    beside = sine(ns, "beside", lambda grads, saved, needs: {"x": grads[0] * saved.slope}, saves=("x", "slope"))
    torch.testing.assert_close(second(beside, way), second(torch.sin, way))


@pytest.mark.parametrize("once", [None, True])
def test_an_error_that_would_not_reach_the_argument_is_raised_at_once(ns, once):
    """Only the gradient that comes in is tracked, and it does not depend on x."""
    op = sine(ns, "alone", lambda grads, saved, needs: {"x": grads[0] * saved.slope}, once_differentiable=once)
    x, g = torch.ones(2, 3, dtype=torch.float64, requires_grad=True).unbind(0)
    with fails("SL313"):
        torch.autograd.grad(op(x), x, g, create_graph=True)


@pytest.mark.parametrize(("kind", "dtype"), [(Shaped, torch.float32), (Float, torch.float32), (Int64, torch.int64)])
def test_the_arguments_of_the_search_for_constants(kind, dtype):
    arg = read_argument("x", kind[Tensor, "n"], "demo::f")
    made, (member,) = _fake_tensors(arg, (2,)), _fake_tensors(arg, [(3,)])
    assert (made.dtype, made.shape, made.requires_grad) == (dtype, (2,), dtype.is_floating_point)
    assert member.shape == (3,)
    assert _fake_tensors(arg, None) is None


def test_a_result_that_is_a_constant_by_nature(ns):
    """The mask of a dropout depends on no value: nothing is refused."""

    @sl.op(f"{ns}::dropout", random="global", outputs=("out", "kept"), nondifferentiable="kept")
    def dropout(x: V, p: float = 0.5) -> tuple[V, V]:
        kept = (torch.rand_like(x) >= p).to(x.dtype) / (1 - p)
        return x * kept, kept

    dropout.backward(lambda grads, saved, needs: {"x": grads[0] * saved.kept})
    assert dropout.gradient.saves == ("kept",)
    x = torch.ones(20, dtype=torch.float64, requires_grad=True)
    out, kept = dropout(x)
    (g,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], 6 * x * kept**3)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lists_optionals_and_several_arguments(ns):
    @sl.op(f"{ns}::f")
    def f(xs: list[V], w: V, b: V | None = None) -> V:
        out = sum(x.sin() for x in xs) * w
        return out if b is None else out + b

    @f.backward
    def _(grad, saved, needs):
        with torch.no_grad():
            slopes = [x.cos() for x in saved.xs]
        total = sum(x.sin() for x in saved.xs)
        return {"xs": [grad * s * saved.w for s in slopes], "w": grad * total, "b": grad}

    assert f.gradient.saves == ("xs", "w")
    x, w, b = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    assert torch.autograd.gradcheck(lambda x, w, b: f([x, x * w], w, b), (x, w, b))
    with fails("SL313"):  # b was not saved, so the reference cannot be run
        torch.autograd.gradgradcheck(lambda x, w, b: f([x, x * w], w, b), (x, w, b))
    assert f([x], w).requires_grad


@pytest.mark.filterwarnings("ignore::shiplap.ShiplapNotice")
def test_third_derivatives(ns):
    op = declare(ns, "f", exponential, detached)
    x = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    value = op(x)
    for _ in range(3):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    torch.testing.assert_close(value, x.exp())
