"""The generic lowering, registered with Inductor at the first trace of an op with templates: import does nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

from shiplap.op import Op, digest, registry
from shiplap.op.source import source_digest

__all__ = ["install"]

_installed: set[Any] = set()
_code: list[str] = []  # digest of the lowering itself, once it is loaded


def install() -> None:
    """Register the lowering of every op that has templates and none yet."""
    for op in registry.ops():
        if op.templates and not {op.overload, op.raw} <= _installed:
            _register(op)


def _register(op: Op) -> None:
    from shiplap.compat import lowering
    from shiplap.fuse.lower import lower

    for overload in {op.overload, op.raw}:
        lowering.register(overload, partial(lower, op, overload))
        _installed.add(overload)
    if not _code:
        _code.append(source_digest(lower))
        digest.refresh()  # before the compile caches are asked, as ``on_trace`` promises


digest.on_digest(lambda: "".join(_code))
