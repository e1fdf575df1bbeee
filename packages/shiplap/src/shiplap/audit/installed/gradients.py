"""Checks of the gradients of an op or a function that has no declaration. Their form is that of ``checks``.

A finding's script contains the text of this module, so that it imports torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError

from shiplap.audit.installed.checks import (
    Make,
    MissingRegistration,
    NotApplicable,
    call_op,
    difference,
    storage_place,
    written_names,
)
from shiplap.audit.installed.tensors import map_tensors, strided, tensors_in, transposed

# Errors by which a backward says that it has no derivative of its own.
REFUSALS = (
    *(
        "not implemented",
        "not supported",
        "does not support",
        "does not require grad",
        "no autograd",
        "once_differentiable",
    ),
    "donated buffers",  # torch's error in a compiled backward of which the graph is kept
)


def call_with_gradients(
    op: Any, make: Make, only: int | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]:
    """Return ``(inputs, results, arguments)`` of a call of the op on the arguments that ``make()`` returns. ``inputs``
    are the tensors of floats among the arguments, each of which requires a gradient. ``results`` are those results that
    require one. If ``only`` is not None, only the input with this index requires a gradient.

    Raise ``NotApplicable`` if there is no such input or result, or if the op writes to an argument.
    """
    if written_names(op):
        raise NotApplicable("the op writes to an argument")
    arguments = make()
    inputs = [t for t in tensors_in(arguments) if t.is_floating_point()]
    for number, t in enumerate(inputs):
        t.requires_grad_(only is None or number == only)
    results = [t for t in tensors_in(call_op(op, arguments)) if t.requires_grad]
    if not inputs or not results:
        raise NotApplicable("no gradient")
    return inputs, results, arguments


def drawn_like(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a contiguous tensor of normally distributed values for each result, to be passed to its backward. The
    values are the same in each call.
    """
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in results]


def gradients_of(
    results: list[torch.Tensor], inputs: list[torch.Tensor], given: list[torch.Tensor], *, keep: bool = False
) -> list[torch.Tensor]:
    """Return the gradients of ``inputs`` for the gradients ``given`` of ``results``. An input without a gradient gets
    zeros. If ``keep`` is true, the graph is kept for a second backward.
    """
    torch.manual_seed(0)
    made = torch.autograd.grad(results, inputs, given, allow_unused=True, retain_graph=keep)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(made, inputs, strict=True)]


def rounding_error(tensors: list[torch.Tensor], eps: float = 0.0) -> float:
    """Return the error that rounding may cause in gradients: eight times the precision of their dtypes, and at least
    eight times ``eps``, times the largest finite magnitude in ``tensors``.

    A gradient that is zero but for rounding, as that of a softmax over one element, has no digit that stays the same
    where it is computed in another order, so that its own magnitude says nothing about the allowed error.
    """
    finite = [t.detach()[torch.isfinite(t)] for t in tensors]
    largest = max((t.abs().max().item() for t in finite if t.numel()), default=0.0)
    return 8 * max(eps, *(torch.finfo(t.dtype).eps for t in tensors)) * largest


def plain_gradients(op: Any, make: Make) -> list[torch.Tensor]:
    """Return the gradients of all inputs of a call, for contiguous gradients of its results. Raise ``NotApplicable`` if
    the backward raises, which ``check_gradient`` reports, or if that of an equal call returns something else, which
    ``check_gradient_mutation`` reports.
    """
    made = gradients_of_a_call(op, make)
    if problem := unequal_gradients(op, make, made):
        raise NotApplicable(f"the backward of an equal call returns something else: {problem}")
    return made


def gradients_of_a_call(op: Any, make: Make) -> list[torch.Tensor]:
    """Return the gradients of all inputs of a call, for contiguous gradients of its results. Raise ``NotApplicable`` if
    the backward raises.
    """
    inputs, results, _ = call_with_gradients(op, make)
    try:
        return gradients_of(results, inputs, drawn_like(results))
    except Exception as e:
        raise NotApplicable(f"the backward raises: {e}") from e


def unequal_gradients(op: Any, make: Make, made: list[torch.Tensor]) -> str:
    """Return how the gradients of one more equal call differ from ``made``, or an empty string if they are close."""
    return difference(gradients_of_a_call(op, make), made, floor=rounding_error(made) if made else 0.0)


