"""What tests cost is added up where they run, and told where all of it is known."""

from pathlib import Path

import pytest

from shiplap_testing import cost
from shiplap_testing.forked import python

TESTS = """
import subprocess, sys, time

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_pays_for_what_all_tests_share():
    pass

def test_works():
    burn(0.2)

def test_waits():
    time.sleep(0.5)

def test_lets_another_work():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"])
"""


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_programs_of_a_test_count_and_waiting_does_not(tmp_path: Path, workers: int) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ("-p", "shiplap_testing.plugin", "-n", workers, "--dearest", 3)
    shown = python("-m", "pytest", "-q", *options, tmp_path / "test_it.py", cwd=tmp_path).stdout
    assert "4 passed" in shown
    lines = shown.partition("the dearest:\n")[2].splitlines()[:3]
    costs = {line.rpartition("::")[2]: float(line.split()[0]) for line in lines}
    assert costs.get("test_waits", 0) < 0.3
    assert 0.5 <= costs["test_lets_another_work"] < 5
    assert 0.2 <= costs["test_works"] < 5


def test_a_suite_that_has_grown_is_told_so() -> None:
    costs = {f"test_{number}": 0.1 for number in range(cost.TESTS + 1)}
    assert "that is too much" not in "\n".join(cost.told(costs, cost.GOAL, 3))
    assert "that is too much" in "\n".join(cost.told(costs, 1.3 * cost.GOAL, 3))
    few = {"test_a": 3.0, "test_b": 4.0}
    assert cost.told(few, 2 * cost.GOAL, 1)[1:] == ["    4.0 s  test_b"], "a part of the suite is compared with nothing"
    shared = "    2.5 s  launchers of sandboxed processes that served several tests"
    assert cost.told(few, 10.0, 1, 2.5)[1:] == [shared, "    4.0 s  test_b"]


def test_costs_are_kept_as_means_of_functions_and_cheap_ones_are_left_out(tmp_path: Path) -> None:
    here, shipped = tmp_path / "here.json", tmp_path / "shipped.json"
    cost.keep({"a.py::test_x[1]": 1.0, "a.py::test_x[2]": 4.0, "b.py::T::test_y": 0.2}, here)
    assert cost.load(here) == {"a.py::test_x": 2.5, "b.py::T::test_y": 0.2}
    cost.keep({**cost.load(here), "c.py::test_z": 9.0}, shipped, least=1.0)
    assert cost.load(shipped) == {"a.py::test_x": 2.5, "c.py::test_z": 9.0}
    assert cost.load(tmp_path / "none.json", here) == cost.load(here)
    shipped.write_text("{")
    assert cost.load(shipped) == {}


def test_the_shipped_costs_are_of_tests_that_take_longer() -> None:
    shipped = cost.load(cost.SHIPPED)
    assert shipped
    assert min(shipped.values()) >= cost.SHIPPED_FROM
