"""A number that is a tensor with a gradient is refused in every way of a call: torch would detach it without a word."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.support import fails

V = Float[Tensor, "n"]


def on_dual_numbers(f, x, w):
    return torch.func.jvp(lambda w: f(x, w), (w.detach(),), (torch.ones(()),))


def under_autocast(f, x, w):
    with torch.autocast("cpu"):
        return f(x, w)


WAYS = {
    "positional": lambda f, x, w: f(x, w),
    "keyword": lambda f, x, w: f(x, s=w),
    "keyword only": lambda f, x, w: f(x, t=w),
    "integer": lambda f, x, w: f(x, 2.0, w),
    "torch.ops": lambda f, x, w: f.overload(x, w),
    "raw": lambda f, x, w: f.below_autograd(x, w),
    "out": lambda f, x, w: f.out(x.detach(), w, out=torch.empty(3)),
    "func": lambda f, x, w: torch.func.grad(lambda w: f(x, w).sum())(w.detach()),
    "func beside": lambda f, x, w: torch.func.grad(lambda x: f(x, w).sum())(x.detach()),
    "jvp": on_dual_numbers,
    "autocast": under_autocast,
    "fx": lambda f, x, w: torch.fx.symbolic_trace(lambda x, w: f(x, w))(x, w),
    "compiled": lambda f, x, w: torch.compile(lambda x, w: f(x, w) * 2, backend="aot_eager")(x, w),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_number_with_a_gradient(ns, way, graded):
    @sl.op(f"{ns}::f")
    def f(x: V, s: float = 2.0, k: int = 1, *, t: float = 1.0) -> V:
        return x * s * k * t

    @f.backward
    def _(grad, saved, needs):
        return {"x": grad * saved.s * saved.k * saved.t}

    argument = {"keyword only": "t", "integer": "k"}.get(way, "s")
    x, w = torch.ones(3, requires_grad=graded), torch.tensor(3.0, requires_grad=True)
    with fails("SL220", where=f"{ns}::f, argument {argument!r}", got="a tensor that requires a gradient"):
        WAYS[way](f, x, w)
    assert f(x, w.detach()).tolist() == [3.0] * 3
    with torch.no_grad():
        assert f(x, w).tolist() == [3.0] * 3, "nothing is lost"


def test_in_lists_and_of_ops_that_write(ns):
    @sl.op(f"{ns}::listed")
    def listed(x: V, s: list[float]) -> V:
        return x * s[0]

    @sl.op(f"{ns}::lists")
    def lists(xs: list[V], s: float = 1.0) -> V:
        return xs[0] * s

    @sl.op(f"{ns}::writes", mutates=["x"])
    def writes(x: V, s: float) -> None:
        x.mul_(s)

    @sl.op(f"{ns}::plain")
    def plain(x: V, s: float) -> V:
        return x * s

    plain.backward(lambda grad, saved, needs: {"x": grad * saved.s})
    listed.backward(lambda grad, saved, needs: {"x": grad * saved.s[0]})
    w = torch.tensor(3.0, requires_grad=True)
    for x in (torch.ones(3), torch.ones(3, requires_grad=True)):
        for call in (lambda x=x: listed(x, [w]), lambda x=x: lists([x], w), lambda x=x: writes(x.detach(), w)):
            with fails("SL220"):
                call()