def same_values(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor of ones like ``t`` whose elements all lie at one address, as the gradient that ``sum`` passes."""
    return torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape)


def check_gradient_layout(op: Any, make: Make) -> str:
    """Run the backward of a call for gradients with equal values but other strides. Return a message that says how the
    gradients of the arguments change, or an empty string if they do not change. ``make()`` returns the arguments.

    Autograd passes gradients of any strides, such as the expanded one of a sum, so that a backward that raises for some
    strides is reported as well.
    """
    for change in (same_values, strided, transposed):
        plain_gradients(op, make)  # where this raises, the strides are not the cause
        inputs, results, _ = call_with_gradients(op, make)
        given = [change(t) for t in drawn_like(results)]
        expected = gradients_of(results, inputs, [t.contiguous() for t in given])
        inputs, results, _ = call_with_gradients(op, make)
        try:
            made = gradients_of(results, inputs, given)
        except Exception as e:
            return f"the backward raises for a gradient that is {change.__name__}: {' '.join(str(e).split())[:200]}"
        if problem := difference(made, expected, floor=rounding_error([*expected, *given])):
            return f"another gradient of the arguments for a gradient that is {change.__name__}: {problem}"
    return ""


def check_gradient_mutation(op: Any, make: Make) -> str:
    """Run the backward of a call twice. Return a message if the backward writes to the gradient that it was given or to
    an argument, or if the second backward over the same graph returns something else, or an empty string. ``make()``
    returns the arguments.

    So does the call itself if it writes to an argument only because that requires a gradient, as to store the gradient
    there: an earlier node of the graph may have saved that argument for its own backward.
    """
    if problem := unequal_gradients(op, make, gradients_of_a_call(op, make)):
        return f"the backward of an equal call returns something else: {problem}"
    without, copies = make(), list[dict[str, Any]]()
    plain = map_tensors(without, torch.clone)
    kept = {storage_place(t) for t in tensors_in(call_op(op, without))}

    def copied() -> dict[str, Any]:
        """Return new arguments, after copies of them were stored."""
        arguments = make()
        copies.append(map_tensors(arguments, torch.clone))
        return arguments

    inputs, results, arguments = call_with_gradients(op, copied)
    for name, value in arguments.items():
        # A call without gradients may write to its arguments as well, or return one.
        returned = bool(kept & {storage_place(t) for t in tensors_in(without[name])})
        usual = returned or bool(difference(without[name], plain[name], 0.0))
        if not usual and (problem := difference(value, copies[-1][name], 0.0)):
            return f"a call whose arguments require gradients writes to {name}, which autograd does not see: {problem}"
    given = drawn_like(results)
    before = map_tensors(arguments, lambda t: t.detach().clone())
    first = [t.clone() for t in gradients_of(results, inputs, given, keep=True)]
    if problem := difference(given, drawn_like(results), 0.0):
        return f"the backward writes to the gradient of a result, which other nodes of the graph read: {problem}"
    for name, value in arguments.items():
        if problem := difference(value, before[name], 0.0):
            return f"the backward writes to {name}: {problem}"
    try:
        second = gradients_of(results, inputs, given)
    except Exception as e:  # a function may free its memory after the first backward
        raise NotApplicable(f"no second backward over one graph: {e}") from e
    problem = difference(second, first, floor=rounding_error([*first, *given]))
    return problem and f"a second backward over the same graph returns something else: {problem}"


def check_gradient_alone(op: Any, make: Make) -> str:
    """Compute the gradient of each argument while the other arguments require none. Return a message that says how it
    differs from the gradient while all of them require one, or an empty string if it does not. ``make()`` returns the
    arguments.
    """
    expected = plain_gradients(op, make)
    if len(expected) < 2:
        raise NotApplicable("one argument of floats")
    for number, wanted in enumerate(expected):
        try:
            inputs, results, arguments = call_with_gradients(op, make, number)
        except NotApplicable:  # no result depends on this argument alone
            continue
        names = [n for n, v in arguments.items() if any(t is inputs[number] for t in tensors_in(v))]
        subject = f"the gradient of {', '.join(names)}, where no other argument requires one"
        if len(results) != len(call_with_gradients(op, make)[1]):
            continue
        try:
            (made,) = gradients_of(results, [inputs[number]], drawn_like(results))
        except Exception as e:
            return f"{subject}: the backward raises: {' '.join(str(e).split())[:200]}"
        if problem := difference(made, wanted, floor=rounding_error([*expected, *drawn_like(results)])):
            return f"{subject}, is another one than where all require one: {problem}"
    return ""


def check_autocast(op: Any, make: Make) -> str:
    """Call the op under autocast to bfloat16, and run its backward outside of it. Return a message if the op or its
    backward raises there, or if results or gradients differ by more than a tenth of the largest value, or an empty
    string. ``make()`` returns the arguments.
    """
    if not any(t.dtype is torch.float32 for t in tensors_in(make())):
        raise NotApplicable("no argument in float32")
    _, results, _ = call_with_gradients(op, make)
    given = drawn_like(results)
    expected = plain_gradients(op, make)
    arguments = make()  # an argument that is the result of another op is not made under autocast
    try:
        with torch.autocast(results[0].device.type, torch.bfloat16):
            cast_inputs, cast, _ = call_with_gradients(op, lambda: arguments)
    except NotApplicable as e:
        if e.__cause__ is None:
            raise
        return f"under autocast to bfloat16 the call raises: {' '.join(str(e).split())[:200]}"
    if problem := difference([t.float() for t in cast], [t.float() for t in results], 0.1):
        return f"under autocast to bfloat16 the result is another one: {problem}"
    try:
        made = gradients_of(cast, cast_inputs, [g.to(t.dtype) for g, t in zip(given, cast, strict=True)])
    except Exception as e:
        return f"the backward of a call under autocast to bfloat16 raises: {' '.join(str(e).split())[:200]}"
    floor = rounding_error([*expected, *given], torch.finfo(torch.bfloat16).eps)
    problem = difference(made, expected, 0.1, floor)
    return problem and f"under autocast to bfloat16 gradients are other ones: {problem}"


def in_float64(op: Any, make: Make, most: int) -> tuple[Callable[..., Any], list[torch.Tensor], list[torch.Tensor]]:
    """Return ``(function, inputs, results)`` of a call in float64, for finite differences. ``function`` maps the inputs
    that require a gradient to the results that do.

    Raise ``NotApplicable`` if the op does not compute in float64, if the inputs have more than ``most`` values, or if
    the results move in steps or not at all. ``make()`` returns the arguments.
    """

    def differentiable(t: torch.Tensor) -> torch.Tensor:
        """Return a float32 or float64 tensor converted to float64, with ``requires_grad`` set. Return another tensor
        unchanged.
        """
        return t.double().requires_grad_() if t.dtype in (torch.float32, torch.float64) else t

    if written_names(op):
        raise NotApplicable("the op writes to an argument")
    arguments = map_tensors(make(), differentiable)
    inputs = [t for t in tensors_in(arguments) if t.requires_grad]
    # Finite differences call the op twice for each value.
    if not inputs or sum(t.numel() for t in inputs) > most:
        raise NotApplicable("no argument of floats, or too many values for finite differences")
    results = tensors_in(call_op(op, arguments))
    plain = tensors_in(call_op(op, make()))
    narrow = [t.float() if t.dtype is torch.float64 else t for t in results]
    if not any(t.dtype is torch.float64 for t in results) or difference(plain, narrow, 1e-2):
        raise NotApplicable("float64 is not computed in float64")
    if any(not t.dtype.is_floating_point for t in results) and not any(t.requires_grad for t in results):
        raise NotApplicable("no result of floats")
    if not any(t.requires_grad for t in results):
        raise MissingRegistration("no gradient: results do not require one where arguments do")

    def function(*changed: torch.Tensor) -> Any:
        """Return the results of the op that require a gradient, with the tensors ``changed`` in place of the inputs
        that do.
        """
        left = iter(changed)
        values = map_tensors(arguments, lambda t: next(left) if t.requires_grad else t)
        return tuple(t for t in tensors_in(call_op(op, values)) if t.requires_grad)

    differentiable_results = [t for t in results if t.requires_grad]
    require_smoothness(function, inputs, differentiable_results)
    return function, inputs, differentiable_results


def require_smoothness(function: Callable[..., Any], inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    """Raise ``NotApplicable`` if finite differences of ``function`` say nothing about its gradient at ``inputs``, where
    it returns ``results``. So it is if they depend on the width of the step, as where a function rounds to float32 on
    the way, or if they are all zero, as those of a function that rounds to integers and defines a gradient of its own.
    """
    if not any(t.numel() for t in inputs):
        return  # nothing can be changed
    generator = torch.Generator().manual_seed(2)
    steps = [torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) for t in inputs]

    def slopes(width: float) -> list[torch.Tensor]:
        """Return the finite differences of the results for a step of ``width`` in the direction of ``steps``."""
        above = function(*((t.detach() + width * s).requires_grad_() for t, s in zip(inputs, steps, strict=True)))
        below = function(*((t.detach() - width * s).requires_grad_() for t, s in zip(inputs, steps, strict=True)))
        return [(a.detach() - b.detach()) / (2 * width) for a, b in zip(above, below, strict=True)]

    narrow, wide = slopes(1e-6), slopes(2e-6)
    largest = max((t.detach().abs().max().item() for t in results if t.numel()), default=0.0)
    # In float64, a difference of two results has an error of about 1e-16 of them, divided by the width.
    if difference(narrow, wide, 1e-4, 1e-7 * largest):
        raise NotApplicable("finite differences depend on their step")
    if any(t.numel() for t in narrow) and not any(t.count_nonzero() for t in narrow):
        raise NotApplicable("the results are constant near the arguments")


def why_backward_raises(e: Exception) -> str:
    """Return a message that a backward has raised ``e``. Raise ``MissingRegistration`` if ``e`` says that there is no
    derivative.
    """
    if isinstance(e, NotImplementedError) or any(words in str(e) for words in REFUSALS):
        raise MissingRegistration("no gradient") from e
    return f"the backward raises: {str(e) or type(e).__name__}"


def check_gradient(op: Any, make: Make) -> str:
    """Compare gradients of the op with finite differences in float64. Return a message that says how they differ, or an
    empty string if they are close.

    Raise ``MissingRegistration`` if there is no gradient, and ``NotApplicable`` if finite differences cannot be
    computed. ``make()`` returns the arguments.
    """
    function, inputs, results = in_float64(op, make, 600)
    torch.manual_seed(0)
    try:
        made = torch.autograd.grad(results, inputs, drawn_like(results), allow_unused=True)
    except Exception as e:  # a backward in Python may raise anything
        return why_backward_raises(e)
    # An argument that the backward leaves out by returning None has no gradient, and is counted apart.
    absent = {number for number, g in enumerate(made) if g is None}

    def of_present(*present: torch.Tensor) -> Any:
        """Return the results for the inputs that have a gradient. The other inputs keep their values."""
        left = iter(present)
        return function(*(t.detach() if n in absent else next(left) for n, t in enumerate(inputs)))

    present = [t for n, t in enumerate(inputs) if n not in absent]
    try:
        if present:
            torch.autograd.gradcheck(of_present, present, eps=1e-6, atol=1e-4, rtol=1e-3, nondet_tol=1e-6)
    except GradcheckError as e:
        if "no graph" in str(e):
            raise MissingRegistration("no gradient of an argument") from e
        return f"gradients differ from finite differences: {' '.join(str(e).split())[:300]}"
    except RuntimeError as e:
        return why_backward_raises(e)
    if absent:
        raise MissingRegistration("no gradient of an argument")
    return ""


def check_double_backward(op: Any, make: Make) -> str:
    """Compare second derivatives of the op with finite differences of its gradients in float64. Return a message that
    says how they differ, or an empty string if they are close. A backward that raises when it is differentiated is
    honest, and no finding.

    Raise ``NotApplicable`` if the gradients themselves are wrong or missing. ``make()`` returns the arguments.
    """
    function, inputs, results = in_float64(op, make, 100)
    try:
        if check_gradient(op, make):
            raise NotApplicable("the first gradient differs")
    except MissingRegistration as e:
        raise NotApplicable("no first gradient") from e
    torch.manual_seed(0)
    try:
        given = [t.requires_grad_() for t in drawn_like(results)]
        made = torch.autograd.grad(results, inputs, given, create_graph=True, allow_unused=True)
        # Only a backward from here reaches the error of a backward that is marked as differentiable once.
        roots = [g for g in made if g is not None and g.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(g) for g in roots])
        torch.autograd.gradgradcheck(function, inputs, eps=1e-6, atol=1e-4, rtol=1e-3, nondet_tol=1e-6)
    except GradcheckError as e:
        return f"second derivatives are wrong, and nothing is raised: {' '.join(str(e).split())[:300]}"
    except Exception as e:
        raise MissingRegistration("no second derivative") from e
    return ""
