"""Targets resolve to ops; what does not resolve says what was probably meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shiplap.cli import target
from shiplap.errors import ShiplapError
from shiplap_testing.paths import REPOSITORY

OP = """
from jaxtyping import Float
from torch import Tensor
import shiplap as sl

@sl.op("{name}")
def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return 2 * x
"""


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", list(sys.path))


def names(*targets: str) -> list[str]:
    return [op.spec.name for op in target.resolve_targets(targets)]


def failure(text: str) -> ShiplapError:
    with pytest.raises(ShiplapError) as e:
        target.resolve_targets([text])
    return e.value


BOTH = ["cli_targets::scale", "cli_targets::shift"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tests.cli.targets", BOTH),
        ("packages/shiplap/tests/cli/targets.py", BOTH),
        ("tests.cli.targets:scale", BOTH[:1]),
        ("packages/shiplap/tests/cli/targets.py:shift", BOTH[1:]),
        ("tests.cli.targets:cli_targets::shift", BOTH[1:]),
    ],
)
def test_every_form(text: str, expected: list[str]) -> None:
    assert names(text) == expected


def test_qualified_name_and_repetition() -> None:
    assert names("tests.cli.targets:shift", "cli_targets::scale", "packages/shiplap/tests/cli/targets.py") == [
        BOTH[1],
        BOTH[0],
    ]


def test_file_outside_any_package(tmp_path: Path) -> None:
    (tmp_path / "alone_ops.py").write_text(OP.format(name="cli_alone::double"))
    assert names(str(tmp_path / "alone_ops.py")) == ["cli_alone::double"]
    assert "alone_ops" in sys.modules  # under the name by which its neighbours import it


def test_file_named_like_an_installed_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(OP.format(name="cli_shadow::double"))
    assert names(f"{tmp_path}/json.py:double") == ["cli_shadow::double"]
    import json

    assert json.loads("1") == 1


def test_imported_ops_are_not_the_module_s_own(tmp_path: Path) -> None:
    text = "from tests.cli.targets import scale\n" + OP.format(name="cli_importing::double")
    (tmp_path / "importing_ops.py").write_text(text)
    assert names(str(tmp_path / "importing_ops.py")) == ["cli_importing::double"]
    assert names(f"{tmp_path}/importing_ops.py:scale") == ["cli_targets::scale"]  # unless named


MODULE = "a file whose name ends in .py, or the dotted name of a module"


@pytest.mark.parametrize(
    ("text", "id", "what", "expected"),
    [
        (
            "packages/shiplap/tests/cli/target.py",
            "SL501",
            "the file does not exist",
            "did you mean 'packages/shiplap/tests/cli/targets.py'?",
        ),
        ("packages/shiplap/tests/nowhere/ops.py", "SL501", "the file does not exist", "a Python file"),
        (
            "tests.cli.absent",
            "SL501",
            "the module does not exist",
            "an installed module, or one in the current directory",
        ),
        ("tests.cli.targets:scal", "SL501", "no op has this name", "did you mean 'scale'?"),
        ("tests.cli.targets:zzz", "SL501", "no op has this name", "one of scale, shift"),
        ("tests.cli.targets:not_an_op", "SL501", "no op has this name", "one of scale, shift"),
        ("tests.cli.test_app", "SL501", "the target declares no op", "a module that uses sl.op or sl.adopt"),
        ("README.md", "SL501", "the file holds no Python", "a file whose name ends in .py"),
        ("./README.md", "SL501", "the file holds no Python", MODULE),
        (".", "SL501", "the path is not a file", MODULE),
        ("/dev/null", "SL501", "the path is not a file", MODULE),
        ("a:b:c", "SL501", "the target cannot be understood", "module:op, path/to/file.py[:op] or namespace::name"),
    ],
)
def test_wrong_targets(text: str, id: str, what: str, expected: str) -> None:
    e = failure(text)
    assert (e.id, e.what, e.expected) == (id, what, expected)


def test_a_module_that_raises(tmp_path: Path) -> None:
    (tmp_path / "raising_ops.py").write_text("x = 1\nraise KeyError('weights')\n")
    e = failure(str(tmp_path / "raising_ops.py"))
    assert e.id == "SL601"
    assert e.got == f"KeyError: 'weights' ({tmp_path}/raising_ops.py:2)"


def test_a_missing_dependency_is_not_a_missing_target(tmp_path: Path) -> None:
    (tmp_path / "needy_ops.py").write_text("import not_installed_anywhere\n")
    e = failure(str(tmp_path / "needy_ops.py"))
    assert e.id == "SL601"
    assert "No module named 'not_installed_anywhere'" in e.got


def test_a_module_of_the_current_folder_hides_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here_ops.py").write_text(OP.format(name="cli_here::double"))
    (tmp_path / "colorsys.py").write_text("raise SystemExit('a file of the current folder in place of a module')")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert names("here_ops") == ["cli_here::double"]
    assert sys.path[-1] == str(tmp_path)
    import colorsys

    assert colorsys.rgb_to_hls


def test_the_current_folder_is_not_searched_for_an_installed_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shiplap_sparse3d.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert names("shiplap_sparse3d.ops")
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_no_module_comes_from_a_folder_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "stranger_ops.py").write_text(OP.format(name="cli_stranger::double"))
    (shared / "stranger_helper.py").write_text("raise SystemExit('a file of a stranger ran')")
    shared.chmod(mode)
    monkeypatch.chdir(shared)
    e = failure("stranger_ops")
    assert e.id == "SL501"
    assert e.what == "modules of the current folder are not imported, as another user could have written them"
    assert e.got == f"{shared}: it can be written by others (mode {mode:o}); what it holds may be theirs"
    assert e.fix == "name the file of the module, as in ./ops.py, or install its package"
    if mode == 0o777:  # anybody can replace the file
        assert failure("./stranger_ops.py").what == "another user could have written the file"
    else:
        with pytest.warns(match=r"modules beside stranger_ops\.py are not imported: .*/shared: it can be written"):
            assert names("./stranger_ops.py") == ["cli_stranger::double"]
    assert str(shared) not in sys.path


def test_the_command_drops_the_current_folder(tmp_path: Path) -> None:
    """For ``PYTHONPATH`` with an empty entry and for ``python -m``, but not for an entry that names the folder."""
    (tmp_path / "jinja2.py").write_text("print('foreign code')")
    code = "import sys, shiplap_console; shiplap_console.drop_current_folder(); print(sys.path)"
    for command, named in (("-c", ""), ("-m", ""), ("-c", str(tmp_path))):
        (tmp_path / "runs.py").write_text(code)
        paths = os.pathsep.join([*(p for p in sys.path if p and Path(p).name == "src"), named])
        asked = [command, "runs" if command == "-m" else code]
        env = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run([sys.executable, *asked], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert (repr(str(tmp_path)) in done.stdout) == bool(named), (command, done.stdout, done.stderr)
        assert "''" not in done.stdout


def test_the_command_runs_in_a_folder_that_was_removed(tmp_path: Path) -> None:
    code = "import os, sys, shiplap_console as s; os.rmdir(os.getcwd()); s.drop_current_folder(); print(sys.path)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "''" not in done.stdout


def test_the_command_opens_standard_files_that_are_closed(tmp_path: Path) -> None:
    """A file that the command opens would have the number of standard output otherwise."""
    code = """
import os, sys, shiplap_console
shiplap_console.open_standard_files()
number = os.open("result", os.O_WRONLY | os.O_CREAT)
print("for nobody", flush=True)
os.write(1, b"for nobody")
os.write(number, f"{number} {[os.get_inheritable(n) for n in range(3)]} {sys.stdin.read()!r}".encode())
"""
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    assert (tmp_path / "result").read_text() == "3 [True, True, True] ''"


def test_a_path_is_no_module() -> None:
    with pytest.raises(ShiplapError) as e:
        target.import_home("/dev/zero")
    assert (e.value.id, e.value.what) == ("SL501", "the path is not a file")
