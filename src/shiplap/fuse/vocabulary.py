"""What a Triton template may write beside Inductor's own helpers: ``def_kernel()`` and macros put before its source."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["triton_source"]

PRELUDE = r"""
{%- macro swizzle(pid, tiles_m, tiles_n, group) %}
    # Programs that share rows run together, so that what one loads the next one finds in the cache.
    _width = {{group}} * {{tiles_n}}
    _first = ({{pid}} // _width) * {{group}}
    _rows = tl.minimum({{tiles_m}} - _first, {{group}})
    tile_m = _first + ({{pid}} % _width) % _rows
    tile_n = ({{pid}} % _width) // _rows
{%- endmacro %}
"""


def triton_source(source: str, arguments: Iterable[str]) -> str:
    """The source with ``def_kernel()`` naming the arguments that are present, in declared order, then tables."""
    named = ", ".join(f'"{name}"' for name in arguments)
    return PRELUDE.strip() + "\n" + source.replace("def_kernel()", f"def_kernel({named})")
