"""A Python function that the checks call as they call an op.

A finding's script contains the text of this module, so that it imports torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PythonFunction:
    """A function of a package, which may be the ``apply`` of an ``autograd.Function``. ``keywords`` are the names of
    the arguments that are passed by name. ``reference`` is the plain version that the package ships, or None, and
    ``shared`` are the names of the arguments that the plain version takes as well.
    """

    function: Callable[..., Any]
    keywords: tuple[str, ...] = ()
    reference: Callable[..., Any] | None = None
    shared: tuple[str, ...] = ()
