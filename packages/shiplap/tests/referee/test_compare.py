"""close: how far a kernel may be from its reference."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, Float8e4m3fn
from torch import Tensor

import shiplap as sl
from shiplap.referee import Reduction, close, reduction


def test_terms_are_the_dims_that_no_output_has(ns):
    @sl.op(f"{ns}::mm")
    def op(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
        return a @ b.t()

    assert reduction(op.spec, {"m": 3, "n": 5, "k": 7}) == Reduction(7)
    assert reduction(op.spec, {"m": 3, "n": 5, "k": 0}) == Reduction(1)


def test_sums_of_eight_bits_are_those_of_tensor_cores(ns):
    @sl.op(f"{ns}::scaled")
    def scaled(a: Float8e4m3fn[Tensor, "m k"], scale: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        return a.to(scale.dtype).sum(1) * scale

    sums = reduction(scaled.spec, {"m": 3, "k": 16})
    assert sums.terms == 16
    assert sums.eps == 2**-13


@pytest.mark.parametrize("wide_sums", [False, True])
def test_an_error_of_a_sum_passes_only_where_sums_are_that_coarse(wide_sums):
    wide = torch.randn(64, dtype=torch.float64) + 3
    own = wide.float()
    off = own * (1 + 2.0**-12)
    judge = {eps: close([off], [own], [wide], Reduction(16, eps), wide_sums=wide_sums) for eps in (0.0, 2.0**-13)}
    assert "tolerances" in judge[0.0].problem
    assert judge[2.0**-13].problem == ""
    much = close([own * (1 + 2.0**-8)], [own], [wide], Reduction(16, 2.0**-13), wide_sums=wide_sums)
    assert "tolerances" in much.problem, "coarse sums excuse no wrong ones"


def test_sixteen_bits_are_judged_as_before():
    for dtype in (torch.float16, torch.bfloat16):
        eps = torch.finfo(dtype).eps
        assert Reduction(16, 2.0**-13).growth(eps, False) == Reduction(16).growth(eps, False) == eps * 12


def test_a_sum_that_overflows_may_end_as_infinity_or_as_nan_and_nothing_else_may():
    inf, nan = float("inf"), float("nan")
    wide = torch.tensor([1e60], dtype=torch.float64)

    def judged(got, own, terms):
        return close([torch.tensor([got])], [torch.tensor([own])], [wide], Reduction(terms)).problem

    assert judged(-inf, nan, 8) == judged(nan, -inf, 8) == "", "the order of the terms decides"
    assert judged(-inf, nan, 1) == "", "the reference overflows on its way"
    assert "expected inf" in judged(nan, inf, 1), "one operation has one result"
    assert "expected nan" in judged(3.0, nan, 8), "a number is no overflow"
    there = torch.tensor([inf], dtype=torch.float64)
    assert close([torch.tensor([nan])], [torch.tensor([inf])], [there], Reduction(8)).problem, "inf was in the input"
