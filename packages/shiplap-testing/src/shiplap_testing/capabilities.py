"""Run the tests of each capability of private torch on the installed torch, and write its row of the table.

Usage: ``python -m shiplap_testing.capabilities [PACKAGE]``. ``nox -s matrix`` runs it on each release. With a package,
such as ``shiplap``, what only the tests of others show is not verified.

Tests are marked with ``@pytest.mark.capability(name)``. A capability is verified if a test of it passed and none
failed; where all are skipped, for want of a GPU say, it is not. While the tests run, every capability counts as
verified, so that they test the private way and not the public one.
"""

from __future__ import annotations

import json
import platform
import signal
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from shiplap.torch_private import CAPABILITIES
from shiplap.torch_private.versions import TABLE, minor_version
from shiplap_testing.paths import REPOSITORY

SOURCE = REPOSITORY / "packages/shiplap/src/shiplap/torch_private" / TABLE.name  # TABLE is in a wheel under nox
MARK = "mark.capability("


def marked_files(packages: str = "*") -> list[Path]:
    """Return the test files below ``packages/<packages>/tests`` that have tests of capabilities, sorted by path. A
    capability is a use of private parts of torch. ``packages`` is a glob pattern such as ``shiplap-*``.

    Files of the distribution ``shiplap-backend``, which load a device into the process, come last.
    """
    tests = sorted(REPOSITORY.glob(f"packages/{packages}/tests/**/test_*.py"))
    files = [file for file in tests if MARK in file.read_text("utf-8")]
    # A device that is loaded into the process stays for all later tests.
    return sorted(files, key=lambda file: "shiplap-backend" in file.parts)


class Outcomes:
    """A pytest plugin that counts how the tests of each capability ended. A capability is a use of private parts of
    torch. ``counts`` maps the name of a capability to the numbers of passed, failed and skipped tests.
    """

    def __init__(self) -> None:
        """Create the plugin without any outcome. ``counts`` will map the name of each capability, a use of private
        parts of torch, to its numbers of passed, failed and skipped tests.
        """
        self.counts: dict[str, Counter[str]] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Add the names of the capabilities with which the test ``item`` is marked to its user properties, from which
        pytest copies them to its reports. A capability is a use of private parts of torch.
        """
        item.user_properties += [("capability", mark.args[0]) for mark in item.iter_markers("capability")]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the outcome in ``report`` for each capability that the test is marked with. A capability is a use of
        private parts of torch.

        The outcome of the call of a test is always counted. The outcome of a setup or a teardown is counted only if it
        did not pass.
        """
        # A setup and a teardown count only where they do not pass.
        if report.when == "call" or report.outcome != "passed":
            for name in (value for kind, value in report.user_properties if kind == "capability"):
                self.counts.setdefault(str(name), Counter())[report.outcome] += 1

    def verified(self, name: str) -> bool:
        """Return whether at least one test of the capability ``name`` passed and none failed. A capability is a use of
        private parts of torch.
        """
        counts = self.counts.get(name, Counter())
        return bool(counts["passed"]) and not counts["failed"]


def row_of(outcomes: Outcomes) -> dict[str, Any]:
    """Return the row for the installed torch in the table of capabilities, which are uses of private parts of torch.

    It is a dict with the versions of torch and Python, the date, the name of the GPU and the names of verified
    capabilities. It also has the numbers of passed, failed and skipped tests in ``outcomes``.
    """
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
        "tests": {kind: sum(c[kind] for c in outcomes.counts.values()) for kind in ("passed", "failed", "skipped")},
        "verified": [c.name for c in CAPABILITIES if outcomes.verified(c.name)],
    }


def write_row(path: Path, row: dict[str, Any]) -> None:
    """Write ``row`` into the JSON file ``path`` under the minor version of its torch. An earlier row of this version is
    replaced, and rows of other versions stay.
    """
    # Patch releases share a row.
    table = {**json.loads(path.read_text(encoding="utf-8")), minor_version(row["torch"]): row}
    ordered = sorted(table.items(), key=lambda item: tuple(map(int, item[0].split("."))))
    path.write_text(json.dumps(dict(ordered), indent=1) + "\n", encoding="utf-8")


def main(packages: str = "*") -> int:
    """Run the tests of capabilities in the packages that match the glob pattern ``packages``, with all capabilities
    switched on. A capability is a use of private parts of torch, which a version of torch may break.

    Write the row of the installed torch into the table, print the capabilities that no passing test verifies, and
    return the exit status 0.
    """
    before, outcomes = TABLE.read_text(encoding="utf-8"), Outcomes()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # the table is put back
    write_row(TABLE, {"torch": str(torch.__version__), "verified": [c.name for c in CAPABILITIES]})
    try:
        # Devices are built in the folder of pytest's cache; -p no:cacheprovider would end their tests in an error.
        options = ["-q", "-m", "capability"]
        pytest.main([*options, *map(str, marked_files(packages))], plugins=[outcomes])
    finally:
        TABLE.write_text(before, encoding="utf-8")
    row = row_of(outcomes)
    # The two are one file unless the package is installed from a wheel.
    for path in {TABLE, SOURCE}:
        write_row(path, row)
    missing = [c.name for c in CAPABILITIES if c.name not in row["verified"]]
    print(f"torch {row['torch']}: {len(row['verified'])} capabilities verified; not: {', '.join(missing) or 'none'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
