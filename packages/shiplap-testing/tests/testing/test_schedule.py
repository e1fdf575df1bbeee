"""Which worker runs which tests."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shiplap_testing import forked, schedule

TESTS = ["a.py::test_1", "b.py::test_1", "b.py::test_2", "c.py::test_1", "d.py::test_1", "e.py::test_1", "f.py::test_1"]
ON_DEVICE = {"b.py::test_2", "d.py::test_1", "e.py::test_1"}


class Node:
    """A worker that only notes which tests it is given, and whether it is ended."""

    def __init__(self, name: str) -> None:
        self.gateway, self.shutting_down, self.given = SimpleNamespace(id=name), False, list[str]()

    def send_runtest_some(self, numbers: list[int]) -> None:
        assert not self.shutting_down
        self.given += [TESTS[number] for number in numbers]

    def shutdown(self) -> None:
        self.shutting_down = True


class Run:
    """A run of ``TESTS`` with ``count`` workers."""

    def __init__(self, count: int) -> None:
        config: Any = SimpleNamespace(
            getvalue=lambda name: ["popen"] * count,
            getoption=lambda name, default=None: default,
            option=SimpleNamespace(loadscopereorder=False),
            hook=SimpleNamespace(pytest_collectreport=lambda report: self.failed.append(report.longrepr)),
        )
        self.failed = list[str]()
        self.scheduler, self.nodes = schedule.make_scheduler(config, None), [Node(f"gw{n}") for n in range(count)]
        for node in self.nodes:
            self.begin(node)
        self.scheduler.schedule()

    def begin(self, node: Node) -> None:
        self.scheduler.add_node(node)
        self.scheduler.add_node_collection(node, TESTS)

    def go_on(self) -> None:
        """Run all tests that the workers are given."""
        done = {id(node): 0 for node in self.nodes}
        while any(len(node.given) > done[id(node)] for node in self.nodes):
            for node in self.nodes:
                for nodeid in node.given[done[id(node)] :]:
                    self.scheduler.mark_test_complete(node, TESTS.index(nodeid))
                    done[id(node)] += 1


@pytest.fixture(autouse=True)
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forked.FOLDER, str(tmp_path))
    schedule.keep_tests_on_device(sorted(ON_DEVICE))


@pytest.mark.parametrize("count", [2, 4])
def test_one_worker_runs_all_that_loads_a_device_and_nothing_else(count: int) -> None:
    run = Run(count)
    run.go_on()
    ran = [set(node.given) for node in run.nodes]
    assert sorted(chain.from_iterable(node.given for node in run.nodes)) == TESTS
    assert ON_DEVICE in ran
    assert all(tests == ON_DEVICE or tests.isdisjoint(ON_DEVICE) for tests in ran)
    assert all(node.shutting_down for node in run.nodes)
    assert run.scheduler.tests_finished


def test_a_single_worker_runs_everything() -> None:
    run = Run(1)
    run.go_on()
    assert sorted(run.nodes[0].given) == TESTS


def test_what_waits_behind_a_test_of_a_minute_is_the_last_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "is_alone", lambda nodeid: nodeid in ("a.py::test_1", "c.py::test_1"))
    run = Run(2)
    (given,) = [node.given for node in run.nodes if node is not run.scheduler.loader]
    assert given[:2] == ["a.py::test_1", "f.py::test_1"]
    run.go_on()
    assert sorted(chain.from_iterable(node.given for node in run.nodes)) == TESTS


def test_a_worker_that_has_ended_in_a_test_of_a_device_has_a_successor() -> None:
    run = Run(2)
    (loader,) = [node for node in run.nodes if ON_DEVICE & {*node.given}]
    crashed = loader.given[0]
    assert run.scheduler.remove_node(loader) == crashed
    run.nodes.remove(loader)
    run.nodes.append(Node("gw2"))
    run.scheduler.add_node(run.nodes[-1])
    run.scheduler.schedule()  # another worker has ended before this one has listed its tests
    assert not run.nodes[-1].given
    run.scheduler.add_node_collection(run.nodes[-1], TESTS)
    run.scheduler.schedule()
    run.go_on()
    assert {*run.nodes[-1].given} == ON_DEVICE - {crashed}
    assert sorted(run.nodes[0].given) == sorted({*TESTS} - ON_DEVICE)


@pytest.mark.parametrize(("count", "of_device"), [(2, True), (2, False), (3, True), (3, False)])
def test_a_successor_that_collects_other_tests_fails_the_run_and_ends_it(count: int, of_device: bool) -> None:
    run = Run(count)
    crashed = next(node for node in run.nodes if (node is run.scheduler.loader) == of_device)
    first = crashed.given[0]
    run.scheduler.remove_node(crashed)
    run.nodes.remove(crashed)
    successor = Node("gw9")
    run.scheduler.add_node(successor)
    run.scheduler.add_node_collection(successor, TESTS[1:])
    run.scheduler.schedule()
    run.go_on()
    assert run.scheduler.tests_finished, "else the run would wait without an end"
    assert successor.shutting_down
    assert not successor.given
    (text,) = run.failed
    assert "collected other tests" in text
    lost = {*TESTS} - {first} - {*chain.from_iterable(node.given for node in run.nodes)}
    assert lost or count > 2
    units = {schedule.ON_DEVICE * (test in ON_DEVICE) + test.partition("::")[0] for test in lost}
    assert {*text.partition("Not run: ")[2].split(", ")} - {""} == units
