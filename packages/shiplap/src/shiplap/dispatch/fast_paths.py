"""The fast paths of eager calls, which are generated functions that skip torch's dispatcher for an op and its
``op.out``.

They support calls that Python launches. These are calls on a GPU, and on the CPU calls of C functions that will have no
native binding. A pass through the dispatcher and back into Python takes as long as two launches.

A call of plain tensors without a mode, tracer, transform or profiler is bound and run here. Every other call goes to
the dispatcher, which also reports errors. A call is stored under a key of everything on which its launch depends except
addresses. The checks, the choice and the sizes of one call are valid for every later call with the same key. The key of
an ``op.out`` includes shapes, strides, dtypes and devices of the caller's outputs, which are checked once. Each of its
calls is checked for overlapping tensors and for gradients, since these follow from addresses and from the tensors
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from shiplap import dtypes
from shiplap.declare.binding import Binding
from shiplap.declare.generated_code import define_function, either_source, tuple_source
from shiplap.declare.kernel import Kernel, Rerun
from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.values import Args, Outputs, Result, Supports, Value
from shiplap.dispatch import tuned_choices
from shiplap.dispatch.execute import Executor
from shiplap.dispatch.outputs import result_of_outputs
from shiplap.plan.expression import argument_variable, parameter_list
from shiplap.plan.outputs import bytes_spanned
from shiplap.torch_private import dispatcher_calls
from shiplap.torch_private.dispatcher_library import with_write_counts

FastPath: TypeAlias = Callable[..., Result]
OutFastPath: TypeAlias = Callable[..., bool]  # of all arguments, then the outputs: whether the call has been served
MOST_READY_CALLS = 4096  # calls remembered: each may have sizes of its own
# Larger ints are left to the checks of the longer path, which name the argument.
INT64_MAX = 2**63 - 1
# An observer has to see each call, also one that could be repeated.
OBSERVED = "choices.observer is not None"
_TYPES = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "list[int]": "list",
    "list[float]": "list",
    "list[bool]": "list",
}


class CheckOutCall(Protocol):
    """A function that makes the checks of the registered out-variant before a kernel runs. It returns the checked
    outputs of the caller and the kernel.
    """

    def __call__(self, call: Binding, given: Args, scratch: Tensor | None) -> tuple[Outputs, Kernel | None]:
        """Return the caller's checked outputs and the kernel for the call. The kernel is None for the reference."""


# --- which calls have a fast path -------------------------------------------------------------------------------------


def make_fast_path(op: Executor) -> FastPath:
    """Return the function that a call of ``op`` runs if it involves no gradient and no torch mode. For kernels in
    Python, it is a generated function. Otherwise it is torch's overload below autograd.

    Tensors in place of numbers are checked before torch converts them, except in calls of an op with native code. There
    the check would take a noticeable part of the time of the call.
    """
    by_python = compile_fast_path(op) or (compile_fast_path(op, "cpu") if stays_in_python(op) else None)
    plain = dispatcher_calls.builtin_of(op.below_autograd if op.can_skip_dispatcher else op.overload)
    places = [i for i, a in enumerate(op.spec.args) if a.mutated]
    listed = any(str(a.scalar).startswith("list[") for a in op.spec.scalars)
    # A generated function tests the types of its arguments itself, but not of those in lists.
    needed = listed or not op.can_skip_dispatcher or (by_python is None and op.native is None)
    made = by_python or (with_write_counts(plain, places) if places else plain)
    return check_before_call(op, made) if needed else made


def check_before_call(op: Executor, call: FastPath) -> FastPath:
    """Return a function that first checks its positional arguments for tensors in place of numbers, and then returns
    the result of ``call`` for these arguments. Return ``call`` itself if the op has no numbers.
    """
    check = op.plan.numbers
    if check is None:
        return call

    def checked(*args: Value) -> Result:
        """Raise an error for a tensor in place of a number that torch would convert with a loss. Return the result of
        ``call`` for ``args``.
        """
        check(args, {})
        return call(*args)

    return checked


def stays_in_python(op: Executor) -> bool:
    """Return whether Python will run the calls of ``op`` on the CPU and can repeat them without checks of the
    arguments. This needs a kernel for the CPU that native code will not take over, and no attached native code.
    """
    return op.native is None and any(k.stays_in_python and k.can_repeat for k in op.kernels.get("cpu", ()))


