"""The sample that ``make test`` runs of a parametrised test."""

import pytest

from shiplap_testing.effort import sampled


def test_the_named_cases_are_marked_and_the_order_stays():
    first, second, third = sampled(["a", "b", "c"], long=["b"])
    assert (first, third) == ("a", "c")
    assert second.values == ("b",)
    assert [mark.name for mark in second.marks] == ["long"]


@pytest.mark.parametrize("long", [["x"], ["a", "b"]])
def test_a_name_that_is_no_case_and_a_test_without_cases_are_refused(long):
    with pytest.raises(ValueError, match="case"):
        sampled(["a", "b"], long=long)
