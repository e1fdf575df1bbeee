"""Switches for experiments: the same program with templates off, or with nothing fused into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from shiplap.dispatch import Op, compile_cache_key


@dataclass(frozen=True)
class Switches:
    """``templates``: whether templates are candidates; ``fusion``: whether neighbours are fused into them."""

    templates: bool = True
    fusion: bool = True
    only: str = ""  # the one candidate to take, verified all the same


_force: dict[str, Switches] = {}


def in_force(op: Op) -> Switches:
    return _force.get(op.spec.name, Switches())


@contextmanager
def switches(
    op: Op, *, templates: bool | None = None, fusion: bool | None = None, only: str | None = None
) -> Iterator[None]:
    """Within this context code is compiled with ``op``'s templates off, without fusion, or with one candidate only.

    Part of every compile cache key, so that a control is never served from the cache of what it controls.
    """
    before = in_force(op)
    given: dict[str, Any] = {"templates": templates, "fusion": fusion, "only": only}
    _force[op.spec.name] = replace(before, **{k: v for k, v in given.items() if v is not None})
    try:
        yield
    finally:
        _force[op.spec.name] = before


compile_cache_key.on_key(
    lambda op: str(_force[op.spec.name]) if _force.get(op.spec.name, Switches()) != Switches() else ""
)
