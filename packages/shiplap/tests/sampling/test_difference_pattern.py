"""The pattern of differing elements: the part of the result that they fill, and how their values follow."""

from __future__ import annotations

import pytest
import torch

from shiplap.sampling import difference_pattern
from shiplap.sampling.difference_pattern import describe_pattern

EXPECTED = torch.linspace(-1, 3, 35).square().view(5, 7) + 0.1


def _changed(change):
    got = EXPECTED.clone()
    change(got)
    return got


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (_changed(lambda t: t[:, 4:].mul_(0.5)), ", all of [:, 4:], each is 0.5 times the expected"),
        (_changed(lambda t: t[2].zero_()), ", all of [2, :], each is 0"),
        (_changed(lambda t: t[1:3, ::2].add_(1)), ", all of [1:3, ::2], each is off by 1"),
        (_changed(lambda t: t[0, 1].mul_(2)), ", all of [0, 1]"),
        (_changed(lambda t: (t[0, 1].mul_(2), t[3, 2].mul_(2))), ""),
        (EXPECTED.roll(1, 0), ", each is what is expected at the previous index of dim 0"),
        (EXPECTED.roll(-1, 1), ", each is what is expected at the next index of dim 1"),
        (EXPECTED.flatten().flip(0).view(5, 7), ", the values are the expected ones in another order"),
        (EXPECTED * 3, ", each is 3 times the expected"),
        (EXPECTED + torch.nan, ""),
        (EXPECTED.sin(), ""),
        (EXPECTED * 1.00006, ""),
    ],
)
def test_patterns(got, text):
    assert describe_pattern(got != EXPECTED, got, EXPECTED) == text


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float16, torch.float64])
def test_patterns_of_other_dtypes(dtype):
    expected = torch.tensor([1, 4, 2, 8, 5, 7]).to(dtype)
    got = expected + torch.tensor([0, 0, 0, 3, 3, 3]).to(dtype)
    assert describe_pattern(got != expected, got, expected) == ", all of [3:], each is off by 3"


@pytest.mark.parametrize(("bits", "narrow"), [(32, torch.int32), (16, torch.int16), (8, torch.uint8)])
def test_integers_that_have_wrapped_around(bits, narrow):
    expected = torch.tensor([(1 << bits) + 7, 3, 5 << bits, (9 << bits) + 1])
    text = f"each is off by a multiple of 2^{bits}, as numbers of {bits} bits that have wrapped around"
    got = expected.to(narrow).long()
    assert describe_pattern(got != expected, got, expected) == f", {text}"
    assert describe_pattern(got != expected, got.double(), expected.double()) == ""


def test_results_without_such_patterns():
    ones = torch.ones(4)
    assert describe_pattern(ones.bool(), 3 * ones, ones) == ""  # any relation of equal numbers would be one of chance
    numbers = torch.tensor([1 + 1j, 2j])
    assert describe_pattern(torch.tensor([True, True]), numbers, 2 * numbers) == ""
    assert describe_pattern(torch.tensor(True), torch.tensor(1.0), torch.tensor(2.0)) == ""


def test_a_large_result_is_not_copied(monkeypatch):
    monkeypatch.setattr(difference_pattern, "MOST_COMPARED", 34)
    assert describe_pattern(EXPECTED > 0, 3 * EXPECTED, EXPECTED) == ""
