"""Imports that wait until they are needed, and the collector that waits for imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shiplap.lazy_imports import names, uncollected


@pytest.fixture(params=[True, False], ids=["on", "off"])
def on(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The collector as a user may have it."""
    before = gc.isenabled()
    set_collector(request.param)
    yield request.param
    set_collector(before)


def set_collector(on: bool) -> None:
    (gc.enable if on else gc.disable)()


def test_the_collector_is_afterwards_what_it_was(on: bool) -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == on


def test_it_is_so_after_an_import_that_fails(on: bool) -> None:
    with pytest.raises(ModuleNotFoundError), uncollected():
        import nothing_of_this_name  # noqa: F401
    assert gc.isenabled() == on
    with pytest.raises(ModuleNotFoundError):
        names("package", {"late": "nothing_of_this_name"})("late")
    assert gc.isenabled() == on


def test_a_name_is_that_of_its_home() -> None:
    get = names("package", {"Fraction": "fractions"})
    assert get("Fraction").__module__ == "fractions"
    with pytest.raises(AttributeError, match="module 'package' has no attribute 'Decimal'"):
        get("Decimal")
