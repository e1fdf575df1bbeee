"""``make test ARGS=--changed``: the tests that reach what a branch has changed, the nearest and cheapest first.

A test is the nearer, the shorter the way from a changed definition to it (definitions.py) and the nearer its file
(changed.py). Of equally near ones the cheapest come first, by what tests took when they last ran (cost.py), then those
of other functions and files: a first failure says most if it comes soon. ``python -m shiplap_testing.nearest`` runs the
nearest tests first, alone, so that no other file is imported for them, and then all others. In both parts, tests that
load a device into their process run beside the rest. The first failure ends all of it, unless ``--maxfail`` sets
another number.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from shiplap_testing import cost
from shiplap_testing.changed import Graph, changed_files, changed_lines
from shiplap_testing.definitions import FURTHEST
from shiplap_testing.paths import REPOSITORY
from shiplap_testing.workers import NEAREST, PART

SELECTED = "SHIPLAP_TEST_CHANGED"  # a file with the selection, which a run makes once for all its processes
KEPT = REPOSITORY / "build" / "test-graph.json"
# How many test functions of how many files run alone at first, and by how much each next group of tests is larger than
# the one before it. Within a group, the tests of a file follow each other.
MOST, MOST_FILES, GROWTH = 80, 25, 3
FIRST_GROUP = 12
_PART = pytest.StashKey[str]()
UNKNOWN_COST = 0.3  # seconds of a test that has not run yet
NEVER = {"@gpu", "@long", "@docs"}  # marks of tests that make test leaves out
# The conftest there marks each test that uses its fixture of a device, at once or by another fixture.
DEVICE_FOLDER = "packages/shiplap-backend/tests/backend/"


def select(base: str) -> dict[str, Any]:
    """Return the selection for what differs from the branch ``base``.

    It has the test files, ``files``, the nearest first; the place of test functions in the order, ``ranks``; and the
    functions that run first, ``nearest``. Of those with the mark of tests that load a device, which run apart, the
    first are in ``nearest_on_device``. ``on_device`` has these, and all that get the mark when they are collected.
    """
    graph, changed = Graph(REPOSITORY, KEPT), changed_files(base)
    files = graph.tests(changed)
    return {"files": files, **rank(graph, files, graph.test_costs(changed, changed_lines(base)), cost.load())}


def rank(graph: Graph, files: list[str], ways: dict[str, float], seconds: dict[str, float]) -> dict[str, Any]:
    """Return ``ranks``, ``nearest``, ``nearest_on_device`` and ``on_device`` as :func:`select` does, for the test
    files ``files``. ``ways`` maps test functions to the costs of their ways to a change, and ``seconds`` to the times
    that they take.
    """
    ranks: dict[str, float] = {}
    near: dict[str, list[str]] = {"nearest": [], "nearest_on_device": []}
    on_device = list[str]()
    for place, file in enumerate(files):
        definitions = graph.modules[file].definitions
        of_file = {use for d in definitions if d.name == "pytestmark" for use in d.uses}
        for each in definitions:
            if not each.name.startswith("test"):
                continue
            name = "::".join(filter(None, (file, each.owner, each.name)))
            took = math.log2(1 + 4 * seconds.get(name, UNKNOWN_COST))
            ranks[name] = min(ways.get(name, FURTHEST), FURTHEST) + 0.5 * math.log2(1 + place) + took
            marks = of_file | set(each.uses)
            if ("@device" in marks or file.startswith(DEVICE_FOLDER)) and not marks & NEVER:
                on_device.append(name)
            if "/gpu/" not in file and not marks & NEVER:
                near["nearest_on_device" if "@device" in marks else "nearest"].append(name)
    for names in near.values():
        names.sort(key=lambda name: ranks[name])
        kept = set(list(dict.fromkeys(name.partition("::")[0] for name in names))[:MOST_FILES])
        names[:] = [name for name in names if name.partition("::")[0] in kept][:MOST]
    return {"ranks": ranks, "on_device": on_device, **near}


def order(nodeids: Iterable[str], ranks: dict[str, float]) -> dict[str, tuple[int, float, int]]:
    """Return the sort key of each of the tests ``nodeids``: the number of its group, the rank of the first test of its
    file in that group, and its number among ``nodeids``.

    Each next case of a function, and each next test of a file, is a bit further away than its rank says, so that tests
    of other functions and files come between them. Groups grow: the first one has the ``FIRST_GROUP`` nearest tests.
    """
    cases, files, scored = Counter[str](), Counter[str](), list[tuple[float, int, str]]()
    for number, nodeid in enumerate(nodeids):
        function = nodeid.partition("[")[0]
        scored.append((ranks.get(function, math.inf) + 0.5 * math.log2(1 + cases[function]), number, nodeid))
        cases[function] += 1
    spread = []
    for score, number, nodeid in sorted(scored):
        file = nodeid.partition("::")[0]
        spread.append((score + 0.5 * math.log2(1 + files[file]), number, nodeid))
        files[file] += 1
    groups: dict[str, int] = {}
    first: dict[tuple[int, str], float] = {}
    group, size, left = 0, FIRST_GROUP, FIRST_GROUP
    for score, _, nodeid in sorted(spread):
        if not left:
            group, size = group + 1, size * GROWTH
            left = size
        left -= 1
        groups[nodeid] = group
        first.setdefault((group, nodeid.partition("::")[0]), score)
    return {
        nodeid: (groups[nodeid], first[groups[nodeid], nodeid.partition("::")[0]], number)
        for _, number, nodeid in scored
    }


# ------------------------------------------------------------------------------------------------------------- pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--changed [BRANCH]`` to pytest."""
    parser.addoption(
        "--changed",
        nargs="?",
        const="main",
        default="",
        metavar="BRANCH",
        help="run the tests that reach what differs from the merge base with BRANCH (main), the nearest first",
    )


