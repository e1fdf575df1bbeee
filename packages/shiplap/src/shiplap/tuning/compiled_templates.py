"""Templates in compiled code: which of them are measured there, and by whom, since this package compiles no graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shiplap.declare.template import Template
from shiplap.dispatch import Op

if TYPE_CHECKING:
    from shiplap.sampling.recipe import Recipe
    from shiplap.tuning.choice import Choice
    from shiplap.tuning.selector import Options
    from shiplap.tuning.worker_process import Isolation

ALONE = (("epilogue", ""),)  # the place of a call with nothing around it that could be fused

# Of op, recipe, device, options, the report of progress, and the worker process or None: the choice in compiled code.
Tuner = Callable[[Op, "Recipe", str, "Options", Callable[[str, int, int], None], "Isolation | None"], "Choice"]
tuners: list[Tuner] = []  # the package ``shiplap`` adds the one of ``shiplap.inductor``


def templates(op: Op, device: str) -> tuple[list[Template], list[Template]]:
    """The templates for a device type: those that serve no eager call, as there is no kernel of their name; the others.

    A template in C++ is code only together with its neighbours in a graph, so Inductor alone can run it. A function of
    PyTorch is no reason to compile: it is there to be compared with.
    """
    kind = device.partition(":")[0]
    kernels: set[Any] = {k.name for k in op.kernels.get(kind, ())}
    every = op.templates.get(kind, [])
    alone = [t for t in every if t.name not in kernels and t.function is None]
    return alone, [t for t in every if t not in alone]


def measured(op: Op, device: str, compiled: bool | None) -> bool:
    """Whether templates of ``op`` are measured in compiled code: all or none. By default if some run nowhere else."""
    there_only, both = templates(op, device)
    return bool(there_only or (compiled and both)) and compiled is not False


def left_out(op: Op, device: str, compiled: bool | None) -> str:
    """What is not measured in compiled code although it may run there, and why. Empty if all is."""
    there_only, both = templates(op, device)
    if compiled and not (there_only or both):
        return "compiled code: no template to measure there; it calls the kernel that is chosen for eager calls"
    if measured(op, device, compiled):
        return ""
    if compiled is False and there_only:
        return f"{_names(there_only)}: runs in compiled code alone, and compiled=False measures eager calls alone"
    if not both:
        return ""
    known = "compiled code tries the choice for eager calls first, and compares it with the reference once more"
    return f"{_names(both)} in compiled code: {known}; compiled=True measures there"


def _names(given: list[Template]) -> str:
    return ", ".join(t.name for t in given)
