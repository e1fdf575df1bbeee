"""A number that is a tensor with a gradient is refused in every way of a call: torch would detach it without a word."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
import torch
from jaxtyping import Float, Float32
from torch import Tensor

import shiplap as sl
from shiplap import torch_private
from shiplap_testing.effort import sampled
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
@pytest.mark.parametrize("way", sampled(WAYS, 6))
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


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("torch.ops", "raw", "fx")])
def test_on_a_torch_without_a_run_the_op_itself_refuses(ns, way, monkeypatch):
    monkeypatch.setattr(torch_private, "verified_on", lambda release: frozenset())

    @sl.op(f"{ns}::f")
    def f(x: V, s: float = 2.0, k: int = 1, *, t: float = 1.0) -> V:
        return x * s * k * t

    assert not hasattr(f.overload._op, "plain"), "torch's own"
    x, w = torch.ones(3), torch.tensor(3.0, requires_grad=True)
    with fails("SL220"):
        WAYS[way](f, x, w)


INTEGER_WAYS = {
    "keyword": lambda f, x, k: f(x, k=k),
    "positional": lambda f, x, k: f(x, k),
    "recorded": lambda f, x, k: f(x.clone().requires_grad_(), k),
    "list": lambda f, x, k: f(x, 1, [k, 2]),
    "a list that is a tensor": lambda f, x, k: f(x, 1, k[None]),
    "optional": lambda f, x, k: f(x, o=k),
    "out": lambda f, x, k: f.out(x, k, out=torch.empty(2)),
    "compiled": lambda f, x, k: torch.compile(lambda x, k: f(x, k) * 2, backend="aot_eager")(x, k),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", INTEGER_WAYS)
def test_a_tensor_of_floats_is_no_int(ns, way):
    """The dispatcher would cut off the fraction of 1.5, while it refuses the number 1.5."""

    @sl.op(f"{ns}::f")
    def f(x: V, k: int = 1, ks: list[int] = [1], o: int | None = None) -> V:  # noqa: B006
        return x * k * ks[0] * (o or 1)

    x = torch.ones(2)
    advice = ".long().tolist()" if way == "a list that is a tensor" else "int(t)"
    with fails("SL209", "a tensor of torch.float32", advice):
        INTEGER_WAYS[way](f, x, torch.tensor(1.5))
    with pytest.raises((sl.ShiplapError, RuntimeError)):
        f(x, 1.5)
    if way != "list":  # in a list, torch takes no tensor
        expected = 4.0 if way == "compiled" else 2.0
        assert INTEGER_WAYS[way](f, x, torch.tensor(2)).tolist() == [expected] * 2


def test_plain_numbers_of_a_list_are_checked_at_once(ns):
    """A check of each of them alone takes as long as the launch of a small kernel, in every call of an op."""

    @sl.op(f"{ns}::f")
    def f(x: V, ks: list[int]) -> V:
        return x * len(ks)

    def calls_in_check(ks):
        calls = []
        sys.setprofile(lambda frame, event, arg: calls.append(event))
        f.plan.numbers((torch.ones(2), ks), {})
        sys.setprofile(None)
        return len(calls)

    assert calls_in_check([1] * 50) == calls_in_check([1])
    for odd in (torch.tensor(1.5), np.float64(1.5), np.array(1.5)):
        with fails("SL209"):
            f(torch.ones(2), [1, odd])


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_positional_tensor_of_floats_in_native_code_is_cut_off_as_by_torchs_own_operators(ns, tmp_path, monkeypatch):
    """docs/language.md names this limit: a test of the types would be a noticeable part of a native call."""
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))

    @sl.op(f"{ns}::f")
    def f(x: Float32[Tensor, "n"], k: int = 1) -> Float32[Tensor, "n"]:
        return x * k

    code = """int f(const sl_context*, const DLTensor* x, DLTensor* out, int64_t k) {
      for (int64_t i = 0; i < x->shape[0]; i++) ((float*)out->data)[i] = ((float*)x->data)[i] * (float)k;
      return SL_OK;
    }"""
    f.kernel("cpu", sl.source(symbol="f", code=code, language="c++"))
    f.build()
    assert f.native is not None
    x = torch.ones(2)
    assert f(x, torch.tensor(1.5)).tolist() == [1.0] * 2
    assert torch.ops.aten.topk(torch.arange(4.0), torch.tensor(1.5))[0].tolist() == [3.0], "torch does the same"
    with fails("SL209"):
        f(x, k=torch.tensor(1.5))
