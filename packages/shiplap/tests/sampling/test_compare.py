"""close: how far a kernel may be from its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jaxtyping import Float, Float8e4m3fn
from torch import Tensor

import shiplap as sl
from shiplap.sampling import compare
from shiplap.sampling.common_factor import describe_common_factor
from shiplap.sampling.compare import Reduction, agrees_without_float64, compare_within_tolerance, derive_reduction
from shiplap.sampling.rounding import compare_with_rounding
from shiplap.sampling.run import reference_effects
from shiplap.sampling.samples import sample
from shiplap_testing.effort import sampled


def test_terms_are_the_dims_that_no_output_has(ns):
    @sl.op(f"{ns}::mm")
    def op(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
        return a @ b.t()

    assert derive_reduction(op.spec, {"m": 3, "n": 5, "k": 7}) == Reduction(7)
    assert derive_reduction(op.spec, {"m": 3, "n": 5, "k": 0}) == Reduction(1)


def test_sums_of_eight_bits_are_those_of_tensor_cores(ns):
    @sl.op(f"{ns}::scaled")
    def scaled(a: Float8e4m3fn[Tensor, "m k"], scale: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        return a.to(scale.dtype).sum(1) * scale

    sums = derive_reduction(scaled.spec, {"m": 3, "k": 16})
    assert sums.terms == 16
    assert sums.eps == 2**-13


@pytest.mark.parametrize("wide_sums", [False, True])
def test_an_error_of_a_sum_passes_only_where_sums_are_that_coarse(wide_sums):
    wide = torch.randn(64, dtype=torch.float64) + 3
    own = wide.float()
    off = own * (1 + 2.0**-12)
    judge = {
        eps: compare_within_tolerance([off], [own], [wide], Reduction(16, eps), wide_sums=wide_sums)
        for eps in (0.0, 2.0**-13)
    }
    assert "tolerances" in judge[0.0].problem
    assert judge[2.0**-13].problem == ""
    much = compare_within_tolerance([own * (1 + 2.0**-8)], [own], [wide], Reduction(16, 2.0**-13), wide_sums=wide_sums)
    assert "tolerances" in much.problem, "coarse sums excuse no wrong ones"


def test_sixteen_bits_are_judged_as_before():
    for dtype in (torch.float16, torch.bfloat16):
        eps = torch.finfo(dtype).eps
        assert Reduction(16, 2.0**-13).growth(eps, False) == Reduction(16).growth(eps, False) == eps * 12


def test_a_sum_that_overflows_may_end_as_infinity_or_as_nan_and_nothing_else_may():
    inf, nan = float("inf"), float("nan")
    wide = torch.tensor([1e60], dtype=torch.float64)

    def judged(got, own, terms):
        return compare_within_tolerance([torch.tensor([got])], [torch.tensor([own])], [wide], Reduction(terms)).problem

    assert judged(-inf, nan, 8) == judged(nan, -inf, 8) == "", "the order of the terms decides"
    assert judged(-inf, nan, 1) == "", "the reference overflows on its way"
    assert "expected inf" in judged(nan, inf, 1), "one operation has one result"
    assert "expected nan" in judged(3.0, nan, 8), "a number is no overflow"
    there = torch.tensor([inf], dtype=torch.float64)
    assert compare_within_tolerance([torch.tensor([nan])], [torch.tensor([inf])], [there], Reduction(8)).problem, (
        "inf was in the input"
    )


def one_after_the_other(a, b):
    """A product in float32 that adds term after term, as a plain kernel does."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for p in range(a.shape[1]):
        total = total + a[:, p : p + 1] * b[p : p + 1]
    return total


