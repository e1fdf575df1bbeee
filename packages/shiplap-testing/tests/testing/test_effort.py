"""The sample that ``make test`` runs of a parametrised test."""

import datetime

import pytest

from shiplap_testing import effort
from shiplap_testing.effort import rotating, sampled


def test_the_named_cases_are_marked_and_the_order_stays():
    first, second, third = sampled(["a", "b", "c"], long=["b"])
    assert (first, third) == ("a", "c")
    assert second.values == ("b",)
    assert [mark.name for mark in second.marks] == ["long"]


@pytest.mark.parametrize("long", [["x"], ["a", "b"]])
def test_a_name_that_is_no_case_and_a_test_without_cases_are_refused(long):
    with pytest.raises(ValueError, match="case"):
        sampled(["a", "b"], long=long)


def run_on(day: datetime.date, monkeypatch: pytest.MonkeyPatch, cases: list, count: int, **more) -> set[str]:
    monkeypatch.setattr(effort, "DAY", day.isoformat())
    return {case for case in rotating(cases, count, **more) if isinstance(case, str)}


def test_each_case_has_its_day(monkeypatch):
    cases, day = list("abcdefg"), datetime.date(2026, 11, 26)
    days = [run_on(day + datetime.timedelta(n), monkeypatch, cases, 3) for n in range(3)]
    assert [len(drawn) for drawn in days] == [3, 3, 3]
    assert set.union(*days) == set(cases)
    assert run_on(day, monkeypatch, cases, 3) == days[0]


def test_those_left_out_are_marked_and_the_order_stays(monkeypatch):
    cases = rotating(list("abcd"), 1, long="b")
    assert [case if isinstance(case, str) else case.values[0] for case in cases] == list("abcd")
    assert sum(isinstance(case, str) for case in cases) == 1
    days = [run_on(datetime.date(2026, 11, 26 + n), monkeypatch, list("abcd"), 1, long="b") for n in range(3)]
    assert set.union(*days) == set("acd")
    (left,) = (p for p in rotating([pytest.param(1, 2, id="x"), pytest.param(3, 4, id="x")], 1) if p.marks)
    assert left.values in {(1, 2), (3, 4)}
    assert left.id == "x"


def test_more_turns_than_cases_leave_out_none_and_an_unknown_name_is_refused():
    assert rotating(["a", "b"], 9) == ["a", "b"]
    with pytest.raises(ValueError, match="no case is called c"):
        rotating(["a", "b"], 1, long=["c"])
