"""Templates that run in compiled code only: who measures them, since this package compiles no graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shiplap.op import Op
from shiplap.op.template import Template

if TYPE_CHECKING:
    from shiplap.referee.recipe import Recipe
    from shiplap.selection.choice import Choice
    from shiplap.selection.isolate import Isolation
    from shiplap.selection.selector import Options

__all__ = ["ALONE", "Tuner", "templates", "tuners"]

ALONE = (("epilogue", ""),)  # the place of a call with nothing around it that could be fused

# Of op, recipe, device, options, the report of progress, and the worker process or None: the choice in compiled code.
Tuner = Callable[[Op, "Recipe", str, "Options", Callable[[str, int, int], None], "Isolation | None"], "Choice"]
tuners: list[Tuner] = []  # the package ``shiplap`` adds the one of ``shiplap.fuse``


def templates(op: Op, device: str) -> list[Template]:
    """The templates for a device type that serve no eager call, as there is no kernel of their name.

    A template in C++ is code only together with its neighbours in a graph, so Inductor alone can run it.
    """
    kind = device.partition(":")[0]
    kernels: set[Any] = {k.name for k in op.kernels.get(kind, ())}
    return [t for t in op.templates.get(kind, ()) if t.name not in kernels]
