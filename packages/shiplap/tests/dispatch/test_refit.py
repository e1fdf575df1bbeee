"""What functions return for equal calls: taken as it is where it is as the first one, else made to fit or refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from jaxtyping import Float, Int32
from torch import Tensor

import shiplap as sl
from shiplap.dispatch.eager_fast_path import compile_fast_path
from shiplap.dispatch.refit import can_refit_outputs


@pytest.fixture
def kept(ns):
    """An op whose result has a size that depends on data, its route as if it were a GPU's, and what a kernel returns.

    ``given`` has, for calls to come, what the kernel returns in place of the right result.
    """

    @sl.op(f"{ns}::kept", bounds={"m": "n"})
    def op(x: Int32[Tensor, "n"], least: int) -> tuple[Int32[Tensor, "m"], Int32[Tensor, "m 2"]]:
        chosen = x[x >= least]
        return chosen.clone(), torch.stack([chosen, -chosen], 1)

    given: list[object] = []
    picked: list[object] = []

    @op.kernel("cpu")
    def _(x, least):
        return given.pop() if given else op.reference(x, least)

    pick, op.pick = op.pick, lambda call: (picked.append(None), pick(call))[1]
    route = compile_fast_path(op, "cpu")
    assert route is not None
    return op, route, given, picked


X = torch.tensor([3, 1, 2], dtype=torch.int32)


def same(got, want) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_equal_calls_are_checked_once_whatever_their_sizes(kept):
    op, route, given, picked = kept
    for x in (X, X - 5, X + 5, X * 0):
        assert same(route(x, 2), op.reference(x, 2))
    assert len(picked) == 1
    right = op.reference(X, 2)
    given.append(right)
    got = route(X, 2)
    assert got[0].data_ptr() == right[0].data_ptr(), "no copy of what fits"


def test_what_does_not_fit_is_made_to(kept):
    op, route, given, _ = kept
    route(X, 2)
    first, second = op.reference(X, 2)
    given.append((first, torch.stack([second[:, 0], second[:, 1]]).t()))  # not contiguous
    got = route(X, 2)
    assert same(got, (first, second))
    assert got[1].is_contiguous()
    given.append((X, torch.stack([X, -X], 1)))  # the argument itself
    got = route(X, 0)
    given.append((X, torch.stack([X, -X], 1)))
    got = route(X, 0)
    assert got[0].data_ptr() != X.data_ptr()
    both = torch.stack([X, -X], 1)
    given.append((both[:, 0], both))
    got = route(X, 0)
    assert got[0].untyped_storage().data_ptr() != got[1].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("wrong", "id"),
    [
        (lambda first, second: (first.long(), second), "SL301"),
        (lambda first, second: (first, second[:1]), "SL301"),
        (lambda first, second: (first,), "SL301"),
        (lambda first, second: (first, None), "SL301"),
        (lambda first, second: (first.repeat(2), second.repeat(2, 1)), "SL302"),
        (lambda first, second: (first[None], second), "SL301"),
    ],
)
def test_what_cannot_fit_is_refused_as_at_first(kept, wrong, id):
    op, route, given, _ = kept
    route(X, 2)
    given.append(wrong(*op.reference(X, 2)))
    with pytest.raises(sl.ShiplapError, match=id):
        route(X, 2)
    assert same(route(X, 2), op.reference(X, 2))


def test_no_tensor_of_a_call_is_kept(kept):
    _, route, _, _ = kept
    x = X.clone()
    gone = [weakref.ref(x), *map(weakref.ref, route(x, 2))]
    del x
    gc.collect()
    assert [r() for r in gone] == [None] * 3


def test_calls_that_gradients_may_see_are_not_remembered(ns):
    @sl.op(f"{ns}::some", bounds={"m": "n"})
    def some(x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
        return x[x > 0]

    @sl.op(f"{ns}::twice", bounds={"m": "n"})
    def twice(x: Int32[Tensor, "n"]) -> tuple[Int32[Tensor, "m"], Int32[Tensor, "2*m"]]:
        return x[x > 0], torch.cat([x[x > 0]] * 2)

    @sl.op(f"{ns}::all")
    def every(x: Int32[Tensor, "n"]) -> Int32[Tensor, "n"]:
        return x.clone()

    assert [can_refit_outputs(op.spec) for op in (some, twice, every)] == [False, False, True]
