"""Targets resolve to ops; what does not resolve says what was probably meant."""

from __future__ import annotations

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
