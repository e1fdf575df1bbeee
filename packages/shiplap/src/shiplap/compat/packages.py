"""AOTInductor: graphs compiled into packages that run where there is no Python."""

from __future__ import annotations

import sys

__all__ = ["packaging"]


def packaging() -> bool:
    """Whether a package is being made right now. Imports nothing."""
    inductor = sys.modules.get("torch._inductor.virtualized")
    return inductor is not None and bool(inductor.V.aot_compilation)
