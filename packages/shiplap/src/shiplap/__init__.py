"""Shiplap: declare a kernel once, and it is a native, proven part of ``torch.compile``."""

from __future__ import annotations

import sys
from importlib import import_module
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shiplap.lazy_imports import names, uncollected

if TYPE_CHECKING:
    from shiplap.audit import Finding, Report, audit
    from shiplap.declare import OpSpec
    from shiplap.declare.values import Opaque
    from shiplap.dispatch.adopt import adopt
    from shiplap.dispatch.op import Op, op
    from shiplap.doctor import Diagnosis, doctor
    from shiplap.errors import ShiplapError, ShiplapNotice
    from shiplap.inductor import Explanation, explain
    from shiplap.judge import judge
    from shiplap.kernels.c.checked import cabi
    from shiplap.kernels.c.source import source
    from shiplap.kernels.triton.declaration import triton
    from shiplap.rewrite import rewrite, rewrites
    from shiplap.tuning import freeze, tune

__version__ = "0.1.0"
__all__ = [
    "Diagnosis",
    "Explanation",
    "Finding",
    "Op",
    "OpSpec",
    "Opaque",
    "Report",
    "ShiplapError",
    "ShiplapNotice",
    "adopt",
    "audit",
    "cabi",
    "doctor",
    "explain",
    "freeze",
    "judge",
    "op",
    "rewrite",
    "rewrites",
    "source",
    "triton",
    "tune",
]

# Each name is imported from its module when it is first used. The launcher of sandboxed processes uses none of them.
_LATE = {
    "Diagnosis": "shiplap.doctor",
    "Explanation": "shiplap.inductor",
    "Finding": "shiplap.audit",
    "Op": "shiplap.dispatch.op",
    "OpSpec": "shiplap.declare",
    "Opaque": "shiplap.declare.values",
    "Report": "shiplap.audit",
    "ShiplapError": "shiplap.errors",
    "ShiplapNotice": "shiplap.errors",
    "adopt": "shiplap.dispatch.adopt",
    "audit": "shiplap.audit",
    "cabi": "shiplap.kernels.c.checked",
    "doctor": "shiplap.doctor",
    "explain": "shiplap.inductor",
    "freeze": "shiplap.tuning",
    "judge": "shiplap.judge",
    "op": "shiplap.dispatch.op",
    "rewrite": "shiplap.rewrite",
    "rewrites": "shiplap.rewrite",
    "source": "shiplap.kernels.c.source",
    "triton": "shiplap.kernels.triton.declaration",
    "tune": "shiplap.tuning",
}
# Public modules, which are attributes without an import of their own.
_ROOMS = {"errors": "shiplap.errors", "tuning": "shiplap.tuning"}
_late = names(__name__, _LATE)
_IMPORTING = RLock()


class _Package(ModuleType):
    """The type of the module ``shiplap``, which imports the names of ``_LATE`` at their first use.

    ``audit``, ``doctor``, ``judge`` and ``rewrite`` are functions and also packages. When any code imports
    ``shiplap.audit``, Python binds that package to the name ``audit`` of ``shiplap``. ``sl.audit(op)`` would then call
    a module. This class controls what is bound, so that the function keeps the name.
    """

    def __setattr__(self, name: str, value: object) -> None:
        """Bind a name of the package. A submodule that Python has imported does not replace the public function of the
        same name. When ``shiplap.dispatch`` is bound, the hooks of ops are installed.
        """
        if not (name in _LATE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)
        if name == "dispatch":  # from now on, ops can be declared
            with uncollected():
                import_module("shiplap.hooks")

    def __getattr__(self, name: str) -> Any:
        """Return the public name or module ``name``. A name of ``_LATE`` is imported from its module at its first use
        and bound to the package. Raise ``AttributeError`` for other names.
        """
        if name in _ROOMS:
            return import_module(_ROOMS[name])
        # One thread at a time: two that import modules of one package in another order would wait for each other.
        with _IMPORTING:
            value = _late(name)
            setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        """Return the sorted attribute names of the package, including the public names that are not imported yet."""
        return sorted({*super().__dir__(), *_LATE, *_ROOMS})


# Only a class of the module can refuse an assignment: a module's own __getattr__ sees missing names alone.
sys.modules[__name__].__class__ = _Package
