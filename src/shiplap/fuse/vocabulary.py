"""What every Triton template may use beside Inductor's own helpers; Jinja macros, put before its source."""

__all__ = ["prelude"]

prelude = r"""
{%- macro swizzle(pid, tiles_m, tiles_n, group) %}
    # Programs that share rows run together, so that what one loads the next finds in the cache.
    _width = {{group}} * {{tiles_n}}
    _first = ({{pid}} // _width) * {{group}}
    _rows = tl.minimum({{tiles_m}} - _first, {{group}})
    tile_m = _first + ({{pid}} % _width) % _rows
    tile_n = ({{pid}} % _width) // _rows
{%- endmacro %}
"""
