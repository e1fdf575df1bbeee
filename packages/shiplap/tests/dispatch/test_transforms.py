"""torch.func and forward-mode AD: an op differentiates as the operations of its reference do, nested and compiled."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree

import shiplap as sl
from shiplap_testing.effort import sampled
from shiplap_testing.support import fails

V = Float[Tensor, "n"]


@pytest.fixture
def power(ns):
    @sl.op(f"{ns}::power")
    def power(x: V, *, p: float = 3.0) -> V:
        return x**p

    @power.kernel("cpu")
    def _(x, p, *, out):
        torch.pow(x, p, out=out)

    @power.backward
    def _(grad, saved, needs):
        return {"x": grad * saved.p * power(saved.x, p=saved.p - 1)}

    return power


@pytest.fixture
def x():
    return torch.rand(5, dtype=torch.float64) + 0.5


def total(f):
    return lambda x: f(x).sum()


def recorded_outside(f, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(grad(total(f))(leaf).sum(), leaf)


def dual(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))).tangent


def dual_recorded(f, x):
    leaf = x.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(leaf, x.cos()))).tangent
        return torch.autograd.grad(tangent.sum(), leaf)


CASES = {
    "grad": lambda f, x: grad(total(f))(x),
    "vjp": lambda f, x: vjp(f, x)[1](x.cos()),
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),)),
    "vmap": lambda f, x: vmap(f)(torch.stack([x, 2 * x])),
    "a gradient a sample": lambda f, x: vmap(grad(total(f)))(torch.stack([x, 2 * x])),
    "vmap inside": lambda f, x: grad(lambda x: vmap(f)(torch.stack([x, 2 * x])).sum())(x),
    "twice": lambda f, x: grad(lambda x: grad(total(f))(x).sin().sum())(x),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(total(f))(x),
    "forward over reverse": lambda f, x: jvp(grad(total(f)), (x,), (x.cos(),)),
    "reverse over forward": lambda f, x: grad(lambda x: jvp(f, (x,), (x.cos(),))[1].sum())(x),
    "autograd around grad": recorded_outside,
    "dual": dual,
    "dual and recorded": dual_recorded,
}


@pytest.mark.parametrize("case", CASES)
def test_a_transform_sees_the_operations_of_the_reference(power, x, case):
    want = _pytree.tree_leaves(CASES[case](lambda x: x**3, x))
    for f in (power, lambda x: power(x, p=3.0), power.overload):
        got = _pytree.tree_leaves(CASES[case](f, x))
        for a, e in zip(got, want, strict=True):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("case", sampled(["grad", "jvp", "a gradient a sample", "twice"], 2))
@pytest.mark.usefixtures("fresh_compiler")
def test_in_compiled_code(power, x, case):
    compiled = torch.compile(lambda x: CASES[case](power, x), backend="aot_eager", fullgraph=True)
    for a, e in zip(_pytree.tree_leaves(compiled(x)), _pytree.tree_leaves(CASES[case](lambda x: x**3, x)), strict=True):
        torch.testing.assert_close(a, e)


def test_the_declared_gradient_is_what_runs(ns, x):
    """Reverse mode calls the declaration, a wrong one too; a tangent is the reference's."""

    @sl.op(f"{ns}::wrong")
    def wrong(x: V) -> V:
        return x * 2

    @wrong.backward(saves=[])
    def _(grad, saved, needs):
        return {"x": grad * 5}

    assert grad(total(wrong))(x).tolist() == [5.0] * 5
    assert jvp(wrong, (x,), (torch.ones_like(x),))[1].tolist() == [2.0] * 5


def test_lists_and_optionals(ns, x):
    @sl.op(f"{ns}::weigh")
    def weigh(xs: list[V], weights: list[float], bias: V | None = None) -> V:
        out = sum(w * x for w, x in zip(weights, xs, strict=True))
        return out if bias is None else out + bias

    @weigh.backward(saves=[])
    def _(grad, saved, needs):
        return {"xs": [grad * w for w in saved.weights], "bias": grad if needs.bias else None}

    def first(f):
        return lambda a: f([a, x], [2.0, 3.0])

    def second(f):
        return lambda a: f((x, a), [2.0, 3.0], a)

    for call in (first, second):
        for transform in (lambda f: grad(total(f))(x), lambda f: jvp(f, (x,), (x.cos(),))[1]):
            torch.testing.assert_close(transform(call(weigh)), transform(call(weigh.reference)))


def test_an_op_without_a_gradient_says_so(ns, x):
    @sl.op(f"{ns}::plain")
    def plain(x: V) -> V:
        return x * 2

    with fails("SL304"):
        grad(total(plain))(x)
    assert jvp(plain, (x,), (torch.ones_like(x),))[1].tolist() == [2.0] * 5


def test_bad_input_is_an_error_of_the_op(power, x):
    with fails("SL201"):
        jvp(power, (x[None],), (x[None],))
