"""Findings as text, JSON and HTML."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from rich.console import Console

from shiplap.render.facts import facts
from shiplap.render.findings import findings_html, findings_json, print_findings
from shiplap.render.html import render_html
from shiplap.render.result import exit_status
from shiplap.sampling.ledger import AUDIT, Ledger


def finding(**changes):
    fields = {
        "check": "fake",
        "verdict": "ok",
        "subject": "lib::op",
        "evidence": "seen",
        "input": "3 samples",
        "fix": "",
        "reproducer": "",
        "varied": "",
        "example": "",
    }
    return SimpleNamespace(**{**fields, **changes})


GOOD = finding()
SKIPPED = finding(check="bound", verdict="skip", evidence="no output size depends on data", input="")
BAD = finding(
    verdict="fail",
    check="numerics",
    subject="lib::other",
    evidence='[0] = 1, expected <b>2</b> & "3"',
    input="x float32(5,); seed 3",
    fix="correct [bold]it[/bold]",
    reproducer="import os\nassert 1 < 0\n",
)


def text(findings) -> str:
    out = io.StringIO()
    print_findings(findings, Console(file=out, width=100, force_terminal=False))
    return out.getvalue()


def test_the_table_of_samples_fits_into_80_columns() -> None:
    """A heading that is cut cannot be looked up."""
    out = io.StringIO()
    report = verdict("proven", ledger=Ledger().cells(AUDIT, {}))
    print_findings([GOOD], Console(file=out, width=80, force_terminal=False), [report])
    assert "value gradient second fake alias mutation determ. mode capture" in out.getvalue()


def verdict(word, **changes):
    return SimpleNamespace(
        **{
            "subject": "lib::op",
            "verdict": word,
            "headline": f"lib::op: {word}",
            "required": ["fake"],
            "failed": [],
            "missing": [],
            "causes": [],
            "ledger": [],
            **changes,
        }
    )


def test_the_small_example_is_shown_in_each_form() -> None:
    failed = finding(verdict="fail", example="x = [1.0, 2.0] gives 3.0, expected 2.0")
    for shown in (text([failed]), findings_html([failed], {}), findings_json([failed], {})):
        assert "x = [1.0, 2.0] gives 3.0, expected 2.0" in shown
    assert "  e.g.     x = [1.0" in text([failed])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], 0),
        (["proven"], 0),
        (["proven", "incomplete"], 3),
        (["incomplete", "failed", "proven"], 1),
        (["refused"], 1),
        (["accepted", "chosen"], 0),
    ],
)
def test_exit_status(words, code):
    assert exit_status(words) == code


def test_the_headlines_come_last():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=False)
    print_findings([GOOD], console, [verdict("incomplete"), verdict("proven")])
    assert out.getvalue().splitlines()[-2:] == ["lib::op: incomplete", "lib::op: proven"]


def test_text_groups_by_op_and_details_failures():
    shown = text([GOOD, SKIPPED, BAD])
    lines = shown.splitlines()
    assert lines[0].strip() == "lib::op"
    assert "skip  no output size depends on data" in shown
    assert "  fix      correct [bold]it[/bold]" in shown  # shown, not interpreted
    assert "\nimport os\nassert 1 < 0\n" in shown  # flush left, to be copied
    assert lines[-1] == "1 failed, 0 incomplete, 1 ok, 1 do not apply"


def test_json_has_every_field_and_the_facts():
    value = json.loads(findings_json([GOOD, BAD], facts(seed=3)))
    assert value["facts"]["seed"] == "3"
    assert value["findings"][1] == vars(BAD)


def test_facts_name_versions_machine_and_date():
    known = facts(seed=None, device="cpu")
    assert {"device", "torch", "python", "machine", "date", "shiplap"} <= known.keys()
    assert "seed" not in known


class Page(HTMLParser):
    """Tags and the places that could load something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]


def test_html_is_one_file_that_loads_nothing():
    page = findings_html([GOOD, BAD], facts(seed=3))
    parsed = Page(page)
    assert parsed.loaded == []
    assert not {"script", "link", "iframe", "img"} & set(parsed.tags)
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page
    assert "details" in parsed.tags


def test_html_escapes_what_it_is_given():
    page = findings_html([BAD, finding(subject="<script>alert(1)</script>")], {"seed": "<i>"})
    assert "<b>2</b>" not in page
    assert "&lt;b&gt;2&lt;/b&gt; &amp; &#34;3&#34;" in page
    assert "<script" not in page
    assert "&lt;i&gt;" in page


def test_render_html_fails_on_what_the_template_lacks():
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError):
        render_html("findings.html.jinja", title="x", facts={})
