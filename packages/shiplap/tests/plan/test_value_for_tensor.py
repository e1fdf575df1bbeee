"""A call with a number, a list or an array for a tensor: the example of each fix is executed, and passed to the op."""

import enum
import re

import numpy as np
import pytest
import torch
from jaxtyping import BFloat16, Bool, Complex, Float, Float8e4m3fn, Float16, Float32, Int8, Int32, Int64, Shaped
from torch import Tensor

import shiplap as sl
from shiplap.declare.annotation import read_argument
from shiplap.plan.value_for_tensor import _has_rank
from shiplap_testing.support import fails

SIZES = {"n": 3, "c": 2, "batch": (4, 1)}
EXAMPLE = re.compile(r"such as (.+?)(?: for the array a that|\. If | of the | of a tensor t| of an array a|$)")


def example_of(error: sl.ShiplapError, **names: object) -> object:
    """Return the value of the example in the fix of ``error``, in which ``names`` stand for the call's values."""
    found = EXAMPLE.search(error.fix)
    assert found, error.fix
    return eval(found[1], {"torch": torch, **SIZES, **names})


def declare(name, annotation, *, other=None):
    """Return an op that takes one tensor of the type ``annotation``, and a tensor ``y`` of the type ``other``."""

    def f(x, y=None):
        return x.clone()

    def g(x):
        return x.clone()

    made = g if other is None else f
    made.__annotations__ |= {"x": annotation, "return": annotation}
    if other is not None:
        f.__annotations__["y"] = other
        f.__defaults__ = ()
    return sl.op(name)(made)


def test_an_example_is_on_the_device_of_the_other_tensors(ns):
    op = declare(f"{ns}::f", Float[Tensor, "n"], other=Float[Tensor, "c"])
    for value in (2.0, [1.0, 2.0], np.ones(2, "float32"), np.ones(2)):
        with fails("SL209", "such as torch.") as caught:
            op(value, torch.ones(3, device="meta"))
        made = example_of(caught.value, values=value, a=value)
        assert (made.device.type, made.dtype) == ("meta", torch.float32)


def test_only_an_array_that_is_read_backwards_is_copied(ns):
    op, values = declare(f"{ns}::f", Float32[Tensor, "3"]), np.arange(3, dtype="float32")
    repeated = np.lib.stride_tricks.as_strided(values, (3,), (0,))
    for array, copied in ((values, False), (repeated, False), (values[::-1], True)):
        with fails("SL209", "such as torch.") as caught:
            op(array)
        assert (".copy()" in EXAMPLE.search(caught.value.fix)[1]) is copied
        assert example_of(caught.value, a=array).tolist() == array.tolist()


@pytest.mark.filterwarnings("error")
def test_advice_is_found_without_warnings_and_other_errors(ns):
    op = declare(f"{ns}::f", Complex[Tensor, "n"])
    kept = np.ones(3, "complex64")
    kept.flags.writeable = False
    for value in ([kept, kept], kept, 1.5e308 + 1.5e308j):
        with fails("SL209", "pass "):
            op(value)


NUMBERS = (3.0, 2.5, 4, True, np.float32(3), np.float64(2), np.int32(5), np.array(1.5), enum.IntEnum("E", "A").A)
FLOATS = {
    "no dims": Float[Tensor, ""],
    "one dim": Float[Tensor, "n"],
    "two dims": Float[Tensor, "n c"],
    "fixed": Float32[Tensor, "4 n"],
    "any": Float16[Tensor, "n 3"],
    "any number of dims": Float[Tensor, "*batch c"],
    "computed": Float[Tensor, "n 2*n+1"],
    "bfloat16": BFloat16[Tensor, "n c"],
    "float8": Float8e4m3fn[Tensor, "n"],
    "complex": Complex[Tensor, "n"],
    "every dtype": Shaped[Tensor, "n c"],
}