def make_fast_execute(op: Executor) -> FastPath | None:
    """Return a generated function that replaces ``op.execute`` for calls without gradients. For each combination of
    argument layouts and scalars, it stores how to repeat the call and repeats it. Return None unless
    :func:`stays_in_python` is true for ``op`` on the CPU.
    """
    return compile_fast_path(op, "cpu", op.execute_anew) if stays_in_python(op) else None


def has_simple_arguments(spec: OpSpec) -> bool:
    """Return whether all arguments are single tensors of real dtypes or required scalars, and none is written to. A
    generated fast path can check such arguments.

    Complex tensors are excluded since they may be lazily conjugated, which only the dispatcher resolves.
    """
    if spec.mutated or any(a.many for a in spec.args):
        return False
    kinds = [a.tensor.dtypes if a.tensor is not None else () for a in spec.tensors]
    real = all(names and not any(row.kind == "complex" for row in dtypes.rows(names)) for names in kinds)
    return real and not any(a.optional or a.scalar not in _TYPES for a in spec.scalars)


def _common_scope(ready: str) -> dict[str, Any]:
    """Return the global names that the generated source of every fast path uses, with their values. ``ready`` is the
    name of the table in which its calls are stored.
    """
    return {
        "untouched": dispatcher_calls.untouched,
        "any_autocast": dispatcher_calls.any_autocast,
        "is_zero": dispatcher_calls.is_zero,
        "Tensor": Tensor,
        "Parameter": torch.nn.Parameter,
        "INTS": {int},
        "choices": tuned_choices,
        "ready": tuned_choices.ready_calls(ready),
    }


def compile_fast_path(op: Executor, device: str = "cuda", otherwise: FastPath | None = None) -> FastPath | None:
    """Return a generated function ``route(*args)``. It runs calls of ``op`` below autograd without torch's dispatcher
    if all tensors are plain, as :func:`not_plain_tensor` defines it. Return None if every call needs the dispatcher.

    The function runs calls on the device type ``device``. ``otherwise`` runs the calls that it does not support. If
    ``otherwise`` is None, torch's dispatcher runs them. A function that the dispatcher itself calls needs
    ``otherwise``, since it must not call the dispatcher again.
    """
    kernels = op.kernels.get(device, [])
    if not kernels or not has_simple_arguments(op.spec):
        return None
    if not all(k.by_python or (device == "cpu" and k.stays_in_python) for k in kernels):
        return None
    kinds = [a.tensor.dtypes for a in op.spec.tensors if a.tensor is not None]
    if (
        otherwise is None
        and not op.can_skip_dispatcher
        and any(row.floating for names in kinds for row in dtypes.rows(names))
    ):
        return None  # calls come here under autocast, too

    def first(*args: Value) -> Binding:
        """Return the first call on this path with its arguments checked. The function that checks them is compiled
        here, and replaces this function in later calls.
        """
        scope["bind"] = op.plan.quick
        return op.plan.quick(*args)

    scope = _common_scope(op.spec.name)
    scope["dispatcher"] = otherwise or check_before_call(op, dispatcher_calls.builtin_of(op.below_autograd))
    # Defaults that no literal can express are passed to the generated code by position.
    scope["defaults"] = [a.default for a in op.spec.args]
    scope |= {"bind": first, "start": _make_fast_path_start(op)}
    modes = "not untouched()" if otherwise is None else "False"
    if otherwise is None and not op.can_skip_dispatcher:  # callers of others look for autocast
        modes += " or any_autocast()"
    lines = fast_path_lines(op.spec, device, any(k.can_repeat for k in kernels), modes)
    return define_function("route", lines, f"route {op.spec.name}", scope)


