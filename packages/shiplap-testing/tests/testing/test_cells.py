"""What became of tests is written into the table of the matrix."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shiplap_testing import cells


def test_two_runs_of_a_file_without_and_with_a_device_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "TABLE", tmp_path / "matrix.json")
    monkeypatch.setenv("GITHUB_SHA", "0123456789abcdef")
    for keywords in ({}, {"device": 1}):
        cell = cells.Cell()
        report: Any = SimpleNamespace(
            when="call", outcome="passed", failed=False, nodeid="tests/test_a.py::test_b", keywords=keywords
        )
        cell.pytest_runtest_logreport(report)
        cell.pytest_sessionfinish()
    (row,) = json.loads(cells.TABLE.read_text())
    assert row["commit"] == "01234567"
    assert row["files"] == {"tests/test_a.py": "1 passed", "tests/test_a.py (device)": "1 passed"}
