"""Which tests ``--changed`` selects: those that reach what changed, however it is imported, the nearest first."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shiplap_testing.changed import Graph, changed_files, changed_lines

SRC, TESTS = "packages/shiplap-x/src/shiplap_x", "packages/shiplap-x/tests/x"
FILES = {
    f"{SRC}/__init__.py": "from shiplap_x.eager import first\n_LATE = {'late': 'shiplap_x.lazy'}\n",
    f"{SRC}/eager.py": "def first(): ...\n",
    f"{SRC}/lazy.py": "def late():\n    from shiplap_x import inner\n    return 'kernel.jinja'\n",
    f"{SRC}/inner.py": "import shiplap_x.base\n",
    f"{SRC}/base.py": "def g(): ...\n",
    f"{SRC}/kernel.jinja": "text\n",
    f"{SRC}/data/names.yaml": "text\n",
    f"{SRC}/verbs/__init__.py": "import importlib\n\ndef load(n):\n    importlib.import_module(f'{__name__}.{n}')\n",
    f"{SRC}/verbs/one.py": "X = 1\n",
    f"{TESTS}/test_base.py": "",
    f"{TESTS}/test_eager.py": "from shiplap_x import first\n",
    f"{TESTS}/test_lazy.py": "import shiplap_x as x\n\ndef test():\n    x.late()\n",
    f"{TESTS}/test_verbs.py": "from shiplap_x import verbs\n",
    f"{TESTS}/test_program.py": "P = 'import torch; from shiplap_x.inner import f'\nQ = 'program.py'\n",
    f"{TESTS}/program.py": "",
    f"{TESTS}/conftest.py": "from shiplap_x import base\n",
    f"{TESTS}/sub/test_fixture.py": "",
    "packages/shiplap/src/shiplap/room/far.py": "",
    "packages/shiplap/src/shiplap/room/through.py": "import shiplap.room.far\n",
    "packages/shiplap/tests/gpu/test_card.py": "import shiplap.room.far\n",
    "packages/shiplap/tests/other/test_near.py": "import shiplap.room.far\n",
    "packages/shiplap-a/tests/a/test_family.py": "import shiplap.room.far\n",
    "packages/shiplap/tests/room/test_room.py": "import shiplap.room.through\n",
    "packages/shiplap-testing/src/shiplap_testing/plugin.py": (
        "import pytest\n\n@pytest.fixture\ndef run():\n    from shiplap.cli.app import app\n"
    ),
    "packages/shiplap/src/shiplap/cli/app.py": "",
    "packages/shiplap/tests/cli/test_verb.py": "def test(run): ...\n",
    "packages/shiplap/tests/cli/test_plain.py": "def test(ran): ...\n",
    "packages/shiplap/src/shiplap/tuned/merge_tables.py": "",
    "packages/shiplap/src/shiplap/verbs/merge.py": "import shiplap.tuned.merge_tables\n",
    "packages/shiplap/tests/others/test_all.py": "import shiplap.tuned.merge_tables\nimport shiplap.room.far\n",
    "packages/shiplap/tests/others/test_whole.py": "import shiplap.tuned.merge_tables\n",
    "packages/shiplap/tests/verbs/test_merge.py": "import shiplap.verbs.merge\n",
    "packages/shiplap/tests/zoo/test_named.py": "import shiplap.room.through\n\nCHECK = 'far'\n",
    "packages/shiplap/src/shiplap/looks/compile.py": "",
    "packages/shiplap/src/shiplap/looks/other.py": "",
    "packages/shiplap/tests/looks/test_alone.py": "import shiplap.looks.compile\n",
    "packages/shiplap/tests/looks/test_compiler.py": "import shiplap.looks.compile\nimport shiplap.looks.other\n",
    "packages/shiplap/src/shiplap/copied/__init__.py": "",
    "packages/shiplap/src/shiplap/copied/common/part.py": "from . import inner\n",
    "packages/shiplap/src/shiplap/copied/common/inner.py": "",
    "packages/shiplap-a/src/a_plugin/__init__.py": "",
    "packages/shiplap/tests/copied/test_copies.py": "import shiplap.copied\n",
}


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, *arguments], cwd=root, capture_output=True, check=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "all")
    return root


@pytest.fixture(scope="module")
def graph(root: Path) -> Graph:
    return Graph(root)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("eager.py", {"test_eager.py", "test_lazy.py", "test_verbs.py", "test_program.py"}),
        ("lazy.py", {"test_lazy.py"}),
        ("inner.py", {"test_program.py", "test_lazy.py"}),
        ("kernel.jinja", {"test_lazy.py"}),
        ("verbs/one.py", {"test_verbs.py"}),
    ],
)
def test_a_change_selects_the_tests_that_reach_it(graph: Graph, changed: str, tests: set[str]) -> None:
    assert {name.rpartition("/")[2] for name in graph.tests([f"{SRC}/{changed}"])} >= tests
    if changed != "eager.py":  # which the package imports, and with it every test of the package
        assert {name.rpartition("/")[2] for name in graph.tests([f"{SRC}/{changed}"])} == tests


def test_the_test_of_the_same_name_comes_first_and_fixtures_count(graph: Graph) -> None:
    selected = [name.rpartition("/")[2] for name in graph.tests([f"{SRC}/base.py"])]
    assert selected[0] == "test_base.py"
    assert "test_fixture.py" in selected


def test_the_tests_of_the_same_room_come_first_and_those_on_accelerators_last(graph: Graph) -> None:
    selected = [name.rpartition("/")[2] for name in graph.tests(["packages/shiplap/src/shiplap/room/far.py"])]
    # Checks and verbs are named by a string.
    named = "test_named.py"
    assert selected == ["test_room.py", named, "test_near.py", "test_all.py", "test_family.py", "test_card.py"]


def test_a_word_of_the_name_counts_and_of_two_equally_near_the_one_that_names_less_comes_first(graph: Graph) -> None:
    selected = graph.tests(["packages/shiplap/src/shiplap/tuned/merge_tables.py"])
    assert [name.rpartition("/")[2] for name in selected] == ["test_merge.py", "test_whole.py", "test_all.py"]


def test_a_word_that_begins_another_counts_as_the_same(graph: Graph) -> None:
    selected = graph.tests(["packages/shiplap/src/shiplap/looks/compile.py"])
    assert [name.rpartition("/")[2] for name in selected] == ["test_compiler.py", "test_alone.py"]


def test_a_fixture_of_the_plugin_is_used_where_a_test_takes_it(graph: Graph) -> None:
    assert graph.tests(["packages/shiplap/src/shiplap/cli/app.py"]) == ["packages/shiplap/tests/cli/test_verb.py"]


def test_a_helper_of_a_test_selects_it_and_an_unnamed_file_belongs_to_its_folder(graph: Graph) -> None:
    assert graph.tests([f"{TESTS}/program.py"]) == [f"{TESTS}/test_program.py"]
    assert f"{TESTS}/test_eager.py" in graph.tests([f"{SRC}/data/names.yaml"])
    assert graph.tests(["README.md"]) == []


def test_a_module_that_no_file_names_belongs_to_the_package_around_it(graph: Graph) -> None:
    copied = "packages/shiplap/src/shiplap/copied/common/part.py"
    assert graph.tests([copied]) == ["packages/shiplap/tests/copied/test_copies.py"]
    used_by_it = "packages/shiplap/src/shiplap/copied/common/inner.py"
    assert graph.tests([used_by_it]) == ["packages/shiplap/tests/copied/test_copies.py"]


def test_a_module_that_no_test_reaches_has_the_tests_of_its_distribution(graph: Graph) -> None:
    alone = "packages/shiplap-a/src/a_plugin/__init__.py"
    assert graph.tests([alone]) == ["packages/shiplap-a/tests/a/test_family.py"]


def test_what_changed_is_committed_on_the_branch_edited_or_new(root: Path) -> None:
    git(root, "checkout", "-q", "-b", "branch")
    (root / SRC / "base.py").write_text("def g(): return 1\n")
    git(root, "commit", "-q", "-a", "-m", "more")
    (root / SRC / "inner.py").write_text("")
    (root / SRC / "new.py").write_text("")
    assert changed_files("main", root) == [f"{SRC}/{name}" for name in ("base.py", "inner.py", "new.py")]
    with pytest.raises(pytest.UsageError, match="no-such-branch"):
        changed_files("no-such-branch", root)


def test_the_lines_that_changed_are_those_of_the_working_tree(root: Path) -> None:
    git(root, "checkout", "-q", "main")
    git(root, "checkout", "-q", "-b", "lines")
    (root / SRC / "eager.py").write_text("X = 1\n\ndef first(): ...\n\ndef second(): ...\n")
    git(root, "commit", "-q", "-a", "-m", "lines")
    git(root, "branch", "-q", "-f", "before")
    (root / SRC / "eager.py").write_text("X = 2\n\ndef first(): ...\n")
    assert changed_lines("before", root) == {f"{SRC}/eager.py": {1, 3, 4}}
    git(root, "checkout", "-q", "-f", "main")


def test_what_was_read_is_kept_and_an_edited_file_is_read_again(root: Path, tmp_path: Path) -> None:
    kept, edited = tmp_path / "graph.json", root / TESTS / "test_base.py"
    first = Graph(root, kept)
    again = Graph(root, kept)
    assert (again.users, again.uses, again.modules) == (first.users, first.uses, first.modules)
    edited.write_text("from shiplap_x.inner import g\n\ndef test_g(): ...\n")
    now = Graph(root, kept)
    assert f"{TESTS}/test_base.py" in now.users[f"{SRC}/inner.py"]
    assert [d.name for d in now.modules[f"{TESTS}/test_base.py"].definitions] == ["test_g", ""]
    kept.write_text("damaged")
    assert Graph(root, kept).users == now.users
    edited.write_text("")
