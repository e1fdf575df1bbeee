"""Calls past the dispatcher: the same results, and nobody who has to see a call misses it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import shiplap as sl
from shiplap.dispatch import tuned_choices
from shiplap.dispatch.eager_fast_path import compile_fast_path, fast_path_source
from shiplap_testing.support import fails


@pytest.fixture
def scaled(ns):
    """An op with a Python kernel, its route as if it were a GPU's, and what went to the dispatcher or was picked."""

    @sl.op(f"{ns}::scaled")
    def op(
        x: Float[Tensor, "n c"],
        w: Float[Tensor, "c"] | None = None,
        k: int = 2,
        by: list[int] = [1, 2],  # noqa: B006
        on: bool = True,
    ) -> Float[Tensor, "n c"]:
        y = x * (k * sum(by)) if on else x.clone()
        return y if w is None else y * w

    @op.kernel("cpu", workspace="4 * n")
    def _(x, w, k, by, on, *, out, workspace):
        assert workspace.numel() == 4 * x.shape[0]
        out.copy_(op.reference(x, w, k, by, on))

    seen: list[str] = []
    pick, op.pick = op.pick, lambda call: (seen.append("picked"), pick(call))[1]
    route = compile_fast_path(op, "cpu")
    assert route is not None
    dispatcher = route.__globals__["dispatcher"]
    route.__globals__["dispatcher"] = lambda *args: (seen.append("dispatched"), dispatcher(*args))[1]
    return op, route, seen


X, W = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(4.0)


def test_equal_calls_are_checked_and_chosen_once(scaled):
    op, route, seen = scaled
    for k in (2, 2, 5, 5):
        assert torch.equal(route(X, W, k), op.reference(X, W, k, [1, 2], True))
    assert seen == ["picked", "picked"]
    assert torch.equal(route(X[:2], None, 2, [3], False), X[:2])
    assert torch.equal(route(X.t(), None), X.t() * 6)  # same sizes are not the same layout
    assert torch.equal(route(X.double(), W.double()), X.double() * 6 * W.double())
    assert seen == ["picked"] * 5


def test_what_is_remembered_goes_with_what_it_was_chosen_among(scaled):
    op, route, seen = scaled
    route(X)
    op.kernel("cpu", lambda x, w, k, by, on: torch.zeros_like(x), name="other")
    assert torch.equal(route(X), torch.zeros(3, 4))
    assert seen == ["picked", "picked"]


def test_kernels_that_look_at_values_are_asked_at_every_call(scaled):
    op, route, seen = scaled
    asked: list[float] = []

    def positive(x):
        asked.append(float(x[0, 0]))
        return asked[-1] > 0 or "negative"

    def ones(x, w, k, by, on, *, out):
        out.fill_(1)

    op.kernel("cpu", ones, name="ones", supports=positive)
    plus, minus = torch.full((3, 4), 2.0), torch.full((3, 4), -2.0)
    for x in (plus, plus, minus, plus, minus):
        assert torch.equal(route(x), torch.ones(3, 4) if x is plus else x * 6)
    assert set(asked) == {2.0, -2.0}
    assert seen.count("picked") == 3  # of equal calls the first, and those of which a kernel says something else
    seen.clear()
    assert torch.equal(route(plus, None, 3), torch.ones(3, 4))  # what is remembered of one call is not another's
    assert seen == ["picked"]


def test_a_recorder_sees_every_call(scaled, monkeypatch):
    _, route, _ = scaled
    calls: list[object] = []
    monkeypatch.setattr(tuned_choices, "observer", lambda op, call: calls.append(call))
    monkeypatch.setattr(tuned_choices, "active", True)
    for _ in range(3):
        route(X)
    assert len(calls) == 3


def test_no_tensor_is_kept(scaled):
    _, route, _ = scaled
    x = torch.randn(5, 4)
    gone = [weakref.ref(x), weakref.ref(route(x)), weakref.ref(route(x))]
    del x
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


