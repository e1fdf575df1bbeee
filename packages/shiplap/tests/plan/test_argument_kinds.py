"""Which arguments of a call have which names, and what its error recommends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from shiplap.declare.annotation import read_argument
from shiplap.plan.argument_kinds import (
    ABSENT_FIX,
    arrange_arguments,
    fix_of_value_for_number,
    is_array,
    kind_of_number,
    number_check,
)
from shiplap.plan.value_for_tensor import fix_of_value_for_tensor
from shiplap_testing.support import fails
from tests.test_plan import plan_of, spec_of

V = Float[Tensor, "n"]


def f(x: V, k: int, by: float = 1.0, *, eps: float, mode: str = "a") -> V: ...


def first(xs: list[V], k: int) -> V: ...


SPEC = spec_of(f)


@pytest.mark.parametrize(
    ("args", "kwargs", "values"),
    [
        ((1, 2), {"eps": 3}, {"x": 1, "k": 2, "eps": 3}),
        ((1, 2, 3), {"eps": 4, "mode": 5}, {"x": 1, "k": 2, "by": 3, "eps": 4, "mode": 5}),
        ((1,), {"k": 2, "by": 3, "eps": 4}, {"x": 1, "k": 2, "by": 3, "eps": 4}),
        ((), {"x": 1, "k": 2, "eps": 3}, {"x": 1, "k": 2, "eps": 3}),
    ],
)
def test_arguments_have_the_names_of_the_signature(args, kwargs, values):
    assert arrange_arguments(SPEC, "schema", args, kwargs) == values


@pytest.mark.parametrize(
    ("args", "kwargs", "got", "fix"),
    [
        ((1, 2), {}, "missing a required argument: 'eps'", "pass eps as well"),
        ((), {"eps": 1}, "missing a required argument: 'x'", "pass x as well"),
        (
            ([1, 2],),
            {},
            "missing a required argument: 'k'",
            "to pass the items of one list as arguments, write op(*values)",
        ),
        (([1, 2],), {"eps": 1}, "missing a required argument: 'k'", "pass k as well"),
        (([1, 2], 3), {}, "missing a required argument: 'eps'", "pass eps as well"),
        ((1, 2), {"x": 1, "eps": 1}, "multiple values for argument 'x'", "pass x once, by position or as x="),
        ((1,), {"x": 1}, "multiple values for argument 'x'", "pass x once, by position or as x="),
        ((1, 2, 3, 4), {}, "too many positional arguments", "pass eps by its name, as in eps=..."),
        (
            (1, 2, 3, 4),
            {"eps": 1},
            "too many positional arguments",
            "pass the arguments that 'expected' lists, each once",
        ),
        ((1, 2), {"eps": 1, "mod": 2}, "an unexpected keyword argument 'mod'", "write mode= in place of mod="),
        ((1, 2), {"eps": 1, "xx": 2}, "an unexpected keyword argument 'xx'", "remove xx=, or write the name that"),
    ],
)
def test_arguments_that_do_not_fit_the_signature(args, kwargs, got, fix):
    with fails("SL209", where="plan::op", got=got, expected="schema") as caught:
        arrange_arguments(SPEC, "schema", args, kwargs)
    assert caught.value.what == "the arguments do not fit the signature"
    assert caught.value.fix.startswith(fix)


def test_too_many_arguments_of_an_op_without_keywords():
    def two(x: V, k: int) -> V: ...

    with fails("SL209", got="too many positional arguments"):
        arrange_arguments(spec_of(two), "schema", (1, 2, 3), {})
    assert arrange_arguments(spec_of(two), "schema", (1, 2), {}) == {"x": 1, "k": 2}
    with fails("SL209", got="missing a required argument: 'k'", fix="pass k as well"):
        arrange_arguments(spec_of(first), "schema", ([1, 2],), {})


def test_the_kind_of_numbers():
    kinds = {int: "int", list[float]: "float", list[int]: "int", V: "", list[V]: "", str: "str"}
    assert [kind_of_number(read_argument("k", a, "")) for a in kinds] == list(kinds.values())
    assert [is_array(v) for v in (np.ones(1), np.ones(()), np.float32(1), [1])] == [True, False, False, False]
    assert number_check(spec_of(texts)) is None


def texts(x: V, mode: str, flags: list[str]) -> V: ...


GRADED = torch.ones(1, requires_grad=True)


@pytest.mark.parametrize("recorded", [False, True])
def test_numbers_that_carry_a_gradient(recorded):
    check = number_check(spec_of(numbers), recorded=recorded)
    assert check is not None
    for args, name in (((1, GRADED), "k"), ((1, 2, [0.5, GRADED]), "ks"), ((1, 2, [], GRADED), "v")):
        with fails("SL220", where=f"plan::op, argument {name!r}", got="a tensor that requires a gradient"):
            check(args, {})
        with torch.no_grad():
            if recorded:
                with fails("SL220"):
                    check(args, {})
            elif name != "k":
                check(args, {})
    with fails("SL220", where="plan::op, argument 'v'"):
        check((1, 2, [0.5]), {"v": GRADED})
    for wrong in (torch.ones(()), torch.ones((), dtype=torch.complex64), np.float32(0.5), np.ones(1)):
        with fails("SL209", where="plan::op, argument 'k'"):
            check((1, wrong), {})
    check((1, torch.ones((), dtype=torch.int32), [torch.ones(()), 1, None], np.float32(1)), {})
    check((1, np.int64(3), (0.5,), torch.ones(())), {})


def numbers(x: V, k: int, ks: list[float], v: float | int) -> V: ...


@pytest.mark.parametrize(
    ("annotation", "value", "fix"),
    [
        (str, 1, ""),
        (V, 1, ""),
        (int, "a", ""),
        (int, 0.5, "pass an int: write // in place of /"),
        (int, float("nan"), ""),
        (int, np.float32(2), "pass an int: write // in place of /"),
        (float, np.float32(2), "pass a number of Python, such as float(v) of the value v"),
        (float, 0.5j, ""),
        (float, np.complex64(1j), ""),
        (complex, np.complex64(1j), "pass a number of Python, such as complex(v) of the value v"),
        (int | float, np.int64(1), "pass a number of Python, such as v.item() of the value v"),
        (int, torch.ones(2), "pass a number, such as t.item() of a tensor t with one element. If k is to be several"),
        (int, np.ones(2), "pass a number, such as a.item() of an array a with one element. If k is to be several"),
        (list[int], torch.ones(2), "pass a list of numbers, such as v.long().tolist() of the Tensor v"),
        (list[int], torch.ones(2, 2).int(), "pass a list of numbers, such as v.reshape(-1).tolist() of the Tensor v"),
        (list[int], np.ones(2), "pass a list of numbers, such as v.astype(int).tolist() of the ndarray v"),
        (list[int], np.ones(2, "uint8"), "pass a list of numbers, such as v.tolist() of the ndarray v"),
        (list[float], np.ones((1, 2)), "pass a list of numbers, such as v.reshape(-1).tolist() of the ndarray v"),
        (list[float], torch.ones(2), "pass a list of numbers, such as v.tolist() of the Tensor v"),
        (list[int], 10**30, ""),
    ],
)
def test_the_fix_for_a_value_that_is_no_number(annotation, value, fix):
    found = fix_of_value_for_number(read_argument("k", annotation, ""), value)
    assert found.startswith(fix)
    assert bool(found) is bool(fix)


def test_the_fix_for_no_tensor():
    arg = SPEC.args[0]
    assert fix_of_value_for_tensor(SPEC, arg, {"x": None}) == ABSENT_FIX
    assert fix_of_value_for_tensor(SPEC, arg, {"x": "text"}) == "pass a tensor as x"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_call_that_torch_refused_is_explained():
    def op(x: V, sizes: list[int], xs: list[Float[Tensor, "m"]]) -> V: ...

    plan, x = plan_of(op), torch.zeros(3)
    assert plan.misfit((x, [1], [x]), {}) is None
    found = plan.misfit((x, [0.5], [x]), {})
    assert found is not None
    assert (found.id, found.where, found.got) == ("SL209", "plan::op, argument 'sizes'", "float in a list")
    for args, where in (
        ((x.to_sparse(), [1], [x]), "argument 'x'"),
        ((x, [1], [x, x.to_sparse()]), "argument 'xs[1]'"),
    ):
        found = plan.misfit(args, {})
        assert found is not None
        assert (found.id, found.where) == ("SL207", f"plan::op, {where}")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for args, where in (((nested, [1], [x]), "argument 'x'"), ((x, [1], [x, nested]), "argument 'xs[1]'")):
        found = plan.misfit(args, {})
        assert found is not None
        assert (found.id, found.where) == ("SL207", f"plan::op, {where}")