@pytest.mark.parametrize("dims", FLOATS)
@pytest.mark.parametrize("number", NUMBERS, ids=lambda v: f"{type(v).__name__} {v}")
def test_a_number_becomes_a_tensor_of_the_declared_sizes_and_dtype(ns, dims, number):
    op = declare(f"{ns}::f", FLOATS[dims])
    with fails("SL209", "pass a tensor, such as torch.", where=f"{ns}::f, argument 'x'") as caught:
        op(number)
    made = example_of(caught.value)
    assert torch.equal(op(made), made)
    assert {complex(v) for v in made.to(torch.complex128).flatten().tolist()} == {complex(number)}
    kind = "bool" if number is True else "int" if isinstance(number, (int, np.integer)) else "float"
    assert caught.value.fix.endswith(f"If x is to be a number, annotate it as x: {kind}")


WHOLE = {"int32": Int32[Tensor, "n c"], "int64": Int64[Tensor, "n"], "int8": Int8[Tensor, ""]}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_number_that_no_declared_dtype_holds_has_no_example(ns, kind):
    op = declare(f"{ns}::f", WHOLE[kind])
    for number in (2.5, 1j, 2**70, *([300] if kind == "int8" else [])):
        with fails("SL209", "pass a tensor of the type under 'expected'. If x is to be a number"):
            op(number)
    with fails("SL209", "such as torch.") as caught:
        op(7)
    assert set(op(example_of(caught.value)).flatten().tolist()) == {7}


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), 1j])
def test_a_number_whose_text_is_no_python(ns, number):
    op = declare(f"{ns}::f", Complex[Tensor, "n"])
    with fails("SL209", "such as torch.") as caught:
        op(number)
    made = op(example_of(caught.value))
    assert torch.allclose(made, torch.full_like(made, number), equal_nan=True)


def test_another_tensor_of_the_call_gives_sizes_and_dtype(ns):
    """The declared names of sizes would be known to the author of the op alone."""
    same = declare(f"{ns}::same", Float[Tensor, "n c"], other=Float[Tensor, "n c"])
    other = declare(f"{ns}::other", Float[Tensor, "n c"], other=Float[Tensor, "k"])
    mixed = declare(f"{ns}::mixed", Bool[Tensor, "n"], other=Float[Tensor, "n"])
    for op, y, example in (
        (same, torch.ones(5, 6, dtype=torch.float64), "torch.full_like(y, 2)"),
        (other, torch.ones(5, dtype=torch.float16), "torch.full((n, c), 2, dtype=torch.float16)"),
    ):
        with fails("SL209", f"pass a tensor, such as {example}. If x") as caught:
            op(2, y)
        assert set(op(example_of(caught.value, y=y), y).flatten().tolist()) == {2}
    with fails("SL209", "such as torch.full((n,), True). If x is to be a number, annotate it as x: bool") as caught:
        mixed(True, torch.ones(3))
    assert mixed(example_of(caught.value), torch.ones(3)).all()


