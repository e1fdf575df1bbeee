"""Templates in compiled code: which of them are measured there, and the functions that measure them.

This room compiles no graphs. ``shiplap.inductor``, which does, adds its function to ``template_tuners``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shiplap.declare.template import Template
from shiplap.dispatch import Op

if TYPE_CHECKING:
    from shiplap.sampling.recipe import SampleRecipe
    from shiplap.tuning.choice import Choice
    from shiplap.tuning.selector import SelectionOptions
    from shiplap.tuning.worker_process import WorkerProcess

ALONE = (("epilogue", ""),)  # the place of a call with nothing around it that could be fused

# Of op, recipe, device, options, the report of progress, and the worker process or None: the choice in compiled code.
TemplateTuner = Callable[
    [Op, "SampleRecipe", str, "SelectionOptions", Callable[[str, int, int], None], "WorkerProcess | None"], "Choice"
]
template_tuners: list[TemplateTuner] = []  # the package ``shiplap`` adds the one of ``shiplap.inductor``


def templates_by_need(op: Op, device: str) -> tuple[list[Template], list[Template]]:
    """Return the templates of ``op`` for a device in two lists. The first has the templates that only compiled code can
    run, and the second has the others.

    A template belongs to the first list if no kernel has its name and it is not a PyTorch function. A template in C++,
    for example, is compiled together with the code around it, so only Inductor can run it. A PyTorch function only
    serves as a comparison.
    """
    kind = device.partition(":")[0]
    kernels: set[Any] = {k.name for k in op.kernels.get(kind, ())}
    every = op.templates.get(kind, [])
    alone = [t for t in every if t.name not in kernels and t.function is None]
    return alone, [t for t in every if t not in alone]


def measured_when_compiled(op: Op, device: str, compiled: bool | None) -> bool:
    """Return whether the op's templates are measured in compiled code. A template is kernel source code that Inductor
    compiles together with neighbouring ops.

    ``compiled`` is the user's setting. If it is true, templates are measured if the op has any. If it is false, they
    are not measured. If it is None, they are measured if some of them run only in compiled code.
    """
    there_only, both = templates_by_need(op, device)
    return bool(there_only or (compiled and both)) and compiled is not False


def describe_unmeasured(op: Op, device: str, compiled: bool | None) -> str:
    """Return a message that says which templates are not measured in compiled code, and why. It is an empty string if
    nothing needs to be said. ``compiled`` is the user's setting, as in ``measured_when_compiled``.
    """
    there_only, both = templates_by_need(op, device)
    if compiled and not (there_only or both):
        return "compiled code: no template to measure there; it calls the kernel that is chosen for eager calls"
    if measured_when_compiled(op, device, compiled):
        return ""
    if compiled is False and there_only:
        names = _join_template_names(there_only)
        return f"{names}: runs in compiled code alone, and compiled=False measures eager calls alone"
    if not both:
        return ""
    known = "compiled code tries the choice for eager calls first, and compares it with the reference once more"
    return f"{_join_template_names(both)} in compiled code: {known}; compiled=True measures there"


def _join_template_names(given: list[Template]) -> str:
    """Return the names of the templates in one string, separated by commas."""
    return ", ".join(t.name for t in given)
