"""The parts of a recorded call: lists of tensors, what is detached, and what autograd did not record."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from shiplap.dispatch import autograd, second_derivative
from shiplap.dispatch.adopt import (
    Adoption,
    _as_leaf,
    _flatten_nested,
    _in_form_of,
    _is_function_class,
    _kernel_by_name,
    _requires_gradient,
)
from shiplap.dispatch.second_derivative import AutogradGapTracker
from tests.test_plan import spec_of

V, N = Float[Tensor, "n"], Int64[Tensor, "n"]
A, B, C = (torch.full((2,), float(i)) for i in range(3))
LEAF = torch.ones(2, requires_grad=True)


def same(one: object, other: object) -> bool:
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one is other or (not isinstance(one, Tensor) and one == other)


def test_lists_are_flattened_and_nested_again():
    assert same(autograd._flatten_lists((A, [B, C], (), 3)), (A, B, C, 3))
    assert same(autograd._nest_lists((A, B, C, 3), [None, 2, 0, None]), (A, [B, C], [], 3))
    assert same(autograd._nest_lists((A, B), None), (A, B))
    assert same(autograd._nest_results((A, B), []), (A, B))
    assert same(autograd._nest_results((A, B), [[2]]), [A, B])
    assert same(autograd._nest_results((A, B), [[None, 1]]), (A, [B]))
    assert same(list(autograd._tensors_in_lists((A, [B, 1], (C,), None))), [A, B, C])
    one, two = SimpleNamespace(made=(1,)), SimpleNamespace(made=(1, 2))
    assert same(autograd._flatten_traced_results(one, [A, B]), ((A, B), [2]))
    assert same(autograd._flatten_traced_results(one, A), ((A,), [None]))
    assert same(autograd._flatten_traced_results(two, (A, [B])), ((A, B), [None, 1]))


def test_tensors_are_stored_in_one_list():
    flat: list[Tensor] = []
    slots = [autograd._store_tensors(flat, value) for value in (A, 3, [B, C], (), A)]
    assert slots == [0, None, [1, 2], [], 3]
    assert same(flat, [A, B, C, A])
    assert same([autograd._load_tensors(tuple(flat), slot) for slot in slots], [A, None, [B, C], [], A])


def test_gradients_of_the_members_that_need_one():
    assert same([autograd._gradient_per_member(g, True) for g in (A, None)], [A, None])
    assert same([autograd._gradient_per_member(g, [True, False]) for g in (A, None)], [[None, None]] * 2)
    assert same(autograd._gradient_per_member([A, B], [True, False]), [A, None])


def test_the_outputs_before_what_was_written():
    assert autograd._first_outputs((A, B), 0) is None
    assert autograd._first_outputs((A, B), 1) is A
    assert autograd._first_outputs(A, 1) is A
    assert same(autograd._first_outputs((A, B, C), 2), (A, B))
    assert same(autograd._results_at((A, B, C), [0, 2]), [A, C])
    assert same(autograd._results_at(A, [0]), [A])


def test_results_that_are_declared_without_a_gradient():
    def f(x: V) -> tuple[V, V]: ...
    def one(x: V) -> V: ...

    spec, tracked = spec_of(f, outputs=("a", "b"), nondifferentiable=("b",)), LEAF * 2
    first, second = autograd.detach_results(spec, (tracked, tracked))
    assert (first is tracked, second.requires_grad) == (True, False)
    assert autograd.detach_results(spec_of(one), tracked) is tracked
    assert not autograd.detach_results(spec_of(one, nondifferentiable=("out",)), tracked).requires_grad
    assert autograd.detach_results(spec, None) is None
    assert autograd._detached_positions(spec) == [1]


def test_arguments_that_are_detached_before_a_call():
    def f(x: V, y: V, *, z: list[V]) -> V: ...

    seen: list[object] = []

    def record(keys, *args, **kwargs):
        return seen.append((args, kwargs))

    def graded(**declared):
        seen.clear()
        call = autograd._detach_arguments(spec_of(f, **declared), record)
        call(None, LEAF, LEAF, z=[LEAF])
        call(None, LEAF, y=LEAF, z=[LEAF])
        return [[v.requires_grad for v in (*args, *([k["y"]] if "y" in k else []), *k["z"])] for args, k in seen]

    assert graded(nondifferentiable=("y",)) == [[True, False, True]] * 2
    assert graded(nondifferentiable=("z", "x")) == [[False, True, False]] * 2
    assert graded(nondifferentiable=("out",)) == [[False] * 3] * 2


def test_declarations_that_carry_gradients():
    def plain(x: V) -> V: ...
    def integers(x: V) -> N: ...
    def of_integers(x: N) -> Float[Tensor, "n"]: ...
    def any_dtype(x: Shaped[Tensor, "n"]) -> Shaped[Tensor, "n"]: ...
    def written(x: V, k: N) -> N: ...
    def numbers(x: V) -> int: ...

    specs = [spec_of(f) for f in (plain, integers, any_dtype, numbers)]
    assert [autograd.carries_gradients(s) for s in specs] == [True, False, True, False]
    assert [autograd.floating_outputs(s) for s in specs] == [True, False, True, False]
    detached = spec_of(plain, nondifferentiable=("out",))
    assert [autograd.floating_outputs(detached, d) for d in (False, True)] == [False, True]
    assert not autograd.carries_gradients(detached)
    assert [autograd.carries_gradients(spec_of(written, mutates=m)) for m in ((), ("x",), ("k",))] == [
        False,
        True,
        False,
    ]


# --- what autograd did not record -------------------------------------------------------------------------------------


def test_names_of_functions_that_write():
    writes = ("__setitem__", "__set__", "add_", "__iadd__", "__ior__")
    assert all(map(second_derivative._writes_in_place, writes))
    assert not any(map(second_derivative._writes_in_place, ("add", "__add__", "__index__", "__get__", "")))
    names = map(
        second_derivative._torch_function_name, (torch.add, Tensor.add_, torch.ops.aten.add.Tensor, Tensor.T.__get__)
    )
    assert list(names) == ["add", "add_", "aten::add.Tensor", "T"]


def test_tensors_anywhere_in_a_value():
    value = {"a": A, "b": [B, {"c": (C, "text", b"bytes", 3, None)}]}
    assert same(list(second_derivative._tensors_in_nested(value)), [A, B, C])
    assert same(list(second_derivative._tensors_in_nested(value.values())), [A, B, C])
    integers = torch.zeros(2, dtype=torch.int64)
    kinds = (A, integers, A.to(torch.complex64), A.half())
    assert [second_derivative.is_real_or_complex(t) for t in kinds] == [True, False, True, True]
    rest = iter([A, None])
    assert same(second_derivative._replace_floating([B, integers, C, None], rest), [A, None, None, None])


def test_the_derivative_of_a_formula():
    made = second_derivative._pull_back(lambda x, y: (x * 3, y.detach()), [LEAF, A], [B, C])
    assert made is not None
    assert same([g if g is None else g.tolist() for g in made], [[3.0, 3.0], None])
    graded = second_derivative._pull_back(lambda x: (x**3,), [LEAF], [torch.ones(2)])
    assert graded is not None
    assert graded[0].requires_grad
    assert second_derivative._pull_back(lambda x: (x.detach(),), [LEAF], [A]) is None
    assert second_derivative._pull_back(lambda x: (x, x), [LEAF], [A]) is None


@pytest.mark.parametrize(
    ("make", "gap"),
    [
        (lambda x: x * 2, ""),
        (lambda x: x.detach() * 2, "detach(), whose result autograd does not follow"),
        (lambda x: torch.ones_like(x), ""),
        (lambda x: torch.zeros(2), ""),
        (lambda x: torch.zeros(2).copy_(x), ""),
        (lambda x: torch.zeros(2).copy_(x.detach()), "detach(), whose result autograd does not follow"),
        (lambda x: torch.full((2,), x.sum().item()), "item() of a tensor with a gradient"),
        (lambda x: torch.tensor(x.tolist()), "tolist() of a tensor with a gradient"),
        (lambda x: (x > 0).float() * x, ""),
        (lambda x: A, "the gradient of 'x', which is made by code that autograd does not record"),
    ],
)
def test_a_watch_finds_what_autograd_did_not_record(make, gap):
    watch = AutogradGapTracker([])
    with watch:
        result = {"x": make(LEAF), "y": 3}
    assert watch.gap(result, SimpleNamespace(x=True, y=True), [LEAF]) == gap
    assert watch.gap(result, SimpleNamespace(x=False, y=True), [LEAF]) == ""


def test_a_watch_begins_with_what_is_lost():
    watch = AutogradGapTracker([(A, "saved.a")])
    with watch:
        lost, found = A * LEAF, B * LEAF
    needs = SimpleNamespace(x=True)
    assert [watch.gap({"x": t}, needs, [LEAF]) for t in (A, lost, found)] == ["saved.a", "saved.a", ""]
    assert [watch.is_lost(t) for t in (A, lost, found, B)] == [True, True, False, False]
    assert watch.gap({"x": B}, needs, []) == ""


# --- implementations that are taken over ------------------------------------------------------------------------------


def test_values_of_a_source_as_leaves():
    made = _as_leaf([LEAF * 2, (A, 3), torch.zeros(1, dtype=torch.int32), A.to(torch.complex64)])
    flat = _flatten_nested(made)
    assert [t.requires_grad and t.is_leaf if isinstance(t, Tensor) else t for t in flat] == [True, True, 3, False, True]
    assert [_requires_gradient(v) for v in (LEAF, A, 3)] == [True, False, False]
    found = iter([B, C])
    assert same(_in_form_of([LEAF, (A, LEAF), 3], found), [B, [None, C], None])


def test_what_was_taken_over_in_words():
    made = Adoption("lib::f", ("kernel on cpu",), ("gradient: none",))
    assert str(made) == "from lib::f:\n  taken  kernel on cpu\n  left   gradient: none"
    assert [_is_function_class(v) for v in (torch.autograd.Function, object, torch.relu)] == [True, False, False]


def test_a_source_is_called_by_position_without_gradients():
    def two(x: V, k: int) -> tuple[V, V]: ...
    def one(x: V, k: int) -> list[V]: ...

    seen: list[object] = []

    def source(*args):
        seen.append((*args, torch.is_grad_enabled()))
        return [A, B]

    with torch.enable_grad():
        assert same(_kernel_by_name(spec_of(two), source)(k=3, x=C), (A, B))
        assert same(_kernel_by_name(spec_of(one), source)(x=C, k=3), [A, B])
    assert same(seen, [(C, 3, False)] * 2)
