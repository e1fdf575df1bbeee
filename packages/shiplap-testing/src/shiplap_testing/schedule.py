"""Which tests a worker of pytest-xdist runs: a file of tests stays with one worker.

A test that loads a device changes the process, so one worker runs all of these and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from shiplap_testing import nearest
from shiplap_testing.forked import shared

ON_DEVICE = "on a device: "  # begins the names of units whose tests load a device

# Tests of a minute or so on an accelerator: they are spread one by one, and begin before all others, in this order.
ALONE = (
    "one_file_on_cuda",  # beside tests of the CPU, in one file, as are the next and those that end likewise
    "its_example_on_cuda",
    "for_eight_voxel_counts",
    "what_it_is_on_the_cpu",
    "_audit",  # in a file whose other tests take seconds
    "is_packaged",
    "test_compiled",
    "is_named_on_cuda",
    "reduce_overhead",
    "for_an_example",
    "every_config_of",
    "is_captured_or",
    "trains_on_cuda",
)


def place_alone(nodeid: str) -> int | None:
    """Return the place of the test ``nodeid`` among those that take about a minute on an accelerator, from 0 for the
    longest. Such a test is scheduled on its own and before all others. Return None for any other test.
    """
    folder, _, name = nodeid.partition("[")[0].rpartition("/")
    if not (folder.endswith("/gpu") or name.endswith("_on_cuda")):
        return None
    return next((place for place, part in enumerate(ALONE) if part in name), None)


def is_alone(nodeid: str) -> bool:
    """Return whether the test ``nodeid`` takes about a minute on an accelerator."""
    return place_alone(nodeid) is not None


def keep_tests_on_device(nodeids: Iterable[str]) -> None:
    """Write the ids of the tests that load a device for the process that distributes the tests of this run."""
    place = Path(shared(), "on_device")
    beside = place.with_name(f"{place.name}.{os.getpid()}")
    beside.write_text(json.dumps([*nodeids]), encoding="utf-8")
    beside.replace(place)


def unit_of(nodeid: str) -> str:
    """Return the name of the unit that holds the test ``nodeid``. A unit is a group of tests that one worker runs.

    The unit of a test is its file, or the folder ``tests/judge``, whose files share a process that is slow to start. In
    a folder ``gpu`` of tests for accelerators it is a test function, or a single test if that takes about a minute.
    """
    if is_alone(nodeid):
        return nodeid
    function, file = nodeid.partition("[")[0], nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    if folder.endswith("/tests/judge"):
        return folder
    return function if folder.endswith("/gpu") and not folder.endswith("/tests/gpu") else file


def refuse_worker(scheduler: Any, node: Any) -> None:
    """Report a failed collection and end the worker ``node``, which takes the place of one that has crashed and has
    collected other tests. No test can be assigned to it.

    Units that wait in ``scheduler`` and that no other worker may run are dropped, since the run would wait for them
    without an end.
    """
    others = [each for each in scheduler.nodes if each is not node and not each.shutting_down]

    def has_worker(unit: str) -> bool:
        """Return whether one of ``others`` may run ``unit``. One that has run nothing may still load a device."""
        for each in others:
            of_its_kind = unit.startswith(ON_DEVICE) == (each is scheduler.loader)
            if scheduler.numnodes == 1 or of_its_kind or not scheduler.assigned_work[each]:
                return True
        return False

    lost = [unit for unit in scheduler.workqueue if not has_worker(unit)]
    waiting = {unit: [*scheduler.workqueue.pop(unit).values()] for unit in lost}
    text = f"{node.gateway.id} takes the place of a worker that has crashed, and has collected other tests."
    text += " Not run: " + ", ".join(unit for unit, completed in waiting.items() if not all(completed))
    report = pytest.CollectReport(nodeid=node.gateway.id, outcome="failed", longrepr=text, result=[])
    scheduler.config.hook.pytest_collectreport(report=report)
    node.shutdown()


def _pending_tests(units: Iterable[Mapping[str, bool]]) -> list[str]:
    """Return the ids of the tests of ``units`` that are not completed. A unit maps the id of each of its tests to
    whether the test is completed.
    """
    return [nodeid for unit in units for nodeid, completed in unit.items() if not completed]


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that gives each unit of tests (see :func:`unit_of`) to one worker.

    Of several workers, one runs the tests that load a device, and the others run all other tests.

    A test that ends its worker is not run again, whereas pytest-xdist would give it to one worker after another.
    """
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        numbers: Mapping[str, int] = {}
        loader: Any = None  # the worker that runs the tests that load a device

        @cached_property
        def on_device(self) -> frozenset[str]:
            """The ids of the tests that load a device, as the first worker has listed them."""
            return frozenset(json.loads(Path(shared(), "on_device").read_text(encoding="utf-8")))

        def _split_scope(self, nodeid: str) -> str:
            """Return the unit of the test ``nodeid``, which pytest-xdist hands out as a whole. If ``--changed`` selects
            the tests, that is the tests of a file that follow each other.
            """
            if nearest.is_used(config):
                self.numbers = self.numbers or nearest.split(self.collection)
                return f"{unit_of(nodeid)} {self.numbers[nodeid]}"
            return ON_DEVICE * (nodeid in self.on_device) + unit_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            """Assign the next units that the worker ``node`` may run to it, until it has two tests. End the worker if
            there are none.

            A worker begins a test only when it knows the next one. Do nothing if the worker, which takes the place of
            one that has crashed, has not listed the tests yet.
            """
            while node in self.registered_collections:
                if not (units := self._units_for(node)):
                    node.shutdown()
                    return
                # What waits behind a test of a minute begins late: the last unit, which is short.
                long = any(map(is_alone, _pending_tests(self.assigned_work[node].values())))
                self.workqueue.move_to_end(units[-1 if long else 0], last=False)
                super()._assign_work_unit(node)
                if self._pending_of(self.assigned_work[node]) > 1:
                    return

        def _units_for(self, node: Any) -> list[str]:
            """Return the names of the waiting units that the worker ``node`` may run, the next one first."""
            if self.numnodes == 1:
                return [*self.workqueue]
            kinds: dict[bool, list[str]] = {True: [], False: []}
            for name in self.workqueue:
                kinds[name.startswith(ON_DEVICE)].append(name)
            # One that has run nothing: the first of all, or one in place of a worker that has crashed.
            if kinds[True] and self.loader not in self.assigned_work and not self.assigned_work[node]:
                self.loader = node
            return kinds[node is self.loader]

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            """Record the tests that the worker ``node`` has collected, or refuse them (see :func:`refuse_worker`)."""
            super().add_node_collection(node, collection)
            if node not in self.registered_collections:
                refuse_worker(self, node)

        def remove_node(self, node: Any) -> str | None:
            """Mark the test during which the worker ``node`` ended as completed, so that no other worker runs it.
            Return the id of that test, or None if the worker had no test left.
            """
            units = self.assigned_work[node].values()
            left = [(unit, nodeid) for unit in units for nodeid, completed in unit.items() if not completed]
            if left:
                unit, crashed = left[0]
                # Another worker would crash in the same test.
                unit[crashed] = True
            super().remove_node(node)
            return left[0][1] if left else None

    return Files(config, log)
