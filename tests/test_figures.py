"""Figures between ``<!-- RECORD -->`` and ``<!-- /RECORD -->`` are numbers of that record, rounded as shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.records import PAGES

from shiplap.kernels.native import binding

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?!\w)")
# A page may show seconds as milliseconds, nanoseconds as microseconds, and a share in percent.
UNITS = (1.0, 1e3, 1e-3, 1e-6, 100.0)


def blocks_of(text: str) -> list[tuple[str, str, str]]:
    """Return the record, the whole name and the text of each block of figures."""
    found = re.finditer(r"<!-- (([a-z0-9_]+)[^>]*?) -->\n(.*?)<!-- /\1 -->", text, re.DOTALL)
    return [(m[2], m[1], m[3]) for m in found if (RESULTS / f"{m[2]}.json").is_file()]


def numbers_in(value: Any) -> Iterator[float]:
    """Yield the numbers in a record, among them those in its keys and texts, and ratios to the time of ``off``."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers_in([key, inner])
        # Pages of rewrites show how many times as fast others are as "off", the control.
        times = [time for time in value.values() if isinstance(time, (int, float)) and time]
        yield from (value["off"] / time for time in times if "off" in value)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers_in(inner)
    elif isinstance(value, str):
        yield from (float(number.replace(",", "")) for number in NUMBER.findall(value))
    elif isinstance(value, (int, float)):
        yield float(value)


def strangers(text: str, record: dict[str, Any]) -> list[str]:
    """Return the numbers of a page's text that no number of ``record`` is rounded to."""
    known = [*numbers_in({key: value for key, value in record.items() if key != "sources"})]
    found = []
    for shown in NUMBER.findall(text):
        plain = shown.replace(",", "")
        error = 0.5000001 * 10.0 ** -len(plain.partition(".")[2])
        if not any(abs(value * unit - float(plain)) <= error for value in known for unit in UNITS):
            found.append(shown)
    return found


BLOCKS = [(page, *block) for page in PAGES for block in blocks_of((ROOT / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "record", "name", "text"), BLOCKS, ids=[f"{b[0]}: {b[2]}" for b in BLOCKS])
def test_the_figures_of_a_page_are_those_of_the_record(page: str, record: str, name: str, text: str) -> None:
    result = json.loads((RESULTS / f"{record}.json").read_text(encoding="utf-8"))
    assert strangers(text, result) == [], f"{page}: no number of {record}.json is rounded to these"


def test_a_figure_that_is_not_in_the_record_is_found() -> None:
    record = {"device": "H200", "versions": {"torch": "2.11"}, "rows": [{"n": 15192, "us": 1234.56, "share": 0.984}]}
    assert strangers("15,192 voxels on torch 2.11 take 1.235 ms, 98.4 % (H200)", record) == []
    assert strangers("15,193 voxels on torch 2.12 take 1.234 ms, 98.5 %", record) == ["15,193", "2.12", "1.234", "98.5"]
    assert strangers("1.50 times as fast as off", {"us": {"off": 300.0, "eager": 200}}) == []
    assert strangers("1.51 times as fast as off", {"us": {"off": 300.0, "eager": 200}}) == ["1.51"]
    assert len(BLOCKS) > 20


def test_the_notice_of_a_missing_binding_has_the_ratio_of_the_record() -> None:
    times = json.loads((RESULTS / "overhead.json").read_text(encoding="utf-8"))["eager_ns"]
    assert round(times["shiplap_python"] / times["shiplap_native"]) == binding.SLOWER