def compile_out_fast_path(op: Executor, check: CheckOutCall, *, dispatched: bool) -> OutFastPath | None:
    """Return a generated function ``route(*args, *outs)`` for ``op.out``. It fills ``outs`` and returns True. If the
    call needs the dispatcher, if an output overlaps another tensor, or if no kernel accepts the call, it changes
    nothing and returns False.

    ``check`` checks the outputs of the first call with arguments of given dtypes and layouts. Later calls of these
    dtypes and layouts are repeated without it. If ``dispatched`` is true, the dispatcher calls the function, so torch
    modes and tensor subclasses need no test. Return None if native code may run the out-variant, or if each call needs
    the dispatcher.
    """
    cuda, device = op.kernels.get("cuda", []), ""
    if cuda and all(k.by_python for k in cuda) and any(k.can_repeat for k in cuda):
        device = "cuda"
    elif stays_in_python(op) and all(k.stays_in_python for k in op.kernels["cpu"]):
        device = "cpu"
    if not device or not has_simple_arguments(op.spec):
        return None
    scope = _common_scope(f"{op.spec.name}, out") | {"start": _make_out_start(op, check)}
    scope |= {"any_requires_grad": dispatcher_calls.any_requires_grad, "is_grad_enabled": torch.is_grad_enabled}
    lines = out_fast_path_lines(op.spec, device, [] if dispatched else ["not untouched()"])
    return define_function("route", lines, f"out {op.spec.name}", scope)


# --- calls that were not seen before ----------------------------------------------------------------------------------


def _make_fast_path_start(op: Executor) -> Callable[..., Result]:
    """Return ``start(call, key)``, which runs ``call``, a call with checked arguments, and returns its result. If the
    kernel provides a function that repeats the call with other tensors, ``start`` stores this function under ``key``.
    """
    ready = tuned_choices.ready_calls(op.spec.name)

    def start(call: Binding, key: Hashable | None = None) -> Result:
        """Run ``call``, whose arguments are checked, and return its result. Store a function that repeats it under
        ``key``.

        Nothing is stored if the key is None, if the kernel has no such function, or while calls are recorded for
        tuning. Nothing is stored either if tuned choices are looked up and the call has none.
        """
        kernel = op.pick_kernel(call)
        if kernel is None or key is None:
            return op.run_bound_call(call, kernel)
        asked = supports_answers(op, kernel, call)
        outs, rerun = kernel.run_first_call(call)
        if rerun is not None and tuned_choices.observer is None and not is_unlisted_call(op, call):
            _remember_call(ready, key, _recheck_supports(asked, rerun, op.execute) if asked else rerun)
        return result_of_outputs(outs)

    return start


def _make_out_start(op: Executor, check: CheckOutCall) -> Callable[[Args, Outputs, Hashable], bool]:
    """Return ``start(args, outs, key)``, which runs a call of ``op.out``. It fills ``outs`` and returns True, or
    returns False if no kernel accepts the call. If the kernel provides a function that repeats the call with other
    tensors, ``start`` stores this function under ``key``. ``check`` checks the outputs and picks the kernel.
    """
    ready: dict[Hashable, Any] = tuned_choices.ready_calls(f"{op.spec.name}, out")

    def start(args: Args, given: Outputs, key: Hashable) -> bool:
        """Fill ``given`` with the outputs of the call and return True. If the kernel can repeat the call, store the
        function for that under ``key``. Return False if no kernel accepts the call.
        """
        call = op.plan.quick(*args)
        outs, kernel = check(call, given, None)
        if kernel is None:
            return False
        # A call of ``op.out`` records no gradient, whatever its kernel calls.
        with torch.no_grad():
            refill = kernel.fill_first_call(call, outs)
        if refill is None or tuned_choices.observer is not None or is_unlisted_call(op, call):
            return True
        if not supports_answers(op, kernel, call):
            tensors = [*(v for v, a in zip(args, op.spec.args, strict=True) if a.tensor is not None), *outs]
            # Spans depend on the layout alone, which is in the key, so that later calls need not compute them.
            spans = [bytes_spanned(t) if isinstance(t, Tensor) and t.numel() else 0 for t in tensors]
            _remember_call(ready, key, (refill, *spans))
        return True

    return start


def _remember_call(ready: dict[Hashable, Any], key: Hashable, value: object) -> None:
    """Store ``value``, with which a call is repeated, in ``ready`` under ``key``. If ``ready`` is full, it is cleared
    first.
    """
    if len(ready) >= MOST_READY_CALLS:
        ready.clear()
    ready[key] = value


def is_unlisted_call(op: Executor, call: Binding) -> bool:
    """Return whether tuned choices are looked up in this process and none is found for ``call``.

    Such a call is not stored for repetition, since it is an error if the environment variable ``SHIPLAP_STRICT`` is set
    later.
    """
    return tuned_choices.active and isinstance(tuned_choices.find_choice(op, call), tuned_choices.MissingChoice)


