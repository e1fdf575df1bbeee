"""The runtimes that come with this package: the C++ that generated projects compile, one directory a vendor."""

from __future__ import annotations

from importlib import import_module

from shiplap.extend import error
from shiplap_backend.expression import nearest
from shiplap_backend.runtime import RUNTIMES, Runtime

__all__ = ["runtime"]


def runtime(name: str) -> Runtime:
    """The runtime called ``name``. SL907 if there is none."""
    known = sorted(p.parent.name for p in RUNTIMES.glob("*/__init__.py"))
    if name not in known:
        raise error(
            "SL907",
            where=name,
            got=f"no runtime {name!r}{nearest(name, known)}",
            expected=", ".join(known),
            fix="name one of the expected runtimes",
        )
    module: Runtime = import_module(f"{__name__}.{name}").RUNTIME
    return module
