"""Imports that wait until they are needed, and imports during which nothing is collected."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def uncollected() -> Iterator[None]:
    """Enter a context in which Python's garbage collector is off. At the end it is switched on again if it was on
    before.

    It serves imports. Nearly every object that they make stays, so a collection finds nothing. After ``import torch`` a
    full collection takes as long as the import of shiplap.
    """
    # The state before is restored, since a program may have switched collection off itself.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module ``__getattr__`` for ``package``, which imports a name from its module at its first use. ``homes``
    maps each name to its module.
    """

    def get(name: str) -> Any:
        """Return the object ``name``, imported from its module. Raise ``AttributeError`` if no module is known for the
        name.
        """
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        with uncollected():
            # Packages first: an import of a module takes its lock before that of its package, whose own imports take
            # them in the other order, so that two threads could wait for each other.
            for at, letter in enumerate(home):
                if letter == ".":
                    import_module(home[:at])
            return getattr(import_module(home), name)

    return get
