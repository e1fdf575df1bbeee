"""Run tests on the versions that are installed, and write what became of them into the table of the matrix.

Usage: ``python -m shiplap_testing.cells PYTEST_ARGUMENT ...``, which ``nox -s matrix core oldest`` call.
A *cell* of the table (``tests/matrix.json``) is one combination of torch, Python, NumPy, Triton, compiler and user. It
counts outcomes by test file, so that several runs add up, and names the commit of each file: after a repair, only files
that failed or changed need another run. A file that runs again replaces its counts, and is written when all of its
tests have ended, also if workers of pytest-xdist run several files at a time. A file that is no longer there is
dropped. Why a test fails on a version stands in ``EXPLAINED`` of ``tools/generate_docs.py``, which shows the table in
``docs/stability.md``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy
import pytest
import torch

from shiplap_testing.paths import REPOSITORY

TABLE = REPOSITORY / "tests" / "matrix.json"
KINDS = ("passed", "failed", "skipped")
DEVICE = " (device)"  # behind the path of a file: those of its tests that need a device, which run apart


def installed_versions() -> dict[str, str]:
    """Return the installed versions by which ``tests/matrix.json``, the table of test outcomes, distinguishes its rows,
    as strings by name.

    They are the versions of torch, Python, NumPy, Triton and the C++ compiler, the rights of the user, and the device.
    """
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    said = (
        subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout if compiler else ""
    )
    kind, number = "Clang" if "clang" in said else "GCC", re.search(r"\d+\.\d+\.\d+", said)
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "triton": triton,
        "compiler": f"{kind} {number[0]}" if number else "none",
        "user": "root" if os.geteuid() == 0 else "a user without rights",
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
    }


def tested_commit() -> str:
    """Return the commit of the repository whose tests run, shortened, or an empty text if it is not known here."""
    # GitHub names the commit; another place without git can name it by the same variable.
    call = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    try:
        full = os.environ.get("GITHUB_SHA") or subprocess.run(call, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        full = ""
    return full.strip()[:8]


def commits_of_files(cell: dict[str, Any]) -> dict[str, str]:
    """Return the commit on which each file of tests ran, by the path of the file. ``cell`` is a row of the table: it
    names the commit of its last run, and those of files that ran on another one.
    """
    return {**dict.fromkeys(cell["files"], cell.get("commit", "")), **cell.get("earlier", {})}


class Cell:
    """A pytest plugin that counts test outcomes by test file. Before the first outcome of a file, it writes those of
    the files whose tests have all ended into ``tests/matrix.json``.
    """

    def __init__(self) -> None:
        """Create the plugin without any outcome. The installed versions are read at once, since tests may pretend later
        that others are installed.
        """
        self.files: dict[str, Counter[str]] = {}
        self.failed: dict[str, list[str]] = {}
        self.unended: dict[str, set[str]] = {}  # by the path of a file, its tests that have not ended
        self.versions = installed_versions()  # now: tests pretend to have others
        self.commit = tested_commit()
        self.stopped = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record which tests ``session`` will run."""
        self.expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Record which tests the workers of pytest-xdist will run. ``ids`` are the tests that one worker has found,
        which all others find, too.
        """
        self.expect(ids)

    def expect(self, ids: Sequence[str]) -> None:
        """Record the tests ``ids``, which will run. Files that are recorded already stay as they are, since a worker
        that takes the place of a crashed one finds tests that have ended.
        """
        expected: dict[str, set[str]] = {}
        for test in ids:
            expected.setdefault(test.partition("::")[0], set()).add(test)
        self.unended = expected | self.unended

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the outcome in ``report`` for the file of its test, and record the test if it failed. End the run of
        pytest if :meth:`stop` was called.

        Before the first outcome of a new file, the outcomes of complete files are written into ``tests/matrix.json``.
        """
        if self.stopped:  # a test has caught the exception of `stop`
            pytest.exit("ended from outside")
        path = report.nodeid.partition("::")[0]
        # A setup and a teardown count only where they do not pass.
        if report.when == "call" or report.outcome != "passed":
            # Tests with a device run apart, and must not replace the counts of the others of their file.
            file = path + (DEVICE if "device" in report.keywords else "")
            if file not in self.files:
                self.write()
            self.files.setdefault(file, Counter())[report.outcome] += 1
            if report.failed:
                self.failed.setdefault(file, []).append(report.nodeid)
        if report.when not in ("setup", "call"):  # a teardown, or the crash of a worker
            self.unended.get(path, set()).discard(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the outcomes of all test files whose tests have ended into ``tests/matrix.json``."""
        self.write()

    def stop(self, *_: Any) -> None:
        """End the run of the tests. This is a signal handler, and its arguments are ignored. The outcomes of files
        whose tests are running are not written.
        """
        self.stopped = True
        pytest.exit("ended from outside")

    def write(self) -> None:
        """Write the outcomes and failures of the test files whose tests have all ended into ``tests/matrix.json``, the
        table of test outcomes. They go into the row of the installed versions, where they replace earlier outcomes of
        these files. Outcomes on another commit keep the name of that commit, and those of files that are gone are
        dropped. Do nothing if no file is complete.
        """
        ended = {f: counts for f, counts in self.files.items() if not self.unended.get(f.removesuffix(DEVICE))}
        if not ended:
            return
        key = self.versions
        table = json.loads(TABLE.read_text("utf-8")) if TABLE.is_file() else []
        cell: dict[str, Any] = next((row for row in table if row["versions"] == key), {"versions": key, "files": {}})
        earlier = commits_of_files(cell)
        files, failures = cell["files"], cell.get("failures", {})
        for file, counts in ended.items():
            files[file] = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
            failures[file] = self.failed.get(file, [])
            earlier[file] = self.commit
        kept = sorted(file for file in files if file in ended or (REPOSITORY / file.removesuffix(DEVICE)).is_file())
        cell["date"], cell["commit"] = datetime.now(UTC).strftime("%Y-%m-%d"), self.commit
        cell["files"] = {file: files[file] for file in kept}
        cell["earlier"] = {file: earlier[file] for file in kept if earlier[file] != self.commit}
        cell["failures"] = {file: failures[file] for file in kept if failures.get(file)}
        rows = [row for row in table if row["versions"] != key] + [cell]
        rows.sort(key=lambda row: tuple(row["versions"].values()))
        TABLE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run pytest with ``arguments`` and the plugin ``Cell``, and return the exit status of pytest. The plugin writes
    the outcomes into ``tests/matrix.json``, the table of test outcomes by installed versions.
    """
    cell = Cell()
    signal.signal(signal.SIGTERM, cell.stop)
    # Devices are built in the folder of pytest's cache; -p no:cacheprovider would end their tests in an error.
    return int(pytest.main(["-q", *arguments], plugins=[cell]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
