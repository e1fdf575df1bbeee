"""Numbers per axis: read from arguments, and compared in graphs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

from torch.compiler import is_compiling

from shiplap.plugin_api import error

Axes = int | Sequence[int]
Triple = tuple[int, int, int]


def per_axis(value: Axes, name: str, ndim: int = 3, least: int | None = None) -> tuple[int, ...]:
    """Return ``value`` as a tuple of ``ndim`` ints, one for each axis. ``value`` is one integer for all axes, or a
    sequence such as ``(3, 3, 1)``. Integers of NumPy and torch are accepted.

    Raise ``SL208`` if a sequence does not have ``ndim`` numbers, or if a number is below ``least``. If ``least`` is
    None, any integer is accepted. Raise ``SL209`` for a value that is not an integer. ``name`` is the argument's name
    in errors.
    """
    if not is_compiling():  # a graph would learn a guard for each size that is looked at
        value = _python_integers(value, name, ndim)
    values = (value,) * ndim if isinstance(value, int) else tuple(value)
    if len(values) != ndim:
        raise error("SL208", where=name, got=values, expected=_PER_AXIS.format(ndim))
    if least is not None and min(values) < least:
        raise error("SL208", where=name, got=values, expected=f"{least} or more per axis")
    return values


def _python_integers(value: Any, name: str, ndim: int) -> Axes:
    """Return the number ``value`` as an int, or the numbers of the sequence ``value`` as a tuple of ints. Raise
    ``SL209`` if one is not an integer. ``name`` is the argument's name in the error, and ``ndim`` the expected count of
    numbers.
    """
    try:
        return tuple(operator.index(v) for v in value) if hasattr(value, "__len__") else operator.index(value)
    except TypeError as wrong:
        raise error("SL209", where=name, got=repr(value), expected=_PER_AXIS.format(ndim)) from wrong


_PER_AXIS = "an int, or one int for each of {} axes"


def expand_axes(value: Axes, name: str, ndim: int = 3, fill: int = 1) -> Triple:
    """Return ``value`` as a tuple of three ints, one for each axis, read as by :func:`per_axis`. If ``ndim`` is less
    than 3, ``value`` has ``ndim`` numbers, and ``fill`` is put in front for each missing axis. If ``ndim`` is 4, four
    ints are returned.
    """
    if ndim == 3 and not is_compiling():  # what layers give, each time
        if type(value) is int:
            return value, value, value
        if isinstance(value, (list, tuple)) and [*map(type, value)] == _THREE:
            x, y, z = value
            return x, y, z
    elif ndim == 3 and isinstance(value, (list, tuple)) and len(value) == 3:  # in a graph, which is traced line by line
        x, y, z = value
        return x, y, z
    return cast("Triple", (*(fill,) * (3 - ndim), *per_axis(value, name, ndim)))


_THREE = [int, int, int]


def same_number(a: int, b: int) -> bool:
    """Return whether ``a`` equals ``b``. The test is ``not (a < b or a > b)``, since ``a == b`` would make torch merge
    two sizes in a compiled graph.

    After such a merge, code of Inductor (torch 2.11 to 2.13) fails with a ``NameError`` if a size occurs only in
    attributes of objects. Comparisons by ``<`` and ``>`` do not merge sizes.
    """
    return not (a < b or a > b)


def same_numbers(known: Sequence[int], given: Sequence[int]) -> bool:
    """Return whether ``given`` equals the last ``len(given)`` numbers of ``known``. Three numbers are compared one by
    one, since Dynamo would trace a comparison of sequences as a hundred instructions.
    """
    if len(given) == 3 and len(known) == 3:
        x, y, z = known
        a, b, c = given
        return not (x < a or x > a or y < b or y > b or z < c or z > c)
    if not is_compiling():
        return [*known][-len(given) :] == [*given]
    start = len(known) - len(given)
    return start >= 0 and all(same_number(known[start + i], given[i]) for i in range(len(given)))
