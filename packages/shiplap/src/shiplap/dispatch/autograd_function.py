"""The recorder of plain calls of an op. It is an ``autograd.Function`` whose two functions are generated from the
declaration.

A call that autograd has to see runs Python twice, forwards and backwards, however its kernels are launched. Both
functions are therefore generated for the op. Their code contains which arguments to save, where they are, which
gradients may be requested, and which results are valid. The general recorder (``dispatch/autograd.py``) is used for
lists of tensors, ops that write, results of other kinds, keyword-only arguments and levels of ``torch.func``. Both
require the same of the declared gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, is_grad_enabled

from shiplap.declare.generated_code import define_function, tuple_source
from shiplap.declare.gradient import Backward, Gradients, Shape, is_real, values_class
from shiplap.declare.spec import Arg, OpSpec
from shiplap.dispatch.second_derivative import Formula, SecondDerivative
from shiplap.plan.argument_kinds import number_check
from shiplap.plan.expression import argument_variable, parameter_list
from shiplap.torch_private import dispatcher_calls, dispatcher_transforms

# What the lines of :func:`_number_check_source` name, but for ``numbers``, the check of one op.
_NUMBER_CHECK_NAMES: dict[str, Any] = {
    "Tensor": Tensor,
    "NO_INTS": (Tensor, np.ndarray, np.generic),
    "LISTS": {list, tuple},
    "only_ints": frozenset((int,)).issuperset,
    "any_requires_grad": dispatcher_calls.any_requires_grad,
}


def compile_recorder(
    spec: OpSpec, backward: Backward | None, formula: Formula
) -> dispatcher_transforms.AutogradFunction | None:
    """Return an ``autograd.Function`` with generated code whose ``apply(call, *args)`` records ``call(*args)`` for
    autograd. ``args`` are positional. Trailing arguments that have a default may be left out.

    Return None for an op that writes to arguments or has no declared gradient. Return None also if it takes lists or
    keyword-only arguments, or has results other than new tensors of declared sizes.
    """
    if backward is None or spec.mutated or spec.traced or spec.returns or not spec.outputs:
        return None
    # The generated code has one variable for each positional tensor, and no form for lists or keywords.
    if any(a.many or a.keyword_only for a in spec.args):
        return None

    def refuse(result: Any, device: torch.device, *shapes: Shape, **wanted: bool) -> None:
        """Raise the catalogue error for a wrong ``result`` of the declared gradient function. ``device`` is that of the
        call, and ``shapes`` holds the shape of each tensor argument. ``wanted`` maps the name of each tensor argument
        to whether its gradient is needed.
        """
        backward.check(spec, dict(zip([a.name for a in spec.tensors], shapes, strict=True)), result, wanted, device)

    second = SecondDerivative(spec, backward, formula)

    def followed(grads: tuple[Tensor, ...], saved: Any, needs: Any, *shapes: Shape) -> Gradients:
        """Return the gradients by argument in a backward that autograd itself records, for a gradient of the gradient.
        ``saved`` and ``needs`` are the objects that the declared gradient receives. ``shapes`` are those of the tensor
        arguments.
        """
        return second(grads, saved, needs, dict(zip([a.name for a in spec.tensors], shapes, strict=True)))

    names: dict[str, Any] = {
        "defaults": [a.default for a in spec.args],
        "Saved": values_class(spec, "saved", [*(a.name for a in spec.scalars), *_saved_tensor_names(spec, backward)]),
        "Needs": values_class(spec, "needs", [a.name for a in spec.tensors]),
        **_NUMBER_CHECK_NAMES,
        "zeros": _zeros,
        "expanded_zero": _expanded_zero,
        "is_grad_enabled": is_grad_enabled,
        "any_autocast": dispatcher_calls.any_autocast,
        "call_outside_autocast": dispatcher_calls.call_outside_autocast,
        "numbers": number_check(spec, recorded=True) or (lambda args, kwargs: None),
        "fn": backward.fn,
        "followed": followed,
        "refuse": refuse,
        **{f"op{i}": each.op for i, each in enumerate(backward.ops)},
    }
    forward = define_function("forward", recorder_lines(spec, backward), f"gradient of {spec.name}", names)
    members = {"forward": staticmethod(forward), "backward": staticmethod(names["backward"])}
    return dispatcher_transforms.make_autograd_function(f"{spec.opname}_backward", members)


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new tensor of zeros of this shape and dtype. It stands for the gradient of a result that the loss does
    not depend on.
    """
    return torch.zeros(shape, dtype=dtype, device=device)


