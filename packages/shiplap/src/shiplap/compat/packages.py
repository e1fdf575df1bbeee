"""AOTInductor: graphs compiled into packages that run where there is no Python."""

from __future__ import annotations

import sys

__all__ = ["packaging"]


def packaging() -> bool:
    """Whether a package is being made right now. Known on torch 2.11 to 2.15; imports nothing."""
    inductor = sys.modules.get("torch._inductor.virtualized")
    return inductor is not None and bool(inductor.V.aot_compilation)
