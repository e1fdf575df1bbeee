"""The inputs of a declared gradient, which are passed by name and contiguous.

A gradient that comes from ``torch.cat`` or ``sum`` is a view with other strides, and a saved tensor may be one, too. A
function that launches a kernel on its memory would misread it, as a kernel of the op itself would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

from shiplap.declare.named_parameters import bind_names, read_parameters
from shiplap.declare.spec import OpSpec
from shiplap.errors import ShiplapError, error

Gradients = TypeVar("Gradients")


def read_gradient_function(spec: OpSpec, fn: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Return a function that calls the author's gradient function ``fn`` by name and takes ``(gradient, saved, needs)``
    by position.

    The gradient is the parameter that is called neither ``saved`` nor ``needs``. It must not have the name of an
    argument or result. Raise ``SL110`` for any other parameters.
    """
    first = "grad" if len(spec.results) == 1 else "grads"
    expected, three = f"def _({first}, saved, needs)", "take the three arguments that 'expected' lists"

    def refuse(got: str, fix: str = "") -> ShiplapError:
        """Return the error ``SL110`` for a gradient function with other parameters than ``grad``, ``saved`` and
        ``needs``. ``got`` describes them, and ``fix`` is the remedy, if there is one.
        """
        return error("SL110", where=spec.name, got=got, expected=expected, fix=fix or three)

    takes = read_parameters(fn, refuse)
    shown = f"def _{takes.shown[takes.shown.index('(') :]}"
    others = [n for n in takes.named if n not in takes.optional and n not in ("saved", "needs")]
    # An argument of the op that is called grad does not forbid the usual name of the gradient.
    taken = ({a.name for a in spec.args} | {*spec.results, "ctx"}) - {"grad", "grads"}
    if unknown := [n for n in others if n in taken] or others[1:]:
        raise refuse(f"{shown}: nothing is called {unknown[0]!r}")
    if missing := next((n for n in ("saved", "needs") if n not in takes.named), "" if others else first):
        raise refuse(f"{shown}: the parameter {missing!r} is missing")
    return bind_names(fn, (others[0], "saved", "needs"), id="SL110", where=spec.name)


def with_contiguous_inputs(fn: Callable[..., Gradients], saves: Iterable[str]) -> Callable[..., Gradients]:
    """Return a gradient function ``(grad, saved, needs)`` that makes the gradients and the saved tensors named in
    ``saves`` contiguous, and then returns the result of ``fn`` for them.
    """
    names = tuple(dict.fromkeys(saves))

    @wraps(fn)  # digests and audits read the code of the author
    def gradients(grad: Any, saved: Any, needs: Any) -> Gradients:
        """Return the result of the author's gradient function for contiguous gradients and saved tensors. The
        attributes of the object ``saved`` are replaced by contiguous tensors.
        """
        values = saved.__dict__
        for name in names:
            value = values[name]
            if isinstance(value, Tensor):
                values[name] = value.contiguous()
            elif isinstance(value, (list, tuple)):
                values[name] = _contiguous_input(value)
        return fn(grad.contiguous() if isinstance(grad, Tensor) else _contiguous_input(grad), saved, needs)

    return gradients


def _contiguous_input(value: Any) -> Any:
    """Return a tensor, or each of a list of tensors, as a contiguous one. Any other value is returned unchanged."""
    if isinstance(value, (list, tuple)):
        return type(value)([_contiguous_input(v) for v in value])
    return value.contiguous() if isinstance(value, Tensor) else value
