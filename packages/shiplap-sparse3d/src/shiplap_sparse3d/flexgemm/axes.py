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
    """Return three functions that call ``call`` for voxels with two, three and four axes, for which FlexGEMM has names.
    Each of the arguments ``names`` may be one number for all axes.
    """
    known = [*inspect.signature(call).parameters]
    # An argument may be passed by its position or by its name.
    places = tuple((name, known.index(name) if name in known else len(known)) for name in names)
    two, three, four = (_function_of(call, ndim, places) for ndim in AXES)
    return cast("Call", two), cast("Call", three), cast("Call", four)


def _function_of(call: Callable[..., Any], ndim: int, places: tuple[tuple[str, int], ...]) -> Callable[..., Any]:
    """Return a function that calls ``call`` for ``ndim`` axes. An argument at one of ``places`` (name, position) may be
    one number for all axes.
    """

    def on_axes(*arguments: Any, **options: Any) -> Any:
        """Return the result of ``call`` (argument of ``_function_of``). Each argument that may be a single number for
        all axes is passed as one number per axis.
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
    """Return three subclasses of the module class ``kind``, for two, three and four axes. Their arguments per axis may
    be one number for all axes.
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
