"""What verbs of other distributions are given beside the console."""

from __future__ import annotations

from pathlib import Path

import pytest

from shiplap.errors import ShiplapError
from shiplap.plugin_api import verbs


def test_a_target_is_a_module_and_a_name(tmp_path: Path) -> None:
    assert verbs.load_target("json") == (__import__("json"), "")
    file = tmp_path / "models.py"
    file.write_text("net = 3\n")
    module, name = verbs.load_target(f"{file}:net")
    assert (module.net, name) == (3, "net")


@pytest.mark.parametrize(
    ("target", "id"), [("no_such_module:net", "SL501"), ("a::b::c", "SL501"), ("namespace::name", "SL501")]
)
def test_a_target_that_is_none_says_so(target: str, id: str) -> None:
    with pytest.raises(ShiplapError) as caught:
        verbs.load_target(target)
    assert caught.value.id == id


def test_a_file_that_raises_says_so(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ShiplapError, match="SL601"):
        verbs.load_target(str(file))
