"""``shiplap build``: bindings of a module, ops that Python serves, and bindings that cannot be built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shiplap_testing.zoo import good

NATIVE = "shiplap_testing.zoo.good:saxpy"
MODULE = """
import shiplap as sl
from jaxtyping import Float
from torch import Tensor

@sl.op("{ns}::plain")
def plain(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + 1

@plain.kernel("cpu")
def _(x):
    return x + 1
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    yield
    good.saxpy.drop_native()


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_binding_is_built_and_attached(run: Any) -> None:
    result = run("build", NATIVE, "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["ops"]
    assert Path(row["library"]).is_file()
    assert good.saxpy.native is not None
    # Another test of the same worker may have loaded the same binding from its own cache: the key is what both share.
    assert good.saxpy.native.library.parent.name == Path(row["library"]).parent.name


def test_an_op_that_python_serves_is_no_failure(run: Any, tmp_path: Path, ns: str) -> None:
    file = tmp_path / f"{ns}_ops.py"
    file.write_text(MODULE.format(ns=ns))
    result = run("build", file)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{ns}::plain  Python, SL404: ")


def test_a_binding_that_cannot_be_built_is_exit_status_1(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    result = run("build", NATIVE)
    assert result.exit_code == 1, result.output
    first, *others = result.stdout.splitlines()
    assert first.startswith("zoo_good::saxpy  SL405: ")
    assert [line.split()[0] for line in others] == ["expected", "fix"]
    assert others[0] == "  expected a C++20 compiler"


def test_a_target_that_does_not_exist_is_exit_status_2(run: Any) -> None:
    assert run("build", "nowhere.py").exit_code == 2
