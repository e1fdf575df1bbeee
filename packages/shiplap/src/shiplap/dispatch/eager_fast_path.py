"""The fast path of an eager call: one generated function per op, which skips torch's dispatcher.

The function takes calls that Python launches: calls on a GPU, and on the CPU calls of C functions that will have no
native binding. A pass through the dispatcher and back into Python takes as long as two launches.

A call of plain tensors without a mode, tracer, transform or profiler is bound and run here. Every other call goes to
the dispatcher, which also reports errors. A call is remembered under a key of everything that its launch depends on
except addresses. The checks, the choice and the sizes of one call hold for every later call with the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeAlias

import torch

from shiplap import dtypes
from shiplap.declare.binding import Binding
from shiplap.declare.kernel import Kernel, Rerun
from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.values import Args, Result, Supports, Value
from shiplap.dispatch import tuned_choices
from shiplap.dispatch.execute import Executor
from shiplap.dispatch.outputs import result_of_outputs
from shiplap.plan.expression import argument_variable, parameter_list
from shiplap.torch_private import dispatcher_calls
from shiplap.torch_private.mark_mutated import with_write_counts

FastPath: TypeAlias = Callable[..., Result]
MOST_READY_CALLS = 4096  # calls remembered: each may have sizes of its own
INT64_MAX = 2**63 - 1
_TYPES = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "list[int]": "list",
    "list[float]": "list",
    "list[bool]": "list",
}


def make_fast_path(op: Executor) -> FastPath:
    """Return the function that a plain call of ``op`` runs: the shortest path to the kernels that are bound now."""
    by_python = compile_fast_path(op) or (compile_fast_path(op, "cpu") if stays_in_python(op, "cpu") else None)
    plain = dispatcher_calls.builtin_of(op.raw if op.separable else op.overload)
    places = [i for i, a in enumerate(op.spec.args) if a.mutated]
    return by_python or (with_write_counts(plain, places) if places else plain)


def stays_in_python(op: Executor, device: str) -> bool:
    """Whether ``op`` will have no native binding on the device, and one of its kernels can repeat calls."""
    return op.native is None and any(k.stays and k.repeats for k in op.kernels.get(device, ()))


def make_fast_execute(op: Executor) -> FastPath | None:
    """Return a function that remembers calls, which ``op.execute`` runs for calls without gradients, or None."""
    return compile_fast_path(op, "cpu", op.serve_call) if stays_in_python(op, "cpu") else None


def compile_fast_path(op: Executor, device: str = "cuda", otherwise: FastPath | None = None) -> FastPath | None:
    """Return ``route(*args)``, which runs ``op`` below autograd. None where every call needs the dispatcher.

    ``otherwise`` runs the calls that the function does not support, for a caller that the dispatcher has called.
    """
    kernels = op.kernels.get(device, [])
    if op.spec.mutated or not kernels or not has_simple_arguments(op.spec):
        return None
    if not all(k.by_python or (device == "cpu" and k.stays) for k in kernels):
        return None
    if (
        otherwise is None
        and not op.separable
        and any(row.floating for a in op.spec.tensors for row in dtypes.rows(_argument_dtypes(a)))
    ):
        return None  # calls come here under autocast, too
    remembers = any(k.repeats for k in kernels)

    def first(*args: Value) -> Binding:
        """Compile the checks at the first call that takes this path."""
        scope["bind"] = op.plan.quick
        return op.plan.quick(*args)

    scope: dict[str, object] = {
        "dispatcher": otherwise or dispatcher_calls.builtin_of(op.raw),
        "untouched": dispatcher_calls.untouched,
        "is_zero": dispatcher_calls.is_zero,
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "INTS": {int},
        "choices": tuned_choices,
        "defaults": [a.default for a in op.spec.args],
        "bind": first,
        "ready": tuned_choices.ready_calls(op.spec.name),
        "start": _make_fast_path_start(op),
    }
    modes = "not untouched()" if otherwise is None else "False"
    exec(compile(fast_path_source(op.spec, device, remembers, modes), f"<route {op.spec.name}>", "exec"), scope)
    route = scope["route"]
    assert callable(route)
    return route


def _make_fast_path_start(op: Executor) -> Callable[..., Result]:
    """Return a function that runs a call and remembers how to repeat it, if its kernel can."""
    ready = tuned_choices.ready_calls(op.spec.name)

    def start(call: Binding, key: Hashable | None = None) -> Result:
        kernel = op.pick(call)
        if kernel is None or key is None:
            return op.serve(call, kernel)
        asked = supports_answers(op, kernel, call)
        outs, rerun = kernel.start(call)
        if rerun is not None and tuned_choices.observer is None and not is_unlisted_call(op, call):
            if len(ready) >= MOST_READY_CALLS:
                ready.clear()
            ready[key] = _recheck_supports(asked, rerun, op.execute) if asked else rerun
        return result_of_outputs(outs)

    return start


def is_unlisted_call(op: Executor, call: Binding) -> bool:
    """Whether the table of choices in force lacks the call.

    Such a call is not remembered: ``SHIPLAP_STRICT``, which may be set later, makes it an error.
    """
    return tuned_choices.active and isinstance(tuned_choices.find_choice(op, call), tuned_choices.MissingChoice)


def supports_answers(op: Executor, picked: Kernel, call: Binding) -> list[tuple[Supports, bool]]:
    """Return the ``supports`` of each kernel up to the picked one, with its answer for this call."""
    conditions = []
    for kernel in op.eager_kernels(picked.device):
        if kernel.condition is not None:
            conditions.append((kernel.condition, kernel.condition(*call.args) is True))
        if kernel.name == picked.name:
            break
    return conditions


def _recheck_supports(asked: list[tuple[Supports, bool]], rerun: Rerun, anew: FastPath) -> Rerun:
    """Return ``rerun`` for calls with unchanged answers of ``supports``, which may depend on the values of tensors."""

    def checked(args: Args) -> Result:
        for supports, answer in asked:
            if (supports(*args) is True) is not answer:
                return anew(*args)
        return rerun(args)

    return checked


def has_simple_arguments(spec: OpSpec) -> bool:
    """Whether all arguments are single tensors of real dtypes, or required scalars.

    Complex tensors may carry the lazy mark of a conjugate, which only the dispatcher resolves.
    """
    if any(a.many for a in spec.args):
        return False
    real = all(
        _argument_dtypes(a) and not any(row.kind == "complex" for row in dtypes.rows(_argument_dtypes(a)))
        for a in spec.tensors
    )
    return real and not any(a.optional or a.scalar not in _TYPES for a in spec.scalars)


def _argument_dtypes(arg: Arg) -> tuple[str, ...]:
    return arg.tensor.dtypes if arg.tensor is not None else ()


def fast_path_source(spec: OpSpec, device: str, remembers: bool, modes: str = "not untouched()") -> str:
    """Return the text of the function. ``modes`` is the condition under which the dispatcher has to see the call."""
    given = ", ".join(map(argument_variable, spec.args))
    positional = [a for a in spec.args if not a.keyword_only]
    dispatched = f"return dispatcher({', '.join(map(argument_variable, positional))})"
    fixed = [f"    {argument_variable(a)} = defaults[{i}]" for i, a in enumerate(spec.args) if a.keyword_only]
    strange = [not_plain_tensor(a, device) for a in spec.args if a.tensor is not None]
    integers = [a for a in spec.args if a.scalar in ("int", "list[int]")]
    numbers = [argument_variable(a) if a.scalar == "int" else f"*{argument_variable(a)}" for a in integers]
    kinds = [type_test(a) for a in spec.args if a.scalar is not None and a.scalar != "int"]
    lines = [
        f"def route({parameter_list(positional)}):",
        *fixed,
        f"    if {' or '.join([*strange, *kinds, modes])}: {dispatched}",
    ]
    if numbers:
        lines += [
            f"    n = (0, {', '.join(numbers)})",
            f"    if {{*map(type, n)}} != INTS or max(n) > {INT64_MAX} or min(n) < {-INT64_MAX - 1}: {dispatched}",
        ]
    if remembers:
        lines += [
            "    try:",
            f"        key = ({''.join(f'{part}, ' for part in map(cache_key_part, spec.args))})",
            f"    except RuntimeError: {dispatched}",  # a tensor without strides, which the checks will name
            "    rerun = ready.get(key)",
            f"    if rerun is not None and choices.observer is None: return rerun(({given},))",
        ]
    lines.append(f"    return start(bind({given}){', key' if remembers else ''})")
    return "\n".join(lines)


def not_plain_tensor(arg: Arg, device: str) -> str:
    """Return the condition that an argument is not a plain tensor of this device type.

    Lazily negated views and zero tensors without memory are not plain: the dispatcher resolves them.
    """
    t = argument_variable(arg)
    condition = (
        f"not ((type({t}) is Tensor or type({t}) is Parameter) and {t}.is_{device}) or {t}.is_neg() or is_zero({t})"
    )
    return f"({t} is not None and ({condition}))" if arg.optional else condition


def type_test(arg: Arg) -> str:
    return f"type({argument_variable(arg)}) is not {_TYPES[arg.scalar or '']}"


def cache_key_part(arg: Arg, address: str = "") -> str:
    """Return the part of the key for an argument. Floats are text in it, since -0.0 equals 0.0."""
    v = argument_variable(arg)
    if arg.tensor is not None:
        address = address or f"{v}.data_ptr()"
        part = f"{v}.shape, {v}.stride(), {v}.dtype, {v}.get_device(), {address} & 15"
        return f"{v} if {v} is None else ({part})" if arg.optional else part
    if arg.scalar in ("float", "list[float]"):
        return f"repr({v})"
    return f"tuple({v})" if arg.scalar and arg.scalar.startswith("list") else v
