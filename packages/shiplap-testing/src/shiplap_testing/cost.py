"""What the tests cost in processor time, of their programs and compilers too: ``make test`` ends with the dearest.

Wall time on a machine that does other work says little, and pytest's ``--durations`` leaves out who computed and who
waited. ``--dearest 10`` adds up what each test used, from its fixtures to their end, and what each worker used in all.
A process that outlives a test is charged to the one during which it ends. Launchers of sandboxed processes that serve
several tests have a line of their own.

A run without a failure keeps the costs of its tests in ``build``, for the order of tests that ``--changed`` selects.
For tests that have not run in this clone there are those of ``costs.json``, which ``python -m shiplap_testing.cost``
writes from the ones in ``build``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from shiplap_testing import forked
from shiplap_testing.paths import REPOSITORY

# The goal for all tests, in processor time, and with how many tests a run counts as one of all: two cores have 910 s in
# 8 minutes, less what they wait.
GOAL, TESTS = 910.0, 6000

KEPT, SHIPPED = REPOSITORY / "build" / "test-costs.json", Path(__file__).with_name("costs.json")
SHIPPED_FROM = 1.0  # seconds: cheaper tests are like those that are not known

_BEGAN = pytest.StashKey[float]()


def used() -> float:
    """Return the seconds of processor time that this process has used. The time of its ended children and of the
    programs that were forked for it is included.
    """
    times = os.times()
    return time.process_time() + times.children_user + times.children_system + forked.spent


def load(*places: Path) -> dict[str, float]:
    """Return a mapping from test functions, such as ``tests/test_a.py::test_b``, to the mean seconds of processor time
    of their cases. They are read from the files ``places``, later ones before earlier ones, or else from the shipped
    file and that of this clone. A file that does not exist, or has been damaged, counts as empty.
    """
    found: dict[str, float] = {}
    for place in places or (SHIPPED, KEPT):
        with suppress(OSError, ValueError):
            read = json.loads(place.read_bytes())
            found |= {f"{file}::{name}": seconds for file, names in read.items() for name, seconds in names.items()}
    return found


def keep(costs: Mapping[str, float], place: Path, least: float = 0.0) -> None:
    """Write the ``costs`` of tests to the file ``place``, as the means of the functions whose cases they are. Functions
    that cost fewer than ``least`` seconds are left out.
    """
    cases: dict[str, list[float]] = defaultdict(list)
    for name, seconds in costs.items():
        cases[name.partition("[")[0]].append(seconds)
    means = {name: round(fmean(seconds), 1) for name, seconds in cases.items()}
    files: dict[str, dict[str, float]] = defaultdict(dict)
    for name in sorted(name for name, mean in means.items() if mean >= least):
        file, _, function = name.partition("::")
        files[file][function] = means[name]
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f"{place.name}.{os.getpid()}")
    beside.write_text(json.dumps(files, indent=0) + "\n", encoding="utf-8")
    beside.replace(place)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--dearest N`` to pytest."""
    parser.addoption(
        "--dearest", type=int, default=0, metavar="N", help="tell the N tests that take the most processor time"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register a plugin if the option ``--dearest`` is given. In a worker of pytest-xdist it measures tests. In the
    first process it also prints their costs at the end.
    """
    if config.getoption("--dearest"):
        config.pluginmanager.register(Worker() if hasattr(config, "workerinput") else Told(config), "shiplap-cost")


class Worker:
    """A pytest plugin that measures the processor time of each test, in the process that runs the tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Record the processor time at the start of ``item``, before its fixtures."""
        item.stash[_BEGAN] = _used_by_tests()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Return the report of one phase of a test. The report of the teardown also gets the processor time of the
        whole test as ``processor_time``, which pytest-xdist sends to the first process.
        """
        report = yield
        if call.when == "teardown":
            now = _used_by_tests()
            report.processor_time = now - item.stash.get(_BEGAN, now)  # xdist takes it to the one who tells
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the processor time of this worker, and that of its launchers, to the first process of the run."""
        # Without pytest-xdist there is no such output, and the values go nowhere.
        output = getattr(session.config, "workeroutput", {})
        output["processor_time"], output["launchers"] = used(), forked.outlived


class Told(Worker):
    """A pytest plugin that adds up the processor time of tests and prints it at the end of the run. ``costs`` maps
    tests to seconds, ``others`` is the sum of the ended workers, ``launchers`` is the part of launchers that served
    several tests, and ``most`` is the number of tests to list.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Create the plugin without any cost. The number of tests to list is the option ``--dearest`` of ``config``."""
        self.most, self.costs = config.getoption("--dearest"), dict[str, float]()
        self.others = self.launchers = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the processor time of a test if ``report`` has one."""
        if (cost := getattr(report, "processor_time", None)) is not None:
            self.costs[report.nodeid] = cost

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Add the processor time of the worker ``node``, which has ended, to the sum over the workers. ``error`` is not
        used.
        """
        output = getattr(node, "workeroutput", {})
        self.others += output.get("processor_time", 0.0)
        self.launchers += output.get("launchers", 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Keep the costs of the tests of this repository if none has failed, beside those of earlier runs."""
        super().pytest_sessionfinish(session)
        if exitstatus == pytest.ExitCode.OK and session.config.rootpath == REPOSITORY:
            ran = {name.partition("[")[0] for name in self.costs}
            others = {name: seconds for name, seconds in load(KEPT).items() if name not in ran}
            keep({**others, **self.costs}, KEPT)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the processor time of the whole run and of its most expensive tests."""
        total = self.others + (time.process_time() if self.others else used())
        for line in told(self.costs, total, self.most, self.launchers + forked.outlived):
            terminalreporter.write_line(line)


def _used_by_tests() -> float:
    """Return the seconds of processor time that this process has used, without those of launchers that had been started
    in an earlier test than the one in which they ended.
    """
    return used() - forked.outlived


def told(costs: dict[str, float], total: float, most: int, launchers: float = 0.0) -> list[str]:
    """Return the lines of the report of ``costs``, which maps tests to their seconds of processor time.

    The report has the ``total`` of the run in seconds, the seconds of ``launchers`` of sandboxed processes that served
    several tests, if there were any, and the ``most`` tests with the highest cost, the highest first.
    If the run has more than ``TESTS`` tests and its total exceeds ``GOAL``, the report ends with a warning.
    """
    lines = [f"processor time: {total:.0f} s, of which {sum(costs.values()):.0f} s in {len(costs)} tests; the dearest:"]
    if launchers:
        lines.append(f"{launchers:7.1f} s  launchers of sandboxed processes that served several tests")
    lines += [f"{cost:7.1f} s  {name}" for name, cost in sorted(costs.items(), key=lambda pair: -pair[1])[:most]]
    if len(costs) > TESTS and total > GOAL:
        lines += [
            f"that is too much: the goal is {GOAL:.0f} s. Make the dearest cheaper, or leave a sample of their cases",
            "in make test (shiplap_testing.effort: sampled; nox -s long runs the rest).",
        ]
    return lines


if __name__ == "__main__":
    keep(load(KEPT), SHIPPED, SHIPPED_FROM)
    sys.exit(0)
