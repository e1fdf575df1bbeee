"""The generic lowering, registered with Inductor at the first trace of an op with templates: import does nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

from shiplap.op import registry

__all__ = ["install"]

_installed: set[Any] = set()


def install() -> None:
    """Register the lowering of every op that has templates and none yet."""
    for op in registry.ops():
        if op.templates and not {op.overload, op.raw} <= _installed:
            from shiplap.compat import lowering
            from shiplap.fuse.lower import lower

            for overload in {op.overload, op.raw}:
                lowering.register(overload, partial(lower, op, overload))
                _installed.add(overload)
