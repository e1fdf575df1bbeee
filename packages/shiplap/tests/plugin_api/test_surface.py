"""``shiplap.plugin_api`` is small, documented and cheap to import."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import shiplap
import shiplap.plugin_api
from shiplap.errors import ShiplapError
from shiplap_testing.forked import python

MODULES = [f"shiplap.plugin_api.{p.stem}" for p in sorted(Path(shiplap.plugin_api.__file__).parent.glob("*.py"))]
MODULES = [name.removesuffix(".__init__") for name in MODULES if not name.endswith(".libraries")]


LIGHT = [name for name in MODULES if name not in ("shiplap.plugin_api.rewriting", "shiplap.plugin_api.verbs")]
PROGRAM = """
import sys
from importlib import import_module
for module in ["shiplap", "shiplap.dispatch", *sys.argv[1:]]:
    import_module(module)
    print(module, *{name.split('.')[1] for name in sys.modules if name.startswith('shiplap.')})
"""


def test_an_import_loads_what_it_is_about() -> None:
    """With ``shiplap.plugin_api`` come the rooms that bind kernels; what verbs and rewrites need, comes with them."""
    done = python("-c", PROGRAM, *LIGHT)
    assert done.returncode == 0, done.stderr
    loaded = {name: set(rooms) for name, *rooms in map(str.split, done.stdout.splitlines())}
    assert loaded["shiplap"] == {"lazy_imports"}
    # A program that declares an op has these rooms.
    more = loaded["shiplap.plugin_api"] - loaded["shiplap.dispatch"]
    assert more == {"kernels", "codegen", "plugin_api", "safe_io"}
    assert not loaded["shiplap.plugin_api"] & {"audit", "cli", "doctor", "inductor", "render", "rewrite"}
    # The result of a tuning prints itself: it needs the room that renders.
    assert not loaded[LIGHT[-1]] & {"audit", "doctor", "inductor", "rewrite"}


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_documented(module: str) -> None:
    """A function or class by its own docstring; anything else, as a function of C, in that of its module."""
    imported = import_module(module)
    assert imported.__doc__
    for name in imported.__all__:
        value = getattr(imported, name)
        assert (callable(value) and value.__doc__) or name in imported.__doc__, name


def test_nothing_of_the_public_surface_is_given_twice() -> None:
    given = [name for module in MODULES for name in import_module(module).__all__]
    assert len(given) == len(set(given))
    assert not set(given) & set(shiplap.__all__)


def test_a_library_is_looked_for_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, users = tmp_path / "own", tmp_path / "users"
    for folder in (own, users):
        folder.mkdir()
    monkeypatch.delenv("SHIPLAP_LIBRARY_PATH", raising=False)
    assert shiplap.plugin_api.library_folder() is None
    with pytest.raises(ShiplapError, match="SL401"):
        shiplap.plugin_api.find_library(own / "lib.so")
    (own / "lib.so").touch()
    assert shiplap.plugin_api.find_library(own / "lib.so") == own / "lib.so"
    monkeypatch.setenv("SHIPLAP_LIBRARY_PATH", str(users))
    assert shiplap.plugin_api.library_folder() == users
    assert shiplap.plugin_api.find_library(own / "lib.so") == own / "lib.so"
    (users / "lib.so").touch()
    assert shiplap.plugin_api.find_library(own / "lib.so") == users / "lib.so"
