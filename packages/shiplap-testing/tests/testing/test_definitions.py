"""Which definitions use a changed one, and how far the tests are that do."""

from __future__ import annotations

import ast
import subprocess

import pytest

from shiplap_testing.changed import Graph
from shiplap_testing.definitions import ATTRIBUTE, SURE, TO_CLASS, TO_MODULE, WHOLE, read_module

SRC, TESTS = "packages/shiplap-x/src/shiplap_x", "packages/shiplap-x/tests/x"
FILES = {
    f"{SRC}/__init__.py": "",
    f"{SRC}/low.py": '''
LIMIT = 3

def deep():
    """Return the limit, as shallow() does not."""
    return LIMIT

@registered
def found_by_a_table():
    return 1

class Box:
    size: int = 0

    def __enter__(self):
        return self

    def opened_wide(self):
        return deep()
''',
    f"{SRC}/high.py": "from shiplap_x import low\n\ndef middle():\n    return low.deep()\n\ndef shallow(): ...\n",
    f"{TESTS}/conftest.py": """
import pytest
from shiplap_x.high import middle

@pytest.fixture
def made(): return middle()
""",
    f"{TESTS}/test_high.py": """
from shiplap_x.high import middle as m, shallow
from shiplap_x import low
from shiplap_x.low import Box

def test_middle(): m()
def test_shallow(): shallow()
def test_made(made): ...
def test_program(): run("import shiplap_x.high as h; h.middle()")
def test_box():
    with Box(): ...
def test_wide(box): box.opened_wide()

class TestAll:
    def test_inside(self): m()

def test_every(): vars(low)
def test_attribute(): low.Box
""",
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    root = tmp_path_factory.mktemp("repository")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return Graph(root)


def costs(graph: Graph, file: str, text: str) -> dict[str, float]:
    """Return the costs of the ways from the line of ``file`` that begins with ``text`` to each test function."""
    lines = [number for number, line in enumerate(FILES[file].splitlines(), 1) if line.strip().startswith(text)]
    assert len(lines) == 1
    found = graph.test_costs([file], {file: lines})
    return {name.removeprefix(f"{TESTS}/test_high.py::"): cost for name, cost in found.items()}


def test_a_test_that_calls_what_changed_is_nearer_than_one_that_does_not(graph: Graph) -> None:
    found = costs(graph, f"{SRC}/high.py", "def shallow")
    assert found["test_shallow"] == SURE < found["test_middle"]


def test_callers_fixtures_and_texts_of_programs_lead_to_tests(graph: Graph) -> None:
    found = costs(graph, f"{SRC}/low.py", "return LIMIT")
    assert found["test_middle"] == found["TestAll::test_inside"] == 2 * SURE
    assert found["test_made"] == 3 * SURE
    assert found["test_made"] < found["test_program"] < found["test_shallow"]
    further = costs(graph, f"{SRC}/low.py", "LIMIT")
    assert further["test_middle"] == 3 * SURE, "a constant leads to the function that reads it"


def test_a_method_is_used_by_its_name_and_a_special_one_by_its_class(graph: Graph) -> None:
    assert costs(graph, f"{SRC}/low.py", "return deep()")["test_wide"] == ATTRIBUTE
    found = costs(graph, f"{SRC}/low.py", "return self")
    assert found["test_box"] == 2 * SURE < found["test_wide"]
    assert costs(graph, f"{SRC}/low.py", "size")["test_box"] in (SURE, SURE + TO_CLASS)


def test_marks_of_pytest_are_not_attributes_of_the_same_name() -> None:
    text = "@pytest.mark.long\ndef test_a(): ...\ndef test_b(x): x.long()\npytestmark = pytest.mark.device\n"
    definitions = {d.name: d.uses for d in read_module(ast.parse(text), "").definitions}
    assert "@long" in definitions["test_a"]
    assert "@device" in definitions["pytestmark"]
    assert definitions["test_b"] == ("(x", ".long", "x")


def test_code_that_has_a_module_as_a_value_can_use_all_of_it(graph: Graph) -> None:
    found = costs(graph, f"{SRC}/low.py", "def found_by_a_table")
    assert found["test_every"] == WHOLE < found["test_attribute"]


def test_a_definition_that_no_code_names_leads_to_the_tests_of_its_module(graph: Graph) -> None:
    found = costs(graph, f"{SRC}/low.py", "def found_by_a_table")
    assert set(found) >= {"test_middle", "test_shallow", "test_box"}
    assert min(cost for name, cost in found.items() if name != "test_every") > TO_MODULE
    assert found == costs(graph, f"{SRC}/low.py", "@registered"), "a decorator is a line of what it decorates"
