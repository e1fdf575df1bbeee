"""A report, a judge's result and a tuning's result: verdicts, tables, and no truth value."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

import pytest

import shiplap as sl
from shiplap.audit import Finding, Report
from shiplap.declare.bucket import Bucket
from shiplap.errors import VerdictError
from shiplap.judge import JudgeResult, Reason
from shiplap.tuning import Choice, TuneResult

OK = Finding("fake", "ok", "lib::op", "as promised", "3 samples")
SKIPPED = Finding("bound", "skip", "lib::op", "no size depends on data")
LATE = Finding("compile", "incomplete", "lib::op", "out of budget")
BAD = Finding("edges", "fail", "lib::op", "<b>wrong</b>", "sizes(n=0)", "mask the tail")
CHOICE = Choice("lib::op", "cpu", Bucket.parse("n<=64"), "Float=float32", "", "fast", reason="2x")


def report(*findings: Finding, required: tuple[str, ...] = ("fake",)) -> Report:
    return Report("lib::op", findings, required)


@pytest.mark.parametrize(
    ("made", "verdict", "headline"),
    [
        (report(OK, SKIPPED), "proven", "lib::op: proven for fake alone"),
        (report(OK, LATE), "incomplete", "lib::op: incomplete (compile: out of budget)"),
        (report(OK, required=("fake", "edges")), "incomplete", "lib::op: incomplete (edges: was not run)"),
        (report(SKIPPED, required=()), "incomplete", "lib::op: incomplete (samples: no check applied)"),
        (report(OK, LATE, BAD), "failed", "lib::op: failed (edges)"),
    ],
)
def test_the_verdict_of_a_report(made: Report, verdict: str, headline: str) -> None:
    assert (made.verdict, made.headline) == (verdict, headline)
    assert made.proven == (verdict == "proven")
    assert (list(made), len(made)) == (list(made.findings), len(made.findings))


def test_a_report_says_that_no_kernel_ran() -> None:
    made = dataclasses.replace(report(OK), no_kernel_on="cpu")
    assert made.headline.endswith("for fake alone; only the reference ran, since the op has no kernel for cpu")


def test_many_required_checks_are_counted_and_one_reason_is_given_once() -> None:
    names = tuple(f"check{n}" for n in range(20))
    findings = tuple(Finding(name, "ok", "lib::op", "seen") for name in names)
    assert report(*findings, required=names).headline == "lib::op: proven by 20 checks"
    some = [dataclasses.replace(f, verdict="skip") for f in findings[:6]]
    assert report(*some, *findings[6:], required=names).headline == "lib::op: proven by 14 checks"
    both = report(OK, LATE, dataclasses.replace(LATE, check="c_abi"))
    assert both.headline == "lib::op: incomplete (compile, c_abi: out of budget)"


def judged(*reasons: Reason) -> JudgeResult:
    return JudgeResult("ref.py:f", "fast.py:g", reasons, (), (), (), 12, 1.5)


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (report(OK, LATE), "proven"),
        (judged(), "accepted"),
        (TuneResult((CHOICE,)), "chosen"),
        (TuneResult(()), "chosen"),
    ],
)
def test_no_result_has_a_truth_value(result: object, word: str) -> None:
    with pytest.raises(VerdictError, match=f"SL504(.|\\n)*{word}") as caught:
        assert result
    assert isinstance(caught.value, TypeError)


def test_the_verdict_of_a_tuning() -> None:
    left = CHOICE.but(kernel="", origin="left out", reason="the budget was spent")
    wrong = CHOICE.but(findings=(BAD,))
    verdicts = [TuneResult(c).verdict for c in ((CHOICE,), (CHOICE, left), (left, wrong))]
    assert verdicts == ["chosen", "incomplete", "failed"]
    unsure = CHOICE.but(unverified="tuned in the calling process (order of calls x determinism is untouched)")
    assert TuneResult((unsure,)).verdict == "incomplete"
    assert "1 of them unverified" in TuneResult((unsure,)).headline
    assert "unverified  tuned in the calling process" in str(TuneResult((unsure,)))
    assert [TuneResult(c).verdict for c in ((CHOICE,), (left,), (wrong,))] == ["chosen", "incomplete", "failed"]
    assert TuneResult((CHOICE, left)).headline == "lib::op: incomplete (1 of 2 calls have a choice)"


def test_a_result_is_a_table_in_a_terminal() -> None:
    assert str(report(OK, BAD)).splitlines() == [
        "lib::op: failed (edges)",
        "  fake   ok    as promised",
        "  edges  fail  <b>wrong</b>",
        "    input  sizes(n=0)",
        "    fix    mask the tail",
    ]
    assert repr(report(OK)) == "<Report lib::op: proven for fake alone>"
    assert str(judged(Reason("values", "off by 1", "2x3"))).splitlines()[:3] == [
        "fast.py:g: refused",
        "  values  fail  off by 1",
        "    on 2x3",
    ]
    assert "fast: 2x (measured)" in str(TuneResult((CHOICE,)))


class Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)


@pytest.mark.parametrize("result", [report(OK, BAD), judged(Reason("values", "<b>")), TuneResult((CHOICE,))])
def test_a_result_is_a_table_in_a_notebook(result: Report) -> None:
    html = result._repr_html_()
    cells = Cells()
    cells.feed(html)
    assert cells.tags.count("tr") == len(result.rows)
    assert "b" not in cells.tags  # escaped


def test_audit_returns_one() -> None:
    from shiplap_testing.zoo import good

    made = sl.audit(good.saxpy, checks=["schema"], seed=1)
    assert isinstance(made, sl.Report)
    assert made.proven, str(made)
    assert made.required == ("schema",)
