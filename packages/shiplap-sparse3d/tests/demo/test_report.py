"""The report is one file that needs nothing else, whatever the texts in it are."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from shiplap_sparse3d.demo import DemoResult
from shiplap_sparse3d.demo.report import VERDICTS, _chart, _round_up, headline_rows, render_demo_report
from shiplap_sparse3d.demo.result import AuditVerdicts

RESULT = DemoResult(
    graphs=1,
    graph_breaks=0,
    recompiles=2,
    iou=0.8765,
    baseline_iou=0.7141,
    points_per_s=123456.7,
    compiled_ms=10.04,
    eager_ms=20,
    audits={"sparse3d::conv": AuditVerdicts(15, 1, 3, ("fresh",))},
    compile_s=20,
    train_s=30,
    total_s=60,
    training_points=77_000,
    held_out_points=33_000,
    tile_points=(1, 2),
    tile_voxels=(595, 8561),
    parameters=64_128,
    losses=(1.0, 0.5, 0.25),
    environment="here",
    html="demo.html",
    png="demo.png",
)
IMAGE = b"\x89PNG not really"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Collects addresses and text; fails on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attributes if k in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = render_demo_report(RESULT, IMAGE)
    page = Page(text)
    assert page.addresses == ["data:image/png;base64," + base64.b64encode(IMAGE).decode()]
    assert not re.search(r"https?:|//\w|url\(|@import", text.replace(page.addresses[0], ""))
    assert not {"script", "link", "iframe", "object"} & set(page.tags)


def test_every_number_is_shown() -> None:
    text = Page(render_demo_report(RESULT, IMAGE)).text
    for _, value, note in headline_rows(RESULT):
        assert value in text
        assert note in text
    for value in ("0.876", "0.714", "123,457 points/s", "10.0 ms", "595 to 8,561 voxels", "64,128", "33,000 points"):
        assert value in text
    assert "fresh" in text  # the check that failed
    assert "lowest layer" in text  # what the labels are


def test_texts_are_escaped() -> None:
    hostile = "<script>alert('&')</script>"
    audits = {hostile: AuditVerdicts(0, 1, 0, (hostile,))}
    text = render_demo_report(replace(RESULT, environment=hostile, audits=audits), IMAGE)
    assert "<script" not in text
    assert Page(text).text.count(hostile) == 3


def test_without_an_audit_it_says_so() -> None:
    assert "Not run." in Page(render_demo_report(replace(RESULT, audits={}), IMAGE)).text


def test_the_report_says_what_a_skipped_and_an_incomplete_check_are() -> None:
    audits = {"sparse3d::conv": AuditVerdicts(15, 0, 3, (), incomplete=27)}
    text = Page(render_demo_report(replace(RESULT, audits=audits), IMAGE)).text
    assert VERDICTS in text
    assert "27" in text


# The plot is 560 wide and 190 high, and begins at (64, 10).
@pytest.mark.parametrize(
    ("losses", "points"),
    [
        ((1.0, 0.5, 0.0), "64.0,10.0 344.0,105.0 624.0,200.0"),
        ((1.6, 0.4), "64.0,48.0 624.0,162.0"),  # below a round number
        ((2.0,), "64.0,10.0"),
        ((0.0, 0.0), "64.0,200.0 624.0,200.0"),
    ],
)
def test_losses_are_drawn_between_axes(losses: tuple[float, ...], points: str) -> None:
    assert _chart(losses)["points"] == points


def test_axes_have_names_and_round_numbers() -> None:
    text = Page(render_demo_report(replace(RESULT, losses=(0.7, 0.2, 0.1)), IMAGE)).text
    words = text.partition("Loss")[2].partition("Audit of")[0].split()
    assert words == ["0", "0.5", "1", "1", "2", "3", "training", "step", "loss"]


@pytest.mark.parametrize(
    ("value", "top"), [(0.0, 1.0), (0.7, 1.0), (1.0, 1.0), (1.1, 2.0), (3.0, 5.0), (6.0, 10.0), (0.03, 0.05)]
)
def test_an_axis_ends_at_a_round_number(value: float, top: float) -> None:
    assert _round_up(value) == top
