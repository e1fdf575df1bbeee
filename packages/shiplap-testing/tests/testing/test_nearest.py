"""In which order the tests run that ``--changed`` selects, and what ends the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shiplap_testing import nearest
from shiplap_testing.changed import Graph
from shiplap_testing.definitions import Definition, Module
from shiplap_testing.paths import REPOSITORY


def ordered(nodeids: list[str], ranks: dict[str, float]) -> list[str]:
    keys = nearest.order(nodeids, ranks)
    return sorted(nodeids, key=keys.__getitem__)


def test_near_tests_come_first_and_a_first_case_of_another_function_before_a_second_one() -> None:
    ranks = {"a.py::test_near": 1.0, "b.py::test_next": 1.2, "c.py::test_far": 9.0}
    cases = [f"a.py::test_near[{n}]" for n in range(40)]
    found = ordered(["c.py::test_far", *cases, "b.py::test_next", "d.py::test_unknown"], ranks)
    assert found[0] == "a.py::test_near[0]"
    assert found.index("b.py::test_next") < nearest.FIRST_GROUP < found.index("a.py::test_near[39]")
    assert found[-1] == "d.py::test_unknown"


def test_the_tests_of_a_file_follow_each_other_within_a_group_in_their_own_order() -> None:
    names = [f"{file}.py::test_{n}" for file in "ab" for n in range(6)]
    ranks = {name: float(index % 3) for index, name in enumerate(names)}
    assert ordered(names, ranks) in (names, names[6:] + names[:6])
    assert nearest.split(names) == {name: 1 + (index > 5) for index, name in enumerate(names)}


def graph_of(**functions: tuple[str, ...]) -> Any:
    """Return the part of a graph that ranks need, of the files ``a.py`` and so on with the names that the one test of
    each uses.
    """
    modules = {
        f"{file}.py": Module([Definition("test_it", "", 1, 2, uses), Definition("helper", "", 3, 4, ())], {})
        for file, uses in functions.items()
    }
    return SimpleNamespace(modules=modules)


def test_a_cheap_test_comes_before_a_dear_one_and_marks_keep_tests_from_the_first_part() -> None:
    graph: Graph = graph_of(dear=(), cheap=(".device",), late=("@long",), card=("@device",))
    ways = {f"{file}.py::test_it": 2.0 for file in ("dear", "cheap", "late", "card")}
    found = nearest.rank(graph, ["dear.py", "cheap.py", "late.py", "card.py"], ways, {"dear.py::test_it": 30.0})
    assert found["nearest"] == ["cheap.py::test_it", "dear.py::test_it"]
    assert found["nearest_on_device"] == found["on_device"] == ["card.py::test_it"]
    assert set(found["ranks"]) == set(ways)


def test_tests_that_get_the_mark_of_a_device_when_they_are_collected_can_load_one() -> None:
    file = f"{nearest.DEVICE_FOLDER}runtime/test_a.py"
    graph: Any = SimpleNamespace(modules={file: Module([Definition("test_it", "", 1, 2, ("(device",))], {})})
    found = nearest.rank(graph, [file], {}, {})
    assert found["on_device"] == [f"{file}::test_it"]
    conftest = (REPOSITORY / nearest.DEVICE_FOLDER / "conftest.py").read_text("utf-8")
    assert 'item.add_marker("device")' in conftest
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    folder = makefile.partition("DEVICE_TESTS =")[2].partition("\n")[0].split()[-1]
    assert nearest.DEVICE_FOLDER.startswith(f"{folder}/")


@pytest.mark.parametrize(("given", "kept"), [(0, 1), (99, 99)])
def test_a_run_stops_at_the_first_failure_unless_told_otherwise(
    given: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selected = tmp_path / "selected.json"
    selected.write_text(json.dumps({"files": ["tests/test_tools.py"], "nearest": [], "nearest_on_device": []}))
    monkeypatch.setenv(nearest.SELECTED, str(selected))
    monkeypatch.delenv(nearest.PART, raising=False)
    config: Any = SimpleNamespace(
        getoption=lambda name, default="": "main",
        option=SimpleNamespace(maxfail=given),
        invocation_params=SimpleNamespace(args=()),
        stash=pytest.Stash(),
    )
    nearest.pytest_configure(config)
    assert config.option.maxfail == kept
    assert config.args == [str(REPOSITORY / "tests/test_tools.py")]


PROGRAM = "import sys, time; time.sleep({}); print('ended', flush=True); sys.exit({})"


def test_a_failure_interrupts_the_run_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "_command", lambda arguments: [sys.executable, "-c", arguments[-1]])
    forever, fails, passes = PROGRAM.format(600, 0), PROGRAM.format(0, 1), PROGRAM.format(0, 0)
    statuses = nearest._run([[forever]], [fails], goes_on=False)
    assert statuses[0] == 1
    assert len(statuses) == 2
    assert sorted(nearest._run([[passes]], [fails], goes_on=True)) == [0, 1]
    assert nearest._run([[passes]], [], goes_on=False) == [0]
