"""Switches for experiments. They turn templates off, or let nothing be fused into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from shiplap.dispatch import Op, compile_cache_key


@dataclass(frozen=True)
class TemplateSwitches:
    """The options of one op that :func:`switches` sets.

    ``templates`` states whether templates are candidates. ``fusion`` states whether neighbouring operations may be
    fused into them. If ``only`` is not empty, only candidates whose label contains it are used.
    """

    templates: bool = True
    fusion: bool = True
    only: str = ""  # the one candidate to take, verified all the same


_force: dict[str, TemplateSwitches] = {}


def switches_of(op: Op) -> TemplateSwitches:
    """Return the options that :func:`switches` has set for ``op``. By default templates and fusion are on, and ``only``
    is empty.
    """
    return _force.get(op.spec.name, TemplateSwitches())


@contextmanager
def switches(
    op: Op, *, templates: bool | None = None, fusion: bool | None = None, only: str | None = None
) -> Iterator[None]:
    """Compile calls of ``op`` within the ``with`` block with changed options. An option that is None keeps its value.

    ``templates=False`` uses no template. ``fusion=False`` lets Inductor fuse nothing into a template. ``only``
    restricts the candidates to those whose label contains that string. The options are part of every compile cache key,
    so code that was compiled with other options is not used.
    """
    # Switches may be nested, so the earlier ones are restored and not deleted.
    before = switches_of(op)
    given: dict[str, Any] = {"templates": templates, "fusion": fusion, "only": only}
    _force[op.spec.name] = replace(before, **{k: v for k, v in given.items() if v is not None})
    try:
        yield
    finally:
        _force[op.spec.name] = before


compile_cache_key.add_key_part(
    lambda op: str(_force[op.spec.name]) if _force.get(op.spec.name, TemplateSwitches()) != TemplateSwitches() else ""
)
