"""Modules with Triton code, each imported when its first kernel runs: importing Triton takes a while."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["lazy_function"]

_lazy_functions: dict[tuple[str, str], Callable[..., Any]] = {}


def lazy_function(module: str, name: str) -> Callable[..., Any]:
    """Return the function ``name`` of the submodule ``module`` of this package. The first request imports the
    submodule, and later ones return the cached function.
    """
    function = _lazy_functions.get((module, name))
    if function is None:
        function = _lazy_functions[module, name] = getattr(import_module(f"{__package__}.{module}"), name)
    return function