def _expanded_zero(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one zero expanded to ``shape``, which takes no further memory. It stands for the gradient of a result
    declared to carry none.
    """
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def compile_native_record(spec: OpSpec, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``plain``, which records positional calls in C++, after a check. The check refuses a
    scalar argument given as a tensor that requires a gradient, since that gradient would be lost, and floating-point
    numbers of a tensor or of NumPy for an int. If the op has no scalars, return ``plain`` itself.
    """
    positional = [a for a in spec.args if not a.keyword_only]
    lines = _number_check_source(positional)
    if not lines:
        return plain
    names: dict[str, Any] = {
        "defaults": [a.default for a in positional],
        **_NUMBER_CHECK_NAMES,
        "numbers": number_check(spec) or (lambda args, kwargs: None),
        "plain": plain,
    }
    call = f"    return plain({', '.join(map(argument_variable, positional))})"
    return define_function(
        "record", [f"def record({parameter_list(positional)}):", *lines, call], f"record {spec.name}", names
    )


def recorder_lines(spec: OpSpec, backward: Backward) -> list[str]:
    """Return the Python source lines of ``forward(ctx, call, <arguments>)`` and ``backward(ctx, <gradients of the
    outputs>)`` of the op's autograd function.
    """
    return [*_forward_source(spec, backward), *_backward_source(spec, backward)]


def _forward_source(spec: OpSpec, backward: Backward) -> list[str]:
    """Return the Python source lines of ``forward``. They call the op and save tensors, scalars and shapes for the
    backward.

    Tensors are saved by ``save_for_backward``. torch then detects later in-place changes of these tensors, and frees
    them after use.
    """
    many = len(spec.outputs) > 1
    results = {name: f"out[{i}]" if many else "out" for i, name in enumerate(spec.results)}
    saved = [results.get(name) or argument_variable(spec.arg(name)) for name in _saved_tensor_names(spec, backward)]
    shapes = [_tensor_shape_source(a) for a in spec.tensors]
    detached = [results[name] for name in spec.detached if name in results]
    described = [f"({made}.shape, {made}.dtype, {made}.device)" for made in results.values()] if detached else []
    return [
        f"def forward(ctx, call, {parameter_list(spec.args)}):",
        *_number_check_source(spec.args),
        f"    out = call({', '.join(map(argument_variable, spec.args))})",
        *([f"    ctx.save_for_backward({', '.join(saved)})"] if saved else []),
        f"    ctx.shiplap_kept = {tuple_source([*map(argument_variable, spec.scalars), *shapes, *described])}",
        *([f"    ctx.mark_non_differentiable({', '.join(detached)})"] if detached else []),
        # Torch would fill a tensor with zeros for each of these, which may be as large as all that the op computes.
        *(["    ctx.set_materialize_grads(False)"] if detached else []),
        "    return out",
    ]


def _number_check_source(args: Sequence[Arg]) -> list[str]:
    """Return, in a list, the Python source line that checks scalar arguments. In generated code, it raises an error for
    a scalar given as a tensor with a gradient, which would be lost, and for an int given as a tensor or a NumPy value
    of floating-point numbers, whose fraction torch would cut off. The list is empty if the op has no scalars.
    """
    conditions = []
    for arg in [a for a in args if a.tensor is None]:
        name = argument_variable(arg)
        if arg.scalar == "int":
            conditions.append(f"{name}.__class__ is not int and isinstance({name}, NO_INTS)")
        elif arg.scalar == "list[int]":
            conditions.append(f"{name}.__class__ in LISTS and not only_ints(map(type, {name}))")
        elif str(arg.scalar).startswith("list"):
            conditions.append(f"{name}.__class__ in LISTS and any_requires_grad(*{name})")
        else:
            conditions.append(f"isinstance({name}, Tensor)")
    given = ", ".join(map(argument_variable, args))
    return [f"    if {' or '.join(conditions)}: numbers(({given},), {{}})"] if conditions else []


def _backward_source(spec: OpSpec, backward: Backward) -> list[str]:
    """Return the Python source lines of ``backward``. They call the declared gradient, check its result and put the
    gradients in the order of the arguments.

    Autocast is off in them, so that a backward gives the same gradients inside an autocast region and after it.
    """
    tensors, places = [a.name for a in spec.tensors], {a.name: i + 1 for i, a in enumerate(spec.args)}
    saved, grads = _saved_tensor_names(spec, backward), [f"g{i}" for i in range(len(spec.outputs))]
    kept = [f"k_{a.name}, " for a in spec.scalars] + [f"s_{name}, " for name in tensors]
    taken = f"ctx, {', '.join(grads)}"
    lines = [f"def backward({taken}):", f"    if any_autocast(): return call_outside_autocast(backward, {taken})"]
    lines += ["    needed = ctx.needs_input_grad", "    given = len(needed)"]
    lines += [f"    {''.join(f'v_{name}, ' for name in saved)} = ctx.saved_tensors"] if saved else []
    described = [f"r{i}" for i in range(len(grads))] if {*spec.detached} & {*spec.results} else []
    lines += [f"    {''.join([*kept, *(f'{name}, ' for name in described)])} = ctx.shiplap_kept"]
    for grad, made, name in zip(grads, described, spec.results, strict=False):
        lines += [f"    if {grad} is None: {grad} = {'expanded_zero' if name in spec.detached else 'zeros'}(*{made})"]
    lines += [f"    w_{name} = given > {places[name]} and needed[{places[name]}]" for name in tensors]
    wanted = ", ".join(f"{name}=w_{name}" for name in tensors)
    kept_values = ", ".join([*(f"k_{a.name}" for a in spec.scalars), *(f"v_{name}" for name in saved)])
    values = f"Saved({kept_values}), Needs({', '.join(f'w_{name}' for name in tensors)})"
    grad = grads[0] if len(grads) == 1 else f"({', '.join(grads)})"
    followed = f"followed(({', '.join(grads)},), {values}, {', '.join(f's_{n}' for n in tensors)})"
    # Gradient ops are called directly in the generated code, without a dict in between.
    known = [name for each in backward.ops for name in each.gives]
    if backward.ops:
        lines += ["    if is_grad_enabled():", f"        result = {followed}"]
        lines += [f"        d_{name} = result.get({name!r})" for name in known]
        lines += ["    else:"]
        lines += [
            f"    {line}" for i in range(len(backward.ops)) for line in _gradient_op_call_source(spec, backward, i)
        ]
    else:
        lines += [
            f"    result = {followed} if is_grad_enabled() else fn({grad}, {values})",
            f"    if type(result) is not dict: {_gradient_refusal_source(backward, tensors, wanted)}",
            *(f"    d_{name} = result.get({name!r})" for name in tensors),
        ]
    lines += [
        f"    if not ({_gradient_check_source(spec, backward)}):",
        f"        {_gradient_refusal_source(backward, tensors, wanted)}",
    ]
    answers = [f"d_{a.name} if w_{a.name} else None" if a.tensor is not None else "None" for a in spec.args]
    return [*lines, f"    return None, {', '.join(answers)}"]


def _gradient_op_call_source(spec: OpSpec, backward: Backward, number: int) -> list[str]:
    """Return the Python source line, in a list, that calls the gradient op number ``number`` if one of its results is
    needed.
    """
    part, scalars = backward.ops[number], {a.name for a in spec.scalars}
    takes = [(f"g{at}" if at >= 0 else f"k_{n}" if n in scalars else f"v_{n}") for n, at in part.takes(spec)]
    named = [a.name if a.keyword_only else "" for a in part.op.spec.args]
    values = [f"{name}={value}" if name else value for name, value in zip(named, takes, strict=True)]
    results = "".join(f"d_{name}, " for name in part.gives)
    called = f"op{number}({', '.join(values)})"
    if len(part.gives) == 1 and not part.op.spec.single_tuple:
        results, absent = f"d_{part.gives[0]}", "None"
    else:
        absent = f"({'None, ' * len(part.gives)})"
    return [f"    {results} = {called} if {' or '.join(f'w_{name}' for name in part.gives)} else {absent}"]


def _gradient_check_source(spec: OpSpec, backward: Backward) -> str:
    """Return the Python source of a condition on the gradients. Each gradient must be None or have the shape of its
    argument, and ``result`` must have a gradient for each argument that needs one. What the user's function returns
    must be on the device of the results' gradients.
    """
    conditions = []
    known = [n for each in backward.ops for n in each.gives] if backward.ops else [a.name for a in spec.tensors]
    if not backward.ops:
        # If the numbers are equal, the result has no other key than these.
        conditions.append(f"len(result) == {' + '.join(f'({n!r} in result)' for n in known)}")
    for name in [a.name for a in spec.tensors]:
        if name not in known:
            conditions.append(f"not w_{name}")
            continue
        there = f"isinstance(d_{name}, Tensor) and (s_{name} is None or d_{name}.shape == s_{name})"
        there += "" if backward.ops else f" and d_{name}.device == g0.device"
        there += f" and not d_{name}.is_complex()" if not backward.ops and is_real(spec.arg(name)) else ""
        absent = f"d_{name} is None" + ("" if backward.ops else f" and (not w_{name} or {name!r} in result)")
        conditions.append(f"({there} or {absent})")
    return " and ".join(conditions)


def _gradient_refusal_source(backward: Backward, tensors: list[str], wanted: str) -> str:
    """Return the Python source of the call that raises the error for wrong gradients of the declared backward.
    ``tensors`` are the names of the tensor arguments. ``wanted`` is the source of keywords that state which of them
    need a gradient.
    """
    known = {name for each in backward.ops for name in each.gives}
    result = f"{{{', '.join(f'{n!r}: d_{n}' for n in tensors if n in known)}}}" if backward.ops else "result"
    return f"refuse({result}, g0.device, {', '.join(f's_{n}' for n in tensors)}, {wanted})"


def _saved_tensor_names(spec: OpSpec, backward: Backward) -> list[str]:
    """Return the names of the arguments and results that are saved as tensors for the backward. They are those that the
    declared gradient reads. Scalars are stored separately.
    """
    scalars = {a.name for a in spec.scalars}
    return [name for name in dict.fromkeys(backward.saves) if name not in scalars]


def _tensor_shape_source(arg: Arg) -> str:
    """Return the Python source of the shape of a tensor argument. In generated code, its value is None if the argument
    is optional and absent.
    """
    name = argument_variable(arg)
    return f"None if {name} is None else {name}.shape" if arg.optional else f"{name}.shape"
