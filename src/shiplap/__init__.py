"""Shiplap: declare a kernel once, and it is a native, proven part of ``torch.compile``."""

from typing import TYPE_CHECKING, Any

from shiplap.errors import ShiplapError, ShiplapNotice
from shiplap.impl import cabi
from shiplap.op import Op, OpSpec, adopt, op

if TYPE_CHECKING:
    from shiplap.audit import Finding, audit

__version__ = "0.1.0"
__all__ = ["Finding", "Op", "OpSpec", "ShiplapError", "ShiplapNotice", "adopt", "audit", "cabi", "op"]


def __getattr__(name: str) -> Any:
    """The audit is loaded when it is first asked for: declaring and calling ops does not need it."""
    if name in ("Finding", "audit"):
        from importlib import import_module

        module = import_module("shiplap.audit")
        globals().update(Finding=module.Finding, audit=module.audit)  # the package would shadow the function
        return globals()[name]
    raise AttributeError(f"module 'shiplap' has no attribute {name!r}")
