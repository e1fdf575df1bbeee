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
    """Return one int for each of ``ndim`` axes, from one number for all axes or a sequence such as ``(3, 3, 1)``.
    Integers of NumPy and torch are accepted.

    Raise ``SL208`` for another number of values or one below ``least``, and ``SL209`` for values that are not integers.
    ``name`` is the argument's name in errors. If ``least`` is None, any integer is accepted.
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
    """Return ``value``, a number or a sequence of numbers, as Python's own integers. Raise ``SL209`` if one is no
    integer. ``name`` is the argument's name in errors.
    """
    try:
        return tuple(operator.index(v) for v in value) if hasattr(value, "__len__") else operator.index(value)
    except TypeError as wrong:
        raise error("SL209", where=name, got=repr(value), expected=_PER_AXIS.format(ndim)) from wrong


_PER_AXIS = "an int, or one int for each of {} axes"


def expand_axes(value: Axes, name: str, ndim: int = 3, fill: int = 1) -> Triple:
    """Return the result of :func:`per_axis` for three axes. If ``ndim`` is less than 3, the leading axes get ``fill``.
    If ``ndim`` is 4, four numbers are returned, as convolutions by offsets need them.
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

    If two sizes are equal, torch writes one in place of the other. Inductor (torch 2.11 to 2.13) has no value for a
    size that only objects hold, so its code would end in a ``NameError``. A guard on the order of two sizes does not
    make them equal.
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
