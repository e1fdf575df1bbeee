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
    INT64_MAX,
    MOST_READY_CALLS,
    cache_key_part,
    has_simple_arguments,
    is_unlisted_call,
    not_plain_tensor,
    stays_in_python,
    supports_answers,
    type_test,
)
from shiplap.dispatch.execute import Executor
from shiplap.plan.expression import argument_variable
from shiplap.plan.outputs import bytes_spanned
from shiplap.torch_private import dispatcher_calls

OutFastPath: TypeAlias = Callable[..., bool]  # of all arguments, then the outputs: whether the call has been served


class CheckOutCall(Protocol):
    """The checks of the registered out-variant before a kernel runs. They return the outputs and the kernel."""

    def __call__(self, call: Binding, given: Args, scratch: Tensor | None) -> tuple[Outputs, Kernel | None]: ...


def compile_out_fast_path(op: Executor, check: CheckOutCall, *, dispatched: bool) -> OutFastPath | None:
    """Return ``route(*args, *outs)``, which fills ``outs`` and returns True, or changes nothing and returns False.

    None where native code may run the out-variant, or where each call needs the dispatcher. ``dispatched`` says that
    the caller is called by the dispatcher.
    """
    spec, device = op.spec, _fast_path_device(op)
    if not device or spec.mutated or not has_simple_arguments(spec):
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
        "start": _make_out_start(op, check),
    }
    exec(compile(out_fast_path_source(spec, device, dispatched=dispatched), f"<out {spec.name}>", "exec"), scope)
    route: OutFastPath = scope["route"]
    return route


def _fast_path_device(op: Executor) -> str:
    """Return the device type whose kernels Python always calls and of which one can repeat calls. Empty if none."""
    cuda = op.kernels.get("cuda", [])
    if cuda and all(k.by_python for k in cuda) and any(k.repeats for k in cuda):
        return "cuda"
    return "cpu" if stays_in_python(op, "cpu") and all(k.stays for k in op.kernels["cpu"]) else ""


def _make_out_start(op: Executor, check: CheckOutCall) -> Callable[[Args, Outputs, Hashable], bool]:
    """Return a function that runs a call and remembers how to repeat it, if its kernel can."""
    ready: dict[Hashable, Any] = tuned_choices.ready_calls(f"{op.spec.name}, out")

    def start(args: Args, given: Outputs, key: Hashable) -> bool:
        call = op.plan.quick(*args)
        outs, kernel = check(call, given, None)
        if kernel is None:
            return False
        with torch.no_grad():
            refill = kernel.fill(call, outs)
        steady = (
            tuned_choices.observer is None and not supports_answers(op, kernel, call) and not is_unlisted_call(op, call)
        )
        if refill is not None and steady:
            if len(ready) >= MOST_READY_CALLS:
                ready.clear()
            tensors = [v for v, a in zip(args, op.spec.args, strict=True) if a.tensor is not None]
            ready[key] = (
                refill,
                *(bytes_spanned(t) if isinstance(t, Tensor) and t.numel() else 0 for t in (*tensors, *outs)),
            )
        return True

    return start


def out_fast_path_source(spec: OpSpec, device: str, *, dispatched: bool) -> str:
    """Return the text of the function."""
    outs = [Arg(o.name, o.tensor) for o in spec.outputs]
    tensors, inputs = [*spec.tensors, *outs], list(spec.tensors)
    strange = [not_plain_tensor(a, device) for a in tensors]
    kinds = [type_test(a) for a in spec.args if a.scalar is not None and a.scalar != "int"]
    integers = [a for a in spec.args if a.scalar in ("int", "list[int]")]
    numbers = [argument_variable(a) if a.scalar == "int" else f"*{argument_variable(a)}" for a in integers]
    modes = [] if dispatched else ["not untouched()"]
    every = ", ".join(map(argument_variable, tensors))
    lines = [
        f"def route({', '.join(map(argument_variable, [*spec.args, *outs]))}):",
        f"    if {' or '.join([*strange, *kinds, *modes, 'choices.observer is not None'])}: return False",
        f"    if is_grad_enabled() and any_requires_grad({every}): return False",
    ]
    if numbers:
        lines += [
            f"    n = (0, {', '.join(numbers)})",
            f"    if {{*map(type, n)}} != INTS or max(n) > {INT64_MAX} or min(n) < {-INT64_MAX - 1}: return False",
        ]
    parts = [f"{cache_key_part(a, f'p_{a.name}')}, " for a in [*spec.args, *outs]]
    lines += [
        "    try:",
        *(f"        p_{a.name} = {_address_source(a)}" for a in tensors),
        f"        key = ({''.join(parts)})",
        "    except RuntimeError: return False",  # a tensor without an address or strides, which the checks will name
        "    found = ready.get(key)",
        f"    if found is None: return start(({_tuple_source(spec.args)}), ({_tuple_source(outs)}), key)",
        f"    refill, {', '.join(f'r_{a.name}' for a in tensors)} = found",
    ]
    met = [_overlap_source(out, other) for i, out in enumerate(outs) for other in (*inputs, *outs[:i])]
    lines += [f"    if {' or '.join(met)}: return False"] if met else []
    lines += [f"    refill(({_tuple_source(spec.args)}), ({_tuple_source(outs)}))", "    return True"]
    return "\n".join(lines)


def _tuple_source(args: list[Arg] | tuple[Arg, ...]) -> str:
    return "".join(f"{argument_variable(a)}, " for a in args)


def _address_source(arg: Arg) -> str:
    address = f"{argument_variable(arg)}.data_ptr()"
    return f"0 if {argument_variable(arg)} is None else {address}" if arg.optional else address


def _overlap_source(a: Arg, b: Arg) -> str:
    """Whether the address ranges of two tensors may meet."""
    return f"(p_{a.name} < p_{b.name} + r_{b.name} and p_{b.name} < p_{a.name} + r_{a.name})"