LISTS = {
    "flat": (Float[Tensor, "n"], [1, 2, 3]),
    "nested": (Float[Tensor, "n c"], [[1.0, 2.0], (3.0, 4.0)]),
    "of integers": (Int32[Tensor, "n"], [1, 2]),
    "of bools": (Bool[Tensor, "n"], [True, False]),
    "any number of dims": (Int64[Tensor, "*batch c"], [[1, 2]]),
    "of rows": (Float[Tensor, "n c"], [torch.ones(2), torch.ones(2)]),
    "of parts": (Float[Tensor, "n c"], (torch.ones(2, 3), torch.ones(2, 3))),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_becomes_one_tensor(ns, name):
    annotation, values = LISTS[name]
    op = declare(f"{ns}::f", annotation)
    with fails("SL209", "pass one tensor, such as torch.") as caught:
        op(values)
    made = example_of(caught.value, values=values)
    assert torch.equal(op(made), made)
    assert "If x is to be a list of tensors, annotate it as x: list[" in caught.value.fix


ARRAYS = {
    "flat": (Float[Tensor, "n"], np.ones(3)),
    "float64": (Float32[Tensor, "n c"], np.ones((2, 3))),
    "backwards": (Float[Tensor, "n"], np.arange(3.0)[::-1]),
    "integers": (Int32[Tensor, "n"], np.arange(3)),
    "integers for floats": (BFloat16[Tensor, "n"], np.arange(3)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_becomes_a_tensor(ns, name):
    annotation, a = ARRAYS[name]
    op = declare(f"{ns}::f", annotation)
    with fails("SL209", "pass a tensor, such as torch.from_numpy(a") as caught:
        op(a)
    assert op(example_of(caught.value, a=a)).tolist() == a.tolist()


def test_values_of_another_rank_or_kind_have_no_example(ns):
    op = declare(f"{ns}::f", Int32[Tensor, "n c"])
    for value in ([1, 2], [], [[1.5]], [["a"]], [[1], [2, 3]], [torch.ones(2), torch.ones(3)], [torch.ones(1, 1, 1)]):
        with fails("SL209", "pass one tensor of the type under 'expected'. If x is to be a list of tensors"):
            op(value)
    for array in (np.ones(2), np.ones((2, 2)), np.array([["a"]])):
        with fails("SL209", "pass a tensor of the type under 'expected'"):
            op(array)
    for other in ("text", {}, np.str_("text")):
        with fails("SL209", "pass a tensor as x"):
            op(other)
    with fails("SL209", "If the argument may be absent, add | None to its annotation"):
        op(None)


KINDS = {
    "k": (4 / 2, np.float64(2.5), np.float32(2.5), np.array(2.5), torch.ones(2)[:1].double() * 2),
    "s": (np.ones(1), np.array([2.0])),
    "ks": (np.ones(2, "int64"), np.ones((2, 1), "int64"), np.ones(2), torch.ones(2, 2), torch.ones(2, 2).long()),
    "z": (np.array([1j]),),
    "v": (np.float32(2.5), np.int64(2), np.array(2.5), np.array([2.5]), torch.ones(())),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_value_for_a_number_has_an_example_that_the_op_takes(ns, name):
    @sl.op(f"{ns}::f")
    def f(
        x: Float32[Tensor, "n"],
        k: int = 1,
        s: float = 1.0,
        b: bool = True,
        ks: list[int] = [1],  # noqa: B006
        z: complex = 1j,
        v: int | float = 1,
    ) -> Float32[Tensor, "n"]:
        return x * 2

    for value in KINDS[name]:
        with fails("SL209") as caught:
            f(torch.ones(3), **{name: value})
        fix = caught.value.fix
        found = EXAMPLE.search(fix if "such as" in fix else fix.replace("or int(v)", "such as int(v)"))
        given = eval(found[1], dict.fromkeys("vta", value))
        assert f(torch.ones(3), **{name: given}).tolist() == [2.0] * 3
        assert not isinstance(given, complex) or name == "z"
    for value in (float("nan"), float("inf"), np.complex64(1j)):
        with fails("SL209", "pass a value of the type under 'expected'"):
            f(torch.ones(3), k=value)


def test_an_empty_text_is_named_where_nothing_else_is_wrong(ns: str) -> None:
    """Torch takes it for an empty list."""

    @sl.op(f"{ns}::shifted")
    def shifted(x: Float[Tensor, "n"], by: list[int]) -> Float[Tensor, "n"]:
        return x + sum(by)

    wrong = shifted.plan.misfit([torch.ones(2), ""], {})
    assert wrong is not None
    assert (wrong.id, wrong.got, wrong.expected) == ("SL209", "str", "list[int]")
    assert shifted.plan.misfit([torch.ones(2), []], {}) is None


@pytest.mark.parametrize(
    ("dims", "ranks"), [((), {0}), (("n",), {1}), (("*b", "n"), {1, 2, 3}), (("...",), {0, 1, 2, 3})]
)
def test_the_ranks_of_a_type(dims, ranks):
    kind = read_argument("x", Float[Tensor, " ".join(dims)], "").tensor
    assert {rank for rank in range(4) if _has_rank(kind, rank)} == ranks
