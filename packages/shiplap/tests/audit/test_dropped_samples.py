"""Samples that a builder, a reference, a kernel or the machine leaves out: none of them leaves the word *proven*."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import Bool, Float, Float16, Float32, Int32, Int64, Num, Shaped, UInt8
from torch import Tensor

import shiplap as sl
from shiplap.audit import audit
from shiplap.errors import error
from shiplap.sampling.admitted_axes import admits_beyond, admits_large
from shiplap.sampling.samples import Samples

NO_MEMORY = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"


def plus(ns: str, kernel: Callable[[Tensor], Tensor], refuse: Callable[[Tensor], Any] = lambda x: None) -> sl.Op:
    """Return an op of float32 that adds one. ``refuse`` may raise an error in the reference."""

    @sl.op(f"{ns}::plus")
    def plus(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        refuse(x)
        return x + 1

    plus.kernel("cpu", kernel)
    return plus


def beyond(count: int, e: Exception) -> Callable[[Tensor], None]:
    def refuse(x: Tensor) -> None:
        if x.numel() > count:
            raise e

    return refuse


def half_unknown(ns):
    @sl.op(f"{ns}::widened")
    def widened(x: Float16[Tensor, "n"] | Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        if x.dtype == torch.float16:
            raise RuntimeError("\"add\" not implemented for 'Half'")
        return x.float() + 1

    return widened


def numbers(ns, kernel, whole=True):
    @sl.op(f"{ns}::numbers")
    def numbers(x: Num[Tensor, "n"]) -> Num[Tensor, "n"]:
        if not whole and not (x.is_floating_point() or x.is_complex()):
            raise TypeError("no integers")
        return x + 1

    numbers.kernel("cpu", kernel)
    return numbers


def anything(ns):
    @sl.op(f"{ns}::anything")
    def anything(x: Shaped[Tensor, "n"]) -> Shaped[Tensor, "n"]:
        return x + 1

    anything.kernel("cpu", lambda x: x + 1 if x.is_floating_point() else x.clone())
    return anything


def named(ns, known):
    @sl.op(f"{ns}::named")
    def named(x: Float32[Tensor, "n"], how: str = "one") -> Float32[Tensor, "n"]:
        return x + known[how]

    named.kernel("cpu", lambda x, how: x + 1)
    return named


def chosen(ns):
    @sl.op(f"{ns}::chosen")
    def chosen(x: Float32[Tensor, "n"], how: str = "one") -> Float32[Tensor, "n"]:
        if how not in ("one", "two"):
            raise ValueError(how)
        return x + (2 if how == "two" else 1)

    chosen.kernel("cpu", lambda x, how: x + 1)
    return chosen


class WithoutMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(NO_MEMORY)


def square(ns):
    @sl.op(f"{ns}::square")
    def square(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return WithoutMemory.apply(x)

    square.kernel("cpu", lambda x: x * x)
    square.backward(lambda grad, saved, needs: {"x": grad * saved.x * 2})
    return square


def keeps_results(ns):
    kept: dict[int, Tensor] = {}
    return plus(ns, lambda x: kept.setdefault(len(x), x + 1).clone())


def refuse_unusual(x):
    if x.numel() and not float(x.abs().max()) < 100:
        raise error("SL205", where="plus", got="a large number", expected="a small one")
    return x + 1


def build_short(rng, sizes, dtype, device):
    if sizes["n"] > 5000:
        raise ValueError("too long")
    return (torch.randn(sizes["n"], generator=rng),)


def build_cut(rng, sizes, dtype, device):
    return (torch.randn(min(sizes["n"], 5000), generator=rng),)


def build_alike(rng, sizes, dtype, device):
    return (torch.arange(sizes["n"], dtype=dtype),)


# Name → the op, the check, the builder of samples, and the reason that the verdict names.
INCOMPLETE: dict[str, tuple[Callable[[str], sl.Op], str, Any, str]] = {
    "a reference without the other dtype": (half_unknown, "numerics", None, "narrow the declaration's dtypes"),
    "a reference without integers": (
        lambda ns: numbers(ns, lambda x: x + 1, whole=False),
        "numerics",
        None,
        "no sample has int",
    ),
    "a builder that refuses large samples": (
        lambda ns: plus(ns, lambda x: x + 1),
        "sizes",
        build_short,
        "the builder of samples makes none",
    ),
    "a builder of short tensors": (
        lambda ns: plus(ns, lambda x: x + 1),
        "sizes",
        build_cut,
        "the builder of samples makes none",
    ),
    "a builder of the same values": (keeps_results, "determinism", build_alike, "the same values for each seed"),
    "a reference without memory": (
        lambda ns: plus(ns, lambda x: x + 1, beyond(5000, MemoryError("12 GiB"))),
        "sizes",
        None,
        "the machine lacks it",
    ),
    "a reference without memory for some values": (
        lambda ns: plus(ns, lambda x: x + 1, lambda x: beyond(0, RuntimeError(NO_MEMORY))(x[x != x])),
        "special",
        None,
        "the machine lacks it",
    ),
    "a gradient without memory": (square, "gradient", None, "the machine lacks it"),
    "no further thread": (
        lambda ns: plus(ns, lambda x: beyond(0, RuntimeError("can't start new thread"))(x)),
        "numerics",
        None,
        "starts no further thread",
    ),
    "a text without choices": (lambda ns: named(ns, {"one": 1}), "numerics", None, "scalar x value is untouched"),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_samples_that_are_left_out_make_the_verdict_incomplete(ns, name):
    make, check, builder, reason = INCOMPLETE[name]
    report = audit(make(ns), checks=[check], seed=1, isolate=False, samples=builder)
    assert report.verdict == "incomplete", report.headline
    assert reason in report.headline


# Name → the op, the check that has to fail, and a part of its evidence.
FAILED: dict[str, tuple[Callable[[str], sl.Op], str, str]] = {
    "integers of any number": (
        lambda ns: numbers(ns, lambda x: x + 1 if x.is_floating_point() or x.is_complex() else x.clone()),
        "numerics",
        "differ",
    ),
    "integers of any dtype": (anything, "numerics", "differ"),
    "another known text": (chosen, "numerics", "exactly those with how = 'two'"),
    "a kernel that refuses values": (
        lambda ns: plus(ns, refuse_unusual),
        "special",
        "the kernel refuses this input with SL205",
    ),
    "a reference that refuses sizes": (
        lambda ns: plus(ns, lambda x: x + 1, beyond(64, ValueError("too long"))),
        "sizes",
        "the declaration admits this input, and the reference raised",
    ),
}


@pytest.mark.parametrize("name", FAILED)
def test_a_fault_in_samples_that_were_left_out_is_found(ns, name):
    make, check, evidence = FAILED[name]
    report = audit(make(ns), checks=[check], seed=1, isolate=False)
    assert report.failed == (check,), report.headline
    assert evidence in report.findings[0].evidence


# Dtypes of an argument → those for which a kernel may be wrong alone.
UNIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "two integers": (UInt8[Tensor, "n"] | Bool[Tensor, "n"], ("uint8", "bool")),
    "integers": (Bool[Tensor, "n"] | UInt8[Tensor, "n"] | Int32[Tensor, "n"], ("bool", "uint8", "int32")),
    "floats": (Bool[Tensor, "n"] | Int64[Tensor, "n"] | Float32[Tensor, "n"], ("bool", "int64", "float32")),
    "any": (Shaped[Tensor, "n"], ("bool", "int16", "float16", "complex64")),
}


@pytest.mark.parametrize(
    ("kind", "wrong", "builder"),
    [(k, w, b) for k, (_, names) in UNIONS.items() for w in names for b in (False, True) if k != "any" or not b],
)
def test_a_kernel_that_is_wrong_for_one_dtype_is_found(ns: str, kind: str, wrong: str, builder: bool) -> None:
    """No sample of an argument that may be bool was bool, and none of any dtype complex."""

    def selected(x, mask):
        return torch.where(mask != 0, x, 0)

    selected.__annotations__ = {"x": Float32[Tensor, "n"], "mask": UNIONS[kind][0], "return": Float32[Tensor, "n"]}
    op = sl.op(f"{ns}::selected", autocast=None)(selected)
    op.kernel("cpu", lambda x, mask: torch.where(mask != 0, x, 1 if str(mask.dtype) == f"torch.{wrong}" else 0))
    if builder:

        @op.samples
        def _(rng, sizes, dtype, device):
            return torch.randn(sizes["n"], generator=rng), torch.randint(0, 2, (sizes["n"],), generator=rng) > 0

    report = audit(op, checks=("numerics", "special"), seed=1, isolate=False)
    missing = f"no sample has {wrong}" in report.headline or "dtype x value is untouched" in report.headline
    assert report.failed or (builder and missing), report.headline


def test_a_declaration_of_any_dtype_need_not_mean_bool(ns: str) -> None:
    @sl.op(f"{ns}::twice")
    def twice(x: Shaped[Tensor, "n"]) -> Shaped[Tensor, "n"]:
        return x * 2

    assert audit(twice, checks=("numerics", "special", "fake"), seed=1, isolate=False).proven


def test_a_reference_without_bool_is_named(ns: str) -> None:
    @sl.op(f"{ns}::negated")
    def negated(x: Bool[Tensor, "n"] | UInt8[Tensor, "n"] | Int32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return (-x).float()

    report = audit(negated, checks=("numerics",), seed=1, isolate=False)
    assert report.verdict == "incomplete", report.headline
    assert "no sample has bool: narrow the declaration's dtypes" in report.headline


def test_a_position_beyond_several_rounds_is_tried(ns: str) -> None:
    """The only such position was a multiple of the size of the first sample."""

    @sl.op(f"{ns}::turned", requires=("w >= 1", "position >= 0", "position <= 1000"))
    def turned(x: Float32[Tensor, "w c"], position: int = 0) -> Float32[Tensor, "w c"]:
        return torch.roll(x, -position, 0)

    @turned.kernel("cpu")
    def _(x, position):
        start = position - len(x) if position >= len(x) else position
        return torch.cat([x[start:], x[:start]])

    assert audit(turned, checks=("special",), seed=1, isolate=False).failed == ("special",)


def test_what_a_declaration_admits_is_told_from_what_it_refuses(ns):
    @sl.op(f"{ns}::table", requires=("k <= 48", "m % 96 == 0"))
    def table(x: Float32[Tensor, "n k m"]) -> Float32[Tensor, "n k m"]:
        return x * 2

    samples = Samples(table, 1)
    assert not admits_beyond(samples, "k", 64)
    assert admits_beyond(samples, "k", 40)
    assert admits_beyond(samples, "m", 64)
    assert admits_large(samples)


def test_a_builder_of_floating_point_numbers_serves_numbers_of_each_kind(ns: str) -> None:
    """A builder is asked for floating-point numbers alone, so that no integer of ``Num`` was tried."""
    wrong = numbers(ns, lambda x: x + 1 if x.is_floating_point() or x.is_complex() else x + 2)
    right = numbers(f"{ns}b", lambda x: x + 1)
    for op in (wrong, right):

        @op.samples
        def _(rng, sizes, dtype, device):
            return (torch.randn(sizes["n"], generator=rng, dtype=dtype),)

    assert audit(wrong, checks=("numerics",), seed=1, isolate=False).verdict == "failed"
    assert audit(right, checks=("numerics",), seed=1, isolate=False).proven
    made = [case.args[0] for case in Samples(right, 1).dtypes()]
    assert {torch.int64, torch.int8, torch.uint8} <= {t.dtype for t in made}
    assert all(len({*t.tolist()}) > 2 for t in made)


def test_a_builder_is_not_blamed_for_results_that_are_too_large(ns: str) -> None:
    @sl.op(f"{ns}::pairs")
    def pairs(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n n"]:
        return x[:, None] * x

    @pairs.samples
    def _(rng, sizes, dtype, device):
        return (torch.randn(sizes["n"], generator=rng),)

    report = audit(pairs, checks=("sizes",), seed=1, isolate=False)
    assert report.proven, report.headline
    (cell,) = [c for c in report.ledger if str(c) == "large size x value"]
    assert (cell.state, cell.reason) == ("does not apply", "the results for such a tensor are too large to be made")


def test_a_builder_that_makes_no_large_tensor_is_named_though_results_soon_get_too_large(ns: str) -> None:
    """65,537 rows of 4,096 numbers would be too large a result, and 17 rows are a large tensor."""

    @sl.op(f"{ns}::wide")
    def wide(x: Float32[Tensor, "n 4096"]) -> Float32[Tensor, "n 4096"]:
        return x * 2

    @wide.samples
    def _(rng, sizes, dtype, device):
        return (torch.randn(min(sizes["n"], 10), 4096, generator=rng),)

    assert admits_large(Samples(wide, 1))
    report = audit(wide, checks=("sizes",), seed=1, isolate=False)
    assert report.verdict == "incomplete", report.headline