def pytest_configure(config: pytest.Config) -> None:
    """If the option ``--changed`` is given, let pytest collect only the test files that reach a change. The first
    process of a run selects them and writes them to a file, which its workers read. If none is selected, end the run.
    """
    if not is_used(config):
        return
    config.stash[_PART] = os.environ.get(PART, "")
    if hasattr(config, "workerinput"):
        os.environ.pop(PART, None)  # runs of pytest that tests start have all of their tests
    # The nearest tests come first, so a first failure says most.
    config.option.maxfail = config.option.maxfail or 1
    if not os.environ.get(SELECTED):
        config.add_cleanup(_remove_selection)
        _write_selection(select(config.getoption("--changed")))
    selected = _read_selection()
    names = selected["files"]
    if part(config) == NEAREST:
        nearest = {name.partition("::")[0] for name in selected["nearest"] + selected["nearest_on_device"]}
        names = [name for name in names if name in nearest]
    below = [Path(a.partition("::")[0]).resolve() for a in config.invocation_params.args if Path(str(a)).exists()]
    files = [str(REPOSITORY / name) for name in names]
    kept = [name for name in files if not below or any(Path(name).is_relative_to(folder) for folder in below)]
    if not kept:
        pytest.exit("no test reaches what changed", pytest.ExitCode.NO_TESTS_COLLECTED)
    config.args = kept


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests ``items`` in place if ``--changed`` selects them, as :func:`order` says, and leave out those of
    the other part.
    """
    if not is_used(config):
        return
    selected = _read_selection()
    if this := part(config):
        nearest = set(selected["nearest"] + selected["nearest_on_device"])
        left_out = [item for item in items if (item.nodeid.partition("[")[0] in nearest) != (this == NEAREST)]
        config.hook.pytest_deselected(items=left_out)
        dropped = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in dropped]
    keys = order([item.nodeid for item in items], selected["ranks"])
    items.sort(key=lambda item: keys[item.nodeid])


def split(nodeids: list[str]) -> dict[str, int]:
    """Return a mapping from each of the tests ``nodeids``, in the order in which they run, to the number of times that
    the file changed from one test to the next before it. Tests of one number that follow each other have one file.
    """
    number, last, numbers = 0, "", dict[str, int]()
    for nodeid in nodeids:
        file = nodeid.partition("::")[0]
        number, last = number + (file != last), file
        numbers[nodeid] = number
    return numbers


def part(config: pytest.Config) -> str:
    """Return the part of the selected tests that the run with ``config`` has, or an empty string for all tests."""
    return config.stash.get(_PART, "")


def _write_selection(selected: dict[str, Any]) -> None:
    """Write ``selected`` to a new file, and its path to the environment."""
    handle, os.environ[SELECTED] = tempfile.mkstemp(prefix="shiplap-changed-", suffix=".json")
    with os.fdopen(handle, "w") as file:
        json.dump(selected, file)


def _read_selection() -> dict[str, Any]:
    """Return the selection that the first process of this run has written."""
    selected: dict[str, Any] = json.loads(Path(os.environ[SELECTED]).read_text())
    return selected


def _remove_selection() -> None:
    """Remove the file with the selection, and the environment variable with its path."""
    if written := os.environ.pop(SELECTED, ""):
        Path(written).unlink(missing_ok=True)


def is_used(config: pytest.Config) -> bool:
    """Return whether ``--changed`` selects the tests of this run, so that their order must be kept."""
    return bool(config.getoption("--changed", ""))


# ---------------------------------------------------------------------------------------------------------- make test


def main(arguments: list[str]) -> int:
    """Run the tests that reach what differs from a branch, the nearest ones before all others, and return the status of
    the first run that fails, or the best one of all.

    The ``arguments`` are those of both runs of pytest, with ``--changed``, those of the run without a device, and those
    of the run that loads one, with ``--`` between them.
    """
    first = arguments.index("--")
    second = arguments.index("--", first + 1)
    both, plain, device = arguments[:first], arguments[first + 1 : second], arguments[second + 1 :]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--changed", nargs="?", const="main", default="main")
    goes_on = any(argument.startswith("--maxfail") for argument in both)
    try:
        selected = select(parser.parse_known_args(both)[0].changed)
        _write_selection(selected)
        known = set(selected["ranks"])
        nearest = set(selected["nearest"] + selected["nearest_on_device"])
        statuses = [int(pytest.ExitCode.NO_TESTS_COLLECTED)]
        for named, functions in ((NEAREST, nearest), ("others", known - nearest)):
            os.environ[PART] = named
            # Each run leaves out the tests of the other one by their marks.
            on_device = functions & set(selected["on_device"])
            runs = [[*plain, *both]] if functions else []
            statuses += _run(runs, [*device, *both] if on_device else [], goes_on=goes_on)
            if not goes_on and max(statuses, key=_is_failure) not in PASSED:
                break
        return next((status for status in statuses if _is_failure(status)), min(statuses))
    finally:
        _remove_selection()
        os.environ.pop(PART, None)


PASSED = (int(pytest.ExitCode.OK), int(pytest.ExitCode.NO_TESTS_COLLECTED))


def _is_failure(status: int) -> bool:
    """Return whether a run of pytest with this ``status`` failed."""
    return status not in PASSED


def _run(plain: list[list[str]], device: list[str], *, goes_on: bool) -> list[int]:
    """Run pytest with the arguments ``plain``, if any, and beside it with ``device``, unless that is empty. Return
    their statuses, in the order in which they end.

    The output of the second run comes when both have ended. If one fails, the other is interrupted unless ``goes_on``.
    """
    statuses: list[int] = []
    with tempfile.TemporaryFile() as output:
        running = [subprocess.Popen(_command(arguments)) for arguments in plain]
        if device:
            running.append(subprocess.Popen(_command(device), stdout=output, stderr=subprocess.STDOUT))
        while running:
            time.sleep(0.1)
            for process in [process for process in running if process.poll() is not None]:
                running.remove(process)
                statuses.append(process.returncode)
                for other in running if _is_failure(process.returncode) and not goes_on else ():
                    _interrupt(other)
        output.seek(0)
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
    return statuses


def _command(arguments: list[str]) -> list[str]:
    """Return the command that runs pytest with ``arguments``."""
    return [sys.executable, "-m", "pytest", "-q", *arguments]


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the run of pytest ``process``, so that it ends its workers, and wait for its end. Terminate it if it
    takes more than ten seconds.
    """
    process.send_signal(signal.SIGINT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
