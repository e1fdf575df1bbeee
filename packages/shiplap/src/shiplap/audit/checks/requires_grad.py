"""``requires_grad``: asking for gradients, or forbidding them, does not change the values.

Leaf and non-leaf inputs are known to differ under the compiler, so both are run, eagerly and compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shiplap import torch_private
from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.errors import error_line
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.run import call_op, floating_args, require_gradients, run_on, surrogate_results, why_no_backward
from shiplap.sampling.samples import Samples


def observe_requires_grad(op: Op, case: SampleCase) -> Observation:
    """Compare the results of calls on inputs that require gradients with those of calls without gradients.

    Calls in inference mode are compared as well. The returned observation has a problem if results differ in bits, or
    if a result requires a gradient although that of the reference does not.
    """

    def program(*args: Any) -> tuple[Tensor, ...]:
        """Call the op with ``args``. Return its results, followed by the arguments that it mutates."""
        return run_on(op, args)

    with torch.no_grad():
        expected = program(*case.fresh())
    with torch.inference_mode():
        if problem := bitwise_difference([t.clone() for t in program(*case.fresh())], expected, "with no_grad"):
            return Observation(f"in inference mode: {problem}")
    names = floating_args(op, case)
    if not names or op.spec.mutated:
        return Observation(note="inference mode only: no argument can require a gradient")
    note = why_no_backward(op, case)
    if not note and (lost := _observe_detached_results(op, case, names)):
        return lost
    # aot_eager traces autograd without generated kernels, so that bits can be compared.
    for backend in ("", "aot_eager") if not note else ("",):
        for leaf in (True, False):
            args = require_gradients(op, case.fresh(), names)
            try:
                got = _run_with_inputs(program, backend, leaf, args)
            except Exception as e:
                if not backend:
                    raise
                return Observation(note=f"eager only, see compile: {error_line(e)}")
            if problem := bitwise_difference(got, expected, "with no_grad"):
                how = f"compiled with {backend}" if backend else "eager"
                return Observation(f"{how}, {'leaf' if leaf else 'non-leaf'} inputs that require gradients: {problem}")
    return Observation(note=f"eager only: {note}" if note else "")


def _observe_detached_results(op: Op, case: SampleCase, names: list[str]) -> Observation | None:
    """Return an observation with a problem if a result of the op requires a gradient although that of its reference
    does not. Otherwise return None. ``names`` are the arguments that require a gradient.
    """
    try:
        wanted = [o.requires_grad for o in surrogate_results(op, require_gradients(op, case.fresh(), names))]
    except RuntimeError:
        return None
    if not any(wanted):
        return None  # autograd cannot differentiate the reference: finite differences judge the gradient
    got = [o.requires_grad for o in call_op(op, require_gradients(op, case.fresh(), names))]
    known = op.spec.results if len(op.spec.results) == len(got) else tuple(map(str, range(len(got))))
    lost = [n for n, g, w in zip(known, got, wanted, strict=True) if g and not w]
    if not lost:
        return None
    entry = "".join(f'"{n}", ' for n in lost).rstrip(" ")
    if len(lost) > 1:
        entry = entry.rstrip(",")
    return Observation(
        f"result {', '.join(lost)} requires a gradient, and the reference has none for it",
        fix=f"declare nondifferentiable=({entry}), or give backward the function that it is the derivative of, "
        "surrogate=",
    )


def _run_with_inputs(
    program: Callable[..., Any], backend: str, leaf: bool, args: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Return the results of ``program`` on ``args``, compiled with the backend named ``backend``. If that is empty, the
    program runs eagerly. If ``leaf`` is true, inputs that require gradients are autograd leaves. Otherwise they are
    results of another operation.
    """

    def nonleaf(*values: Any) -> Any:
        """Return the results of ``program`` on ``values``, of which each that requires a gradient is first multiplied
        by 1. Such an input is no autograd leaf.
        """
        return program(*(v * 1 if isinstance(v, Tensor) and v.requires_grad else v for v in values))

    fn = program if leaf else nonleaf
    if not backend:
        return tuple(fn(*args))
    torch_private.reset_compiler()
    return tuple(torch.compile(fn, backend=backend, fullgraph=True)(*args))


CHECK = Check(
    "requires_grad",
    order=180,
    observes="no_grad, inference mode, leaf and non-leaf inputs, eager and aot_eager, give the same bits; results that "
    "the reference detaches require no gradient",
    observe=observe_requires_grad,
    cases=Samples.plain,
    varies=("mode",),
    needs=("determinism",),
    patience=120.0,
    fix="do not look at requires_grad or torch.is_grad_enabled() inside the op",
)
