"""What became of tests is written into the table of the matrix."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shiplap_testing import cells


def report_test(cell: cells.Cell, test: str, when: str = "teardown", outcome: str = "passed", **keywords: int) -> None:
    """Pass the reports of one test to the plugin: that of its call if it has ended, then that of ``when``."""
    for each in ["call", when] if when == "teardown" else [when]:
        report: Any = SimpleNamespace(
            when=each, outcome=outcome, failed=outcome == "failed", nodeid=test, keywords=keywords
        )
        cell.pytest_runtest_logreport(report)


def read_row() -> dict[str, Any]:
    """Return the row of the table, which has no other."""
    (row,) = json.loads(cells.TABLE.read_text())
    return row


def run_one_test(file: str, **keywords: int) -> dict[str, Any]:
    """Run the plugin over one passed test of ``file``, which is created, and return the row of the table, which has no
    other.
    """
    (cells.REPOSITORY / file).touch()
    cell = cells.Cell()
    cell.expect([f"{file}::test_b"])
    report_test(cell, f"{file}::test_b", **keywords)
    cell.pytest_sessionfinish()
    return read_row()


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "REPOSITORY", tmp_path)
    monkeypatch.setattr(cells, "TABLE", tmp_path / "matrix.json")
    monkeypatch.setenv("GITHUB_SHA", "0123456789abcdef")


def test_two_runs_of_a_file_without_and_with_a_device_add_up() -> None:
    run_one_test("test_a.py")
    row = run_one_test("test_a.py", device=1)
    assert row["commit"] == "01234567"
    assert row["files"] == {"test_a.py": "1 passed", "test_a.py (device)": "1 passed"}


def test_a_file_that_ran_on_an_earlier_commit_keeps_the_name_of_that_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("test_a.py", "test_b.py", "test_removed.py"):
        run_one_test(name)
    (cells.REPOSITORY / "test_removed.py").unlink()
    monkeypatch.setenv("GITHUB_SHA", "fedcba9876543210")
    row = run_one_test("test_b.py")
    assert row["files"] == {"test_a.py": "1 passed", "test_b.py": "1 passed"}
    assert (row["commit"], row["earlier"]) == ("fedcba98", {"test_a.py": "01234567"})
    monkeypatch.setenv("GITHUB_SHA", "aaaaaaaaaaaaaaaa")
    row = run_one_test("test_a.py")
    assert (row["commit"], row["earlier"]) == ("aaaaaaaa", {"test_b.py": "fedcba98"})


def test_a_file_is_written_when_its_tests_have_ended_though_others_run_beside_it() -> None:
    cell = cells.Cell()
    tests = ["a.py::one", "a.py::two", "b.py::one", "b.py::two", "c.py::one"]
    cell.pytest_xdist_node_collection_finished(tests)
    report_test(cell, "a.py::one")
    report_test(cell, "b.py::one")
    assert not cells.TABLE.is_file()
    report_test(cell, "a.py::two")
    report_test(cell, "c.py::one", when="call")
    assert read_row()["files"] == {"a.py": "2 passed"}
    # The others, one of them in its teardown, are running when the run ends.
    cell.pytest_sessionfinish()
    assert read_row()["files"] == {"a.py": "2 passed"}


def test_a_test_that_ends_its_worker_is_written_as_failed() -> None:
    cell = cells.Cell()
    tests = ["a.py::one", "a.py::two"]
    cell.pytest_xdist_node_collection_finished(tests)
    report_test(cell, "a.py::one")
    report_test(cell, "a.py::two", when="???", outcome="failed")
    # The worker that takes its place finds the same tests.
    cell.pytest_xdist_node_collection_finished(tests)
    cell.pytest_sessionfinish()
    row = read_row()
    assert (row["files"], row["failures"]) == ({"a.py": "1 passed, 1 failed"}, {"a.py": ["a.py::two"]})