def coarse(x):
    """What TF32 keeps of a float32."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


ORDERED = {
    "normal": lambda x, dim: x,
    "ascending": lambda x, dim: x.sort(dim)[0],
    "constant": lambda x, dim: torch.full_like(x, 0.1),
    "positive": lambda x, dim: x.abs(),
    "peaks": lambda x, dim: torch.where(torch.arange(x.shape[1]) == 3, 1e4, x) if dim else x,
}


@pytest.mark.parametrize("kind", ORDERED)
@pytest.mark.parametrize("terms", sampled([130, 1030, 4097], 1))
def test_a_plain_sum_in_float32_is_right_however_its_terms_lie_and_a_coarser_one_is_not(kind, terms):
    a, b = ORDERED[kind](torch.randn(40, terms), 1), ORDERED[kind](torch.randn(terms, 30), 0)
    wide = a.double() @ b.double()

    def verdict(got):
        return compare_with_rounding([got], [a @ b], [wide], Reduction(terms), lambda: [a.double() @ b.double()])

    assert verdict(one_after_the_other(a, b)).problem == ""
    assert verdict(coarse(a) @ coarse(b)).problem
    assert verdict(a[:, :-1] @ b[:-1]).problem


def test_a_plain_sum_of_a_million_squares_drifts_and_is_right():
    """Of small terms beside a large sum more is lost than gained, on which all runs of random errors agree."""
    squares = torch.randn(2, 1_000_000).square()
    run = torch.from_numpy(np.cumsum(squares.numpy(), 1, dtype=np.float32)[:, -1])  # one after the other
    wide = squares.double().sum(1)

    def verdict(got):
        return compare_with_rounding([got], [squares.sum(1)], [wide], Reduction(1), lambda: [squares.double().sum(1)])

    assert (run / wide - 1).max() < -1e-4
    assert verdict(run).problem == ""
    assert verdict(squares[:, :-10_000].sum(1)).problem
    mean = compare_with_rounding(
        [run / 1e6], [squares.mean(1)], [wide / 1e6], Reduction(1), lambda: [squares.double().mean(1)]
    )
    assert mean.problem == ""


def test_a_plain_sum_over_two_dims_and_a_plain_convolution_are_right():
    x, w = torch.randn(2, 300, 9, 9), torch.randn(3, 300, 3, 3)
    x[:, 0], x[:, -1] = 1e4, -1e4
    w[:, 0], w[:, -1] = 1.0, 1.0
    total = torch.zeros(2, 9)
    for c in range(300):
        for i in range(9):
            total = total + x[:, c, i]
    wide = x.double().sum((1, 2))
    checked = compare_with_rounding([total], [x.sum((1, 2))], [wide], Reduction(2700), lambda: [x.double().sum((1, 2))])
    assert checked.problem == ""
    summed = torch.zeros(2, 3, 7, 7)
    for c in range(300):
        summed = summed + torch.conv2d(x[:, c : c + 1], w[:, c : c + 1])
    wide = torch.conv2d(x.double(), w.double())
    own = torch.conv2d(x, w)
    checked = compare_with_rounding(
        [summed], [own], [wide], Reduction(2700), lambda: [torch.conv2d(x.double(), w.double())]
    )
    assert checked.problem == ""


KINDS = {
    "normal": lambda x: x,
    "peaks": lambda x: x * 10 ** (3 * x),
    "tiny": lambda x: x * 1e-38,
    "huge": lambda x: x * 1e37,
    "zeros": lambda x: x * 0,
    "infinite": lambda x: torch.where(x > 2, float("inf"), x),
    "nan": lambda x: torch.where(x > 2, float("nan"), x),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_agrees_is_close_whatever_float64_shows(kind, dtype):
    """The quick comparison accepts nothing that the whole one refuses, and much of what it accepts."""
    drawn = torch.Generator().manual_seed(7)
    quick = 0
    for number in range(60):
        sums = Reduction([1, 16, 4096][number % 3])
        x = KINDS[kind](torch.randn(300, generator=drawn, dtype=torch.float64))
        own = (x * (1 + torch.finfo(dtype).eps * torch.randn(300, generator=drawn, dtype=torch.float64))).to(dtype)
        error = torch.finfo(dtype).eps * 10.0 ** (number % 6 - 1)
        got = (own.double() * (1 + error * torch.randn(300, generator=drawn, dtype=torch.float64))).to(dtype)
        for wide_sums in (False, True):
            if agrees_without_float64([got], [own], sums, wide_sums=wide_sums):
                quick += 1
                assert not compare_within_tolerance([got], [own], [x], sums, wide_sums=wide_sums).problem
        assert not agrees_without_float64([got, got], [own], sums)
        assert agrees_without_float64([own], [own.clone()], sums) or kind == "huge"
    assert quick > 12 or kind not in ("normal", "zeros")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 1.001])
def test_one_wrong_element_does_not_agree(wrong):
    own = torch.randn(50, 70) + 2
    got = own.clone()
    got[-1, -1] *= wrong
    assert not agrees_without_float64([got], [own], Reduction(64), wide_sums=True)
    assert agrees_without_float64([own.clone()], [own], Reduction(64), wide_sums=True)


def test_integers_shapes_and_dtypes_agree_exactly():
    x = torch.arange(6)
    assert agrees_without_float64([x], [x.clone()], Reduction(1))
    assert not agrees_without_float64([x], [x + (x == 5)], Reduction(1))
    assert not agrees_without_float64([x.int()], [x], Reduction(1))
    assert not agrees_without_float64([x.reshape(2, 3)], [x], Reduction(1))
    assert agrees_without_float64([x[:0]], [x[:0].clone()], Reduction(1))
    eight = torch.randn(9).to(torch.float8_e4m3fn)
    assert agrees_without_float64([eight], [eight.clone()], Reduction(1))
    assert (
        agrees_without_float64(
            [torch.randn(3, dtype=torch.complex64)], [torch.zeros(3, dtype=torch.complex64)], Reduction(1)
        )
        is False
    )


def test_sums_inside_of_row_operators_may_be_added_in_turn():
    """A thread adds one float32 term after the other; torch calls all of a softmax one operator."""
    from shiplap.sampling.rounding import rounding_allowance, rounding_unit

    x = torch.randn(3, 1 << 14, generator=torch.Generator().manual_seed(0))
    terms = (x - x.amax(1, keepdim=True)).exp()
    in_turn = terms / torch.from_numpy(terms.numpy().cumsum(1, dtype="float32")[:, -1:].copy())
    wide = torch.softmax(x.double(), 1)
    allowed = rounding_allowance(lambda: [torch.softmax(x.double(), 1)], [wide], rounding_unit(torch.float32))
    assert allowed is not None
    error = (in_turn.double() - wide).abs()
    assert bool((error <= allowed[0]).all())
    assert float(allowed[0].sum()) < 1e-3 * float(wide.sum())


def test_formulas_of_row_operators_are_theirs():
    from shiplap.sampling.rounding import ROW_FORMULAS

    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    w, aten = x[0].clone(), torch.ops.aten
    pairs = [
        (ROW_FORMULAS["_softmax"](x, 1), aten._softmax(x, 1, False)),
        (ROW_FORMULAS["_log_softmax"](x, -1), aten._log_softmax(x, -1, False)),
        (ROW_FORMULAS["logsumexp"](x, [0, 1], True), aten.logsumexp(x, [0, 1], True)),
        (ROW_FORMULAS["var"](x, [1]), x.var(1)),
        (ROW_FORMULAS["std"](x), x.std()),
        (ROW_FORMULAS["linalg_vector_norm"](x), torch.linalg.vector_norm(x)),
        *zip(
            ROW_FORMULAS["native_layer_norm"](x, [8], w, w, 1e-5),
            aten.native_layer_norm(x, [8], w, w, 1e-5),
            strict=True,
        ),
        *zip(
            ROW_FORMULAS["var_mean"](x, [1], correction=0, keepdim=True),
            torch.var_mean(x, 1, correction=0, keepdim=True),
            strict=True,
        ),
    ]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("factor", [1.0, 1 + 2.0**-20, 2.0], ids=["right", "off a little", "wrong"])
def test_parts_of_a_large_result_are_compared_as_the_whole_is(monkeypatch, dtype, factor):
    """The largest error of the reference, which adds to each tolerance, lies in one part alone."""
    wide = torch.randn(40, 25, dtype=torch.complex128 if dtype.is_complex else torch.float64).t()
    wide[20, 30] = 2.0
    own = wide.to(dtype)
    own[3, 7] += 1e-3
    got = own.clone()
    got[20, 30] *= factor
    for number, strange in enumerate((float("nan"), float("inf"), 0.0)):
        own[number, 0] = got[number, 0] = wide[number, 0] = strange
    sums, found = Reduction(2), []
    for part in (1 << 18, 64):
        monkeypatch.setattr(compare, "PART", part)
        found.append(compare_within_tolerance([got], [own], [wide], sums, wide_sums=True, near="none"))
    assert found[0].problem == found[1].problem
    assert found[0].error == pytest.approx(found[1].error)
    assert bool(found[0].problem) == (factor == 2.0)


def test_one_of_many_elements_may_have_small_errors_in_all_runs_by_chance(ns):
    """In float64 the errors of a run were rounded to 0 or 1 of them, and this element had none in each of five runs."""

    @sl.op(f"{ns}::resize", requires=("c > 0", "h > 0", "w > 0", "oh > 0", "ow > 0"))
    def resize(x: Float[Tensor, "n c h w"], oh: int, ow: int) -> Float[Tensor, "n c oh ow"]:
        return torch.nn.functional.interpolate(x, size=(oh, ow), mode="bilinear", align_corners=False)

    label = "sizes(n=5, c=4096, h=2, w=4), scalars(oh=1, ow=1), dtypes(Float='float64')"
    case = sample(resize, label, 1522140926)
    wide, (x, *_) = reference_effects(resize, case.args), case.args
    top, bottom = ((x[:, :, row, 1] * 0.5 + x[:, :, row, 2] * 0.5) for row in (0, 1))
    got = (top * 0.5 + bottom * 0.5)[:, :, None, None]
    sums = derive_reduction(resize.spec, case.env)

    def problem(result):
        again = lambda: reference_effects(resize, case.args)  # noqa: E731
        return compare_with_rounding([result], wide, wide, sums, again).problem

    assert not torch.equal(got, wide[0])
    assert not problem(got)
    off = got.clone()
    off[2, 7] += 2e-14  # ninety units of the last place of one
    assert "1 of 20480 differ" in problem(off)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 3, 30, 1000])
def test_a_common_factor_of_narrow_numbers_is_found(dtype, count):
    wide = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 5
    wide = torch.where(wide.abs() < 0.1, 0.1, wide)
    eps = torch.finfo(dtype).eps
    own = wide.to(dtype)
    for factor in (1.05, 0.95) if count >= 30 else ():  # of a few numbers, their own rounding is as large
        wrong = (wide * factor).to(dtype)
        within = bool(((wrong.double() - wide).abs() <= 16 * eps * wide.abs()).all())
        assert bool(describe_common_factor(wrong, own, wide)) == within  # else single numbers show it
    noise = torch.empty(count, dtype=torch.float64).uniform_(-2, 2, generator=torch.Generator().manual_seed(4))
    for right in (own, (wide * (1 + eps)).to(dtype), (wide * (1 + eps * noise)).to(dtype)):
        assert not describe_common_factor(right, own, wide)
    cut = wide - wide.remainder(torch.ldexp(torch.full_like(wide, eps), torch.frexp(wide).exponent - 1))
    assert not describe_common_factor(cut.to(dtype), own, wide)  # a conversion that cuts digits off
    assert not describe_common_factor((wide * 1.05).to(dtype), own, wide, tolerance=0.06)
    assert not describe_common_factor((wide * 1.05).float(), own.float(), wide)  # single numbers show it there
    assert not describe_common_factor(own[:0], own[:0], wide[:0])


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_no_common_factor_is_sought_among_numbers_that_are_not_finite(factor):
    """Whether the reference in its own precision stands for that in float64, or comes as another tensor."""
    own = (torch.rand(100, generator=torch.Generator().manual_seed(3)) + 1).bfloat16()
    got = (own.double() * factor).bfloat16()
    got[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    own[2:6] = torch.tensor([-torch.inf, 0.0, torch.inf, torch.nan])
    texts = {describe_common_factor(got, own, same) for same in (own, own.clone())}
    assert [bool(text) for text in texts] == [factor > 1]


@pytest.mark.parametrize("off", [0.0, 1e-8, 3e-7, 1e-3, float("nan")])
def test_parts_of_a_large_result_agree_as_the_whole_does(monkeypatch, off):
    own = 1 + torch.rand(200, generator=torch.Generator().manual_seed(3))
    got = own.clone()
    got[137] += off
    whole = compare.agrees_without_float64([got], [own], Reduction(4), near="none")
    monkeypatch.setattr(compare, "PART", 16)
    assert compare.agrees_without_float64([got], [own], Reduction(4), near="none") == whole
    assert whole == (off < 1e-6)


def test_numbers_of_one_value_have_one_rounding_error():
    """The mean of many numbers was taken to be exact, also of a constant sample, whose numbers are all off alike."""
    wide = torch.full((1000,), 1.3, dtype=torch.float64)
    own = wide.bfloat16()
    eps = torch.finfo(torch.bfloat16).eps
    assert not describe_common_factor((wide * (1 - 3.5 * eps)).bfloat16(), own, wide)
    assert describe_common_factor((wide * (1 - 12 * eps)).bfloat16(), own, wide)
    small = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 0.01 + 0.002
    assert describe_common_factor((small * 1.006).half(), small.half(), small)


def test_a_jump_of_a_reference_in_float64_is_rounding():
    """Runs with enlarged errors were divided by the factor, and the size of a jump with them."""
    x = torch.arange(1.0, 65.0, dtype=torch.float64)
    wide = [torch.floor(x * 3 / 3)]
    again = lambda: [torch.floor(x * 3 / 3)]  # noqa: E731
    assert not compare_with_rounding([wide[0] - 1], wide, wide, Reduction(1), again).problem
    assert compare_with_rounding([wide[0] - 20], wide, wide, Reduction(1), again).problem


def test_a_common_factor_is_found_beside_numbers_that_cancel():
    """No factor was looked for where rounding explained a single number."""
    x = torch.randn(2000, generator=torch.Generator().manual_seed(3)).abs() + 1
    y = torch.zeros(2000)
    x[0], y[0] = 2**18 + 1, -(2**18)
    wide = x.double() + y.double()
    own, right = wide.bfloat16(), wide.bfloat16()
    right[0] += 0.2  # a difference of two numbers, of which rounding in float32 determines the first place

    def problem(got):
        again = lambda: [x.double() + y.double()]  # noqa: E731
        return compare_with_rounding([got], [own], [wide], Reduction(1), again).problem

    assert not problem(right)
    wrong = (wide * 1.04).bfloat16()
    wrong[0] = right[0]
    assert "all numbers are about 1.04 times" in problem(wrong)


def test_no_common_factor_is_accepted_without_float64():
    own = torch.randn(2000, generator=torch.Generator().manual_seed(3)).bfloat16()
    sums = Reduction(1)
    assert agrees_without_float64([own], [own], sums, wide_sums=True, near="none")
    assert not agrees_without_float64([own * 1.03], [own], sums, wide_sums=True, near="none")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_one_number_that_is_not_finite_is_seen_at_any_place(dtype):
    for count in (1, 7, 300):
        plain = torch.randn(count).to(dtype)
        assert compare.is_finite(plain)
        for value in (torch.nan, torch.inf, -torch.inf):
            for at in (0, count // 2, count - 1):
                changed = plain.clone()
                changed[at] = value
                assert not compare.is_finite(changed)
    assert compare.is_finite(torch.zeros(0, dtype=dtype))