class Marked(Tensor):
    pass


NEGATIVE = torch.randn(3, 4, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize(
    "args",
    [
        (X.as_subclass(Marked),),
        (NEGATIVE,),
        (torch._efficientzerotensor(3, 4),),
        (X, None, True),
        (X, None, 2, (1, 2)),
        (X, None, 2, [True, 2]),
        (X, None, 2, []),
        (X.to("meta"),),
    ],
    ids=["subclass", "negated", "no memory", "bool for int", "tuple", "bool in a list", "empty list", "device"],
)
def test_unusual_arguments_are_the_dispatchers(scaled, args):
    op, route, seen = scaled
    got = route(*args)
    assert seen[:1] == (["dispatched"] if args[3:] != ([],) else ["picked"])
    if got.device.type == "cpu":
        assert torch.equal(got, op.reference(*args, *(None, 2, [1, 2], True)[len(args) - 1 :]))


@pytest.mark.parametrize("args", [(X, W[:3]), (X.long(),), (X, None, 2, [1.5]), (X[0],), (X, None, 2**70)])
def test_what_is_wrong_is_said_in_the_same_words(scaled, args):
    op, route, _ = scaled
    told = []
    for way in (op.direct, route):
        op.direct = way
        with pytest.raises((sl.ShiplapError, RuntimeError, TypeError)) as caught:
            op(*args)
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_modes_and_profilers_see_the_op(scaled):
    _, route, seen = scaled
    route(X)
    names: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    for mode in (Functions, Dispatch):
        names.clear()
        with mode():
            route(X)
        assert any("scaled" in name for name in names), mode
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        route(X)
    assert any("scaled" in event.key for event in profile.key_averages())
    with FakeTensorMode() as mode:
        assert type(route(mode.from_tensor(X))).__name__ == "FakeTensor"
    assert torch.equal(torch.func.vmap(route)(X[None]), (X * 6)[None])
    assert seen[1:].count("dispatched") >= 4
    seen.clear()
    with torch.inference_mode():
        assert torch.equal(route(X), X * 6)
    assert seen == []


def test_gradients_past_the_dispatcher_are_those_behind_it(scaled):
    op, route, _ = scaled

    @op.backward(saves=("x", "w"))
    def _(grad, saved, needs):
        whole = grad * (saved.k * sum(saved.by)) if saved.on else grad
        return {"x": whole * saved.w, "w": (whole * saved.x).sum(0) if needs.w else None}

    op.direct = route
    for w in (W, W.clone().requires_grad_()):
        results = []
        for call in (op, op.overload):
            x = X.clone().requires_grad_()
            results.append(
                torch.autograd.grad(call(x, w, 3, [2], True).square().sum(), [x, *([w] if w.requires_grad else [])])
            )
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_ops_that_have_no_route(ns, scaled):
    @sl.op(f"{ns}::mutates", mutates=("x",))
    def mutates(x: Float[Tensor, "n"]) -> None:
        x.zero_()

    @sl.op(f"{ns}::conjugates")
    def conjugates(x: Complex[Tensor, "n"]) -> Complex[Tensor, "n"]:
        return x * 2

    for op in (mutates, conjugates):
        op.kernel("cpu", op.reference, name="python")
        assert compile_fast_path(op, "cpu") is None
    assert "is_cuda" in fast_path_source(scaled[0].spec, "cuda", True)
    with fails("SL201"):
        scaled[1](X[0])


def test_arguments_may_be_named_as_builtins_are(ns):
    @sl.op(f"{ns}::named")
    def op(x: Float[Tensor, "n c"], type: float = 1.0, map: int = 1) -> Float[Tensor, "n c"]:
        return x * type * map

    @op.kernel("cpu")
    def _(x, type, map, *, out):
        torch.mul(x, type * map, out=out)

    route = compile_fast_path(op, "cpu") or op  # there is no route, or a right one
    assert torch.equal(route(X, 2.0, 3), X * 6)
