"""The sample that ``make test`` runs of a parametrised test."""

import pytest

from shiplap_testing.effort import sampled


def kept(cases: list, count: int, **more) -> list[str]:
    return [case for case in sampled(cases, count, **more) if isinstance(case, str)]


def test_the_named_cases_are_marked_and_the_order_stays():
    first, second, third = sampled(["a", "b", "c"], long=["b"])
    assert (first, third) == ("a", "c")
    assert second.values == ("b",)
    assert [mark.name for mark in second.marks] == ["long"]


@pytest.mark.parametrize("long", [["x"], ["a", "b"]])
def test_a_name_that_is_no_case_and_a_test_without_cases_are_refused(long):
    with pytest.raises(ValueError, match="case"):
        sampled(["a", "b"], long=long)


def test_a_count_takes_cases_at_equal_distances_the_same_in_each_run():
    assert kept(list("abcdefg"), 3) == ["a", "c", "e"]
    assert kept(list("abcdefg"), 3, long="c") == ["a", "d", "f"]
    assert kept(["a", "b"], 9) == ["a", "b"]


def test_those_left_out_are_marked_and_keep_their_names():
    cases = sampled(list("abcd"), 1, long="b")
    assert [case if isinstance(case, str) else case.values[0] for case in cases] == list("abcd")
    (left,) = (p for p in sampled([pytest.param(1, 2, id="x"), pytest.param(3, 4, id="y")], 1) if p.marks)
    assert (left.values, left.id) == ((3, 4), "y")
