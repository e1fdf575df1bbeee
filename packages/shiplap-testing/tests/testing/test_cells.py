"""What became of tests is written into the table of the matrix."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shiplap_testing import cells


def run_one_test(file: str, **keywords: int) -> dict[str, Any]:
    """Run the plugin over one passed test of ``file``, and return the row of the table, which has no other."""
    cell = cells.Cell()
    report: Any = SimpleNamespace(
        when="call", outcome="passed", failed=False, nodeid=f"{file}::test_b", keywords=keywords
    )
    cell.pytest_runtest_logreport(report)
    cell.pytest_sessionfinish()
    (row,) = json.loads(cells.TABLE.read_text())
    return row


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "TABLE", tmp_path / "matrix.json")
    monkeypatch.setenv("GITHUB_SHA", "0123456789abcdef")


def test_two_runs_of_a_file_without_and_with_a_device_add_up() -> None:
    run_one_test("tests/test_a.py")
    row = run_one_test("tests/test_a.py", device=1)
    assert row["commit"] == "01234567"
    assert row["files"] == {"tests/test_a.py": "1 passed", "tests/test_a.py (device)": "1 passed"}


def test_a_run_on_another_commit_begins_the_row_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    run_one_test("tests/test_a.py")
    monkeypatch.setenv("GITHUB_SHA", "fedcba9876543210")
    row = run_one_test("tests/test_c.py")
    assert (row["commit"], row["files"]) == ("fedcba98", {"tests/test_c.py": "1 passed"})