def supports_answers(op: Executor, picked: Kernel, call: Binding) -> list[tuple[Supports, bool]]:
    """Return ``(condition, answer)`` for each kernel that was tried before the kernel ``picked``, and for ``picked``
    itself. ``condition`` is the author's ``supports`` function of the kernel, and ``answer`` is whether it returned
    True for this call. Kernels without one are left out.
    """
    conditions = []
    for kernel in op.eager_kernels(picked.device):
        if kernel.condition is not None:
            conditions.append((kernel.condition, kernel.condition(*call.args) is True))
        if kernel.name == picked.name:
            break
    return conditions


def _recheck_supports(asked: list[tuple[Supports, bool]], rerun: Rerun, anew: FastPath) -> Rerun:
    """Return a function that calls ``rerun``, which repeats a call, if the ``supports`` functions in ``asked`` still
    return the stored values. If not, it runs the call from the beginning by ``anew``. The functions may read tensor
    values, so their results may change.
    """

    def checked(args: Args) -> Result:
        """Return the result of the repeated call if each ``supports`` function returns what it returned before.
        Otherwise return the result of a call run from the beginning, with a new choice of kernel.
        """
        for supports, answer in asked:
            if (supports(*args) is True) is not answer:
                return anew(*args)
        return rerun(args)

    return checked


# --- the text of the functions ----------------------------------------------------------------------------------------


def fast_path_lines(spec: OpSpec, device: str, remembers: bool, modes: str = "not untouched()") -> list[str]:
    """Return the Python source lines of ``route(*args)``, the fast path of calls on the device type ``device``. It
    skips torch's dispatcher.

    ``modes`` is a condition on torch's state, as Python source. If it is true, a call goes to the dispatcher. If
    ``remembers`` is true, the function stores how to repeat a call and repeats it. Otherwise nothing is stored.
    """
    variables = list(map(argument_variable, spec.args))
    positional = [a for a in spec.args if not a.keyword_only]
    leave = f"return dispatcher({', '.join(map(argument_variable, positional))})"
    lines = [f"def route({parameter_list(positional)}):"]
    lines += [f"    {argument_variable(a)} = defaults[{i}]" for i, a in enumerate(spec.args) if a.keyword_only]
    lines += _guard_lines(spec, spec.tensors, device, [modes], leave)
    if remembers:
        lines += _key_lines(map(cache_key_part, spec.args), leave)
        lines += ["    rerun = ready.get(key)"]
        lines += [f"    if rerun is not None and choices.observer is None: return rerun({tuple_source(variables)})"]
    return [*lines, f"    return start(bind({', '.join(variables)}){', key' if remembers else ''})"]


def out_fast_path_lines(spec: OpSpec, device: str, modes: Sequence[str]) -> list[str]:
    """Return the Python source lines of ``route(*args, *outs)``, the fast path of ``op.out`` on ``device``. They
    check in each call that no output overlaps another tensor. They return False if one of the conditions ``modes``
    holds.
    """
    outs = [Arg(o.name, o.tensor) for o in spec.outputs]
    tensors, inputs = [*spec.tensors, *outs], list(spec.tensors)
    every = ", ".join(map(argument_variable, tensors))
    gradients = f"is_grad_enabled() and any_requires_grad({every})"
    given, filled = (tuple_source(map(argument_variable, args)) for args in (spec.args, outs))
    # Addresses differ from call to call, so overlaps are checked in each one.
    overlaps = [_overlap_source(out, other) for i, out in enumerate(outs) for other in (*inputs, *outs[:i])]
    return [
        f"def route({', '.join(map(argument_variable, [*spec.args, *outs]))}):",
        *_guard_lines(spec, tensors, device, [*modes, OBSERVED, f"({gradients})"], "return False"),
        *_key_lines(
            [cache_key_part(a, f"p_{a.name}") for a in (*spec.args, *outs)],
            "return False",
            [f"p_{a.name} = {_address_source(a)}" for a in tensors],
        ),
        "    found = ready.get(key)",
        f"    if found is None: return start({given}, {filled}, key)",
        f"    refill, {', '.join(f'r_{a.name}' for a in tensors)} = found",
        f"    if {either_source(overlaps)}: return False",
        f"    refill({given}, {filled})",
        "    return True",
    ]


