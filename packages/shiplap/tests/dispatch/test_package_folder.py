"""Where ``shiplap package`` puts what belongs to an op."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from shiplap.dispatch import Op, registry
from shiplap.dispatch.package_folder import CHOICES, FOLDER, package_folders, packaged_choice_tables

DECLARATION = """
import shiplap as sl
from jaxtyping import Float
from torch import Tensor

@sl.op("test_package::double")
def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + x
"""
PACKAGE = "declares_for_test_package"


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    """An op of a package of its own."""
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").write_text("")
    (tmp_path / PACKAGE / "ops.py").write_text(DECLARATION)
    monkeypatch.syspath_prepend(tmp_path)
    op: Op = import_module(f"{PACKAGE}.ops").double
    yield op
    registry.forget_op(op.spec.name)
    for name in (PACKAGE, f"{PACKAGE}.ops"):
        del sys.modules[name]


def test_the_folder_is_in_the_package_that_declares_the_op(double: Op, tmp_path: Path) -> None:
    assert list(package_folders(double)) == [tmp_path / PACKAGE / FOLDER]


def test_there_are_choices_where_a_table_is(double: Op, tmp_path: Path) -> None:
    (tmp_path / PACKAGE / FOLDER).mkdir()
    table = tmp_path / PACKAGE / FOLDER / CHOICES
    table.write_text("{}")
    assert packaged_choice_tables(double) == [table]


def test_a_package_without_a_table_has_none(double: Op) -> None:
    assert packaged_choice_tables(double) == []


def test_a_program_is_no_package(double: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(double.reference, "__module__", "__main__")
    assert list(package_folders(double)) == []
    monkeypatch.setattr(double.reference, "__module__", "of_no_module")
    assert list(package_folders(double)) == []
