"""The fast path of an eager ``op.out``: one generated function per op, for ops whose kernels Python calls.

As in ``dispatch/eager_fast_path.py``, a call is remembered under a key of everything that it depends on except
addresses. The key includes shapes, strides, dtypes and devices of the caller's outputs, which are checked once. Each
call is checked for overlapping tensors and for gradients, since these follow from addresses and from the tensors
themselves. A call that the function does not support takes the ordinary path, which also reports errors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from shiplap.declare.binding import Binding
from shiplap.declare.kernel import Kernel
from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.values import Args, Outputs
from shiplap.dispatch import tuned_choices
from shiplap.dispatch.eager_fast_path import (
    LIMIT,
    WIDEST,
    asked_of,
    is_simple,
    kind_of,
    part_of,
    stays_in_python,
    strange_of,
    unlisted,
)
from shiplap.dispatch.execute import Served
from shiplap.plan.expression import variable
from shiplap.plan.outputs import reach
from shiplap.torch_private import dispatcher_calls

OutRoute: TypeAlias = Callable[..., bool]  # of all arguments, then the outputs: whether the call has been served


class Checked(Protocol):
    """The checks of the registered out-variant before a kernel runs. They return the outputs and the kernel."""

    def __call__(self, call: Binding, given: Args, scratch: Tensor | None) -> tuple[Outputs, Kernel | None]: ...


def compile_out_route(op: Served, check: Checked, *, dispatched: bool) -> OutRoute | None:
    """Return ``route(*args, *outs)``, which fills ``outs`` and returns True, or changes nothing and returns False.

    None where native code may run the out-variant, or where each call needs the dispatcher. ``dispatched`` says that
    the caller is called by the dispatcher.
    """
    spec, device = op.spec, _device(op)
    if not device or spec.mutated or not is_simple(spec):
        return None
    scope: dict[str, Any] = {
        "untouched": dispatcher_calls.untouched,
        "is_zero": dispatcher_calls.is_zero,
        "any_requires_grad": dispatcher_calls.any_requires_grad,
        "is_grad_enabled": torch.is_grad_enabled,
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "INTS": {int},
        "choices": tuned_choices,
        "ready": tuned_choices.ready_calls(f"{spec.name}, out"),
        "start": _start(op, check),
    }
    exec(compile(source(spec, device, dispatched=dispatched), f"<out {spec.name}>", "exec"), scope)
    route: OutRoute = scope["route"]
    return route


def _device(op: Served) -> str:
    """Return the device type whose kernels Python always calls and of which one can repeat calls. Empty if none."""
    cuda = op.kernels.get("cuda", [])
    if cuda and all(k.by_python for k in cuda) and any(k.repeats for k in cuda):
        return "cuda"
    return "cpu" if stays_in_python(op, "cpu") and all(k.stays for k in op.kernels["cpu"]) else ""


def _start(op: Served, check: Checked) -> Callable[[Args, Outputs, Hashable], bool]:
    """Return a function that runs a call and remembers how to repeat it, if its kernel can."""
    ready: dict[Hashable, Any] = tuned_choices.ready_calls(f"{op.spec.name}, out")

    def start(args: Args, given: Outputs, key: Hashable) -> bool:
        call = op.plan.quick(*args)
        outs, kernel = check(call, given, None)
        if kernel is None:
            return False
        with torch.no_grad():
            refill = kernel.fill(call, outs)
        steady = tuned_choices.observer is None and not asked_of(op, kernel, call) and not unlisted(op, call)
        if refill is not None and steady:
            if len(ready) >= LIMIT:
                ready.clear()
            tensors = [v for v, a in zip(args, op.spec.args, strict=True) if a.tensor is not None]
            ready[key] = refill, *(reach(t) if isinstance(t, Tensor) and t.numel() else 0 for t in (*tensors, *outs))
        return True

    return start


def source(spec: OpSpec, device: str, *, dispatched: bool) -> str:
    """Return the text of the function."""
    outs = [Arg(o.name, o.tensor) for o in spec.outputs]
    tensors, inputs = [*spec.tensors, *outs], list(spec.tensors)
    strange = [strange_of(a, device) for a in tensors]
    kinds = [kind_of(a) for a in spec.args if a.scalar is not None and a.scalar != "int"]
    integers = [a for a in spec.args if a.scalar in ("int", "list[int]")]
    numbers = [variable(a) if a.scalar == "int" else f"*{variable(a)}" for a in integers]
    modes = [] if dispatched else ["not untouched()"]
    every = ", ".join(map(variable, tensors))
    lines = [
        f"def route({', '.join(map(variable, [*spec.args, *outs]))}):",
        f"    if {' or '.join([*strange, *kinds, *modes, 'choices.observer is not None'])}: return False",
        f"    if is_grad_enabled() and any_requires_grad({every}): return False",
    ]
    if numbers:
        lines += [
            f"    n = (0, {', '.join(numbers)})",
            f"    if {{*map(type, n)}} != INTS or max(n) > {WIDEST} or min(n) < {-WIDEST - 1}: return False",
        ]
    parts = [f"{part_of(a, f'p_{a.name}')}, " for a in [*spec.args, *outs]]
    lines += [
        "    try:",
        *(f"        p_{a.name} = {_address(a)}" for a in tensors),
        f"        key = ({''.join(parts)})",
        "    except RuntimeError: return False",  # a tensor without an address or strides, which the checks will name
        "    found = ready.get(key)",
        f"    if found is None: return start(({_tuple(spec.args)}), ({_tuple(outs)}), key)",
        f"    refill, {', '.join(f'r_{a.name}' for a in tensors)} = found",
    ]
    met = [_meet(out, other) for i, out in enumerate(outs) for other in (*inputs, *outs[:i])]
    lines += [f"    if {' or '.join(met)}: return False"] if met else []
    lines += [f"    refill(({_tuple(spec.args)}), ({_tuple(outs)}))", "    return True"]
    return "\n".join(lines)


def _tuple(args: list[Arg] | tuple[Arg, ...]) -> str:
    return "".join(f"{variable(a)}, " for a in args)


def _address(arg: Arg) -> str:
    address = f"{variable(arg)}.data_ptr()"
    return f"0 if {variable(arg)} is None else {address}" if arg.optional else address


def _meet(a: Arg, b: Arg) -> str:
    """Whether the address ranges of two tensors may meet."""
    return f"(p_{a.name} < p_{b.name} + r_{b.name} and p_{b.name} < p_{a.name} + r_{a.name})"
