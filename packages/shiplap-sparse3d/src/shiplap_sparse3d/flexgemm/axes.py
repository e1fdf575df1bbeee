"""The forms of FlexGEMM 2.0's functions and modules for two, three and four axes, which take one number for all axes.

The general forms take one number for each axis. ``sparse_conv2d``, ``sparse_conv3d`` and ``sparse_conv4d`` are those of
``sparse_conv``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from shiplap_sparse3d.axes import per_axis

__all__ = ["classes_of_axes", "functions_of_axes"]

Call = TypeVar("Call", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)
# The numbers of axes for which there are functions and modules, as words for their docstrings.
AXES = {2: "two", 3: "three", 4: "four"}


def functions_of_axes(call: Call, *names: str) -> tuple[Call, Call, Call]:
    """Return three functions that call ``call`` for voxels with two, three and four spatial axes. They have its name
    with ``2d``, ``3d`` or ``4d`` at the end. An argument that ``names`` lists may be a single number, which ``call``
    then gets as one number per axis.
    """
    known = [*inspect.signature(call).parameters]
    # An argument may be passed by its position or by its name.
    places = tuple((name, known.index(name) if name in known else len(known)) for name in names)
    two, three, four = (_function_of(call, ndim, places) for ndim in AXES)
    return cast("Call", two), cast("Call", three), cast("Call", four)


def _function_of(call: Callable[..., Any], ndim: int, places: tuple[tuple[str, int], ...]) -> Callable[..., Any]:
    """Return a function that calls ``call`` for ``ndim`` spatial axes. ``places`` lists arguments as pairs of name and
    position. Each of them may be a single number, which ``call`` gets as one number per axis.
    """

    def on_axes(*arguments: Any, **options: Any) -> Any:
        """Return the result of ``call``, an argument of the enclosing function. Each argument in ``places`` that is a
        single number is passed as ``ndim`` equal numbers.
        """
        given = list(arguments)
        for name, place in places:
            if place < len(given) and given[place] is not None:
                given[place] = per_axis(given[place], name, ndim)
            elif options.get(name) is not None:
                options[name] = per_axis(options[name], name, ndim)
        return call(*given, **options)

    # Tracebacks and documentation show the name for this number of axes.
    on_axes.__name__ = on_axes.__qualname__ = f"{call.__name__}{ndim}d"
    on_axes.__module__, on_axes.__doc__ = call.__module__, f":func:`{call.__name__}` for {AXES[ndim]} axes."
    return on_axes


def classes_of_axes(kind: Kind) -> tuple[Kind, Kind, Kind]:
    """Return three subclasses of the module class ``kind``, for two, three and four spatial axes. Where ``kind`` takes
    one number for each axis, they also take a single number for all axes.
    """
    two, three, four = (
        type(
            f"{kind.__name__}{ndim}d",
            (kind,),
            {"ndim": ndim, "__module__": kind.__module__, "__doc__": f":class:`{kind.__name__}` for {word} axes."},
        )
        for ndim, word in AXES.items()
    )
    return cast("Kind", two), cast("Kind", three), cast("Kind", four)