def _guard_lines(spec: OpSpec, tensors: Iterable[Arg], device: str, conditions: Sequence[str], leave: str) -> list[str]:
    """Return the Python source lines that execute the statement ``leave`` for calls that need the dispatcher.

    These are calls with a tensor that :func:`not_plain_tensor` describes for ``device``. They are also calls with a
    scalar that exceeds 64 bits or has another type than declared, and calls for which one of the source ``conditions``
    holds.
    """
    strange = [not_plain_tensor(a, device) for a in tensors]
    kinds = [type_test(a) for a in spec.scalars if a.scalar != "int"]
    # Types are compared, since isinstance would let a bool pass as an int.
    integers = [a for a in spec.scalars if a.scalar in ("int", "list[int]")]
    numbers = [argument_variable(a) if a.scalar == "int" else f"*{argument_variable(a)}" for a in integers]
    lines = [f"    if {either_source([*strange, *kinds, *conditions])}: {leave}"]
    if numbers:
        beyond = f"max(n) > {INT64_MAX} or min(n) < {-INT64_MAX - 1}"
        lines += [f"    n = (0, {', '.join(numbers)})", f"    if {{*map(type, n)}} != INTS or {beyond}: {leave}"]
    return lines


def _key_lines(parts: Iterable[str], leave: str, before: Sequence[str] = ()) -> list[str]:
    """Return the Python source lines that run the statements ``before`` and assign a tuple to ``key``, under which a
    call is stored. ``parts`` are the source expressions in the tuple. If a tensor has no address or strides, the lines
    execute the statement ``leave``.
    """
    # A tensor without an address or strides raises, and the checks of the longer path name it.
    body = [*before, f"key = {tuple_source(parts)}"]
    return ["    try:", *(f"        {line}" for line in body), f"    except RuntimeError: {leave}"]


def not_plain_tensor(arg: Arg, device: str) -> str:
    """Return the Python source of the condition that an argument is not a plain tensor. A plain tensor is a ``Tensor``
    or ``Parameter``, and no other subclass, on the device type ``device``.

    Lazily negated views and zero tensors without memory are not plain, since the dispatcher resolves them.
    """
    t = argument_variable(arg)
    condition = (
        f"not ((type({t}) is Tensor or type({t}) is Parameter) and {t}.is_{device}) or {t}.is_neg() or is_zero({t})"
    )
    return f"({t} is not None and ({condition}))" if arg.optional else condition


def type_test(arg: Arg) -> str:
    """Return the Python source of the condition that a scalar argument has another type than the declared one."""
    return f"type({argument_variable(arg)}) is not {_TYPES[arg.scalar or '']}"


def cache_key_part(arg: Arg, address: str = "") -> str:
    """Return the Python source of an argument's values in the key under which a call is stored. They are the layout and
    alignment of a tensor, or the value of a scalar. A float is represented as text, since -0.0 equals 0.0.

    ``address`` is the source of the tensor's address. If it is empty, the address is read from the tensor.
    """
    v = argument_variable(arg)
    if arg.tensor is not None:
        address = address or f"{v}.data_ptr()"
        # Triton specialises kernels on addresses that are multiples of 16 bytes.
        part = f"{v}.shape, {v}.stride(), {v}.dtype, {v}.get_device(), {address} & 15"
        return f"{v} if {v} is None else ({part})" if arg.optional else part
    if arg.scalar in ("float", "list[float]"):
        return f"repr({v})"
    return f"tuple({v})" if arg.scalar and arg.scalar.startswith("list") else v


def _address_source(arg: Arg) -> str:
    """Return the Python source of a tensor's address. It is 0 for an optional tensor that is absent."""
    address = f"{argument_variable(arg)}.data_ptr()"
    return f"0 if {argument_variable(arg)} is None else {address}" if arg.optional else address


def _overlap_source(a: Arg, b: Arg) -> str:
    """Return the Python source of the condition that the address ranges of two tensors overlap."""
    return f"(p_{a.name} < p_{b.name} + r_{b.name} and p_{b.name} < p_{a.name} + r_{a.name})"
