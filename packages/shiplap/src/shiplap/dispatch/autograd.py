"""The autograd implementation of an op. It records calls, and runs the declared gradient in the backward.

``autograd_function.py`` generates a shorter recorder for ops with single tensors. The general one here also supports
lists of tensors, keyword-only arguments, arguments that are written to, and the levels of torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from shiplap import dtypes
from shiplap.declare.gradient import Backward, Gradient, Shape, shape_of_value, values_class
from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Args, Result, Value
from shiplap.dispatch.autograd_function import compile_recorder
from shiplap.dispatch.second_derivative import Formula, SecondDerivative, is_real_or_complex, ops_without_backward
from shiplap.errors import ShiplapError, error
from shiplap.plan.argument_kinds import number_check
from shiplap.torch_private import dispatcher_calls, dispatcher_transforms
from shiplap.torch_private.dispatcher_library import Keys, Overload, with_write_counts

NeedsGradient: TypeAlias = bool | Sequence[bool]  # whether an argument's gradient is used; of a list, whose
ListLengths: TypeAlias = list[int | None] | None  # the length of each list among the arguments, None for all else
SavedSlot: TypeAlias = int | list[int] | None  # where among the saved tensors an argument is

RecordCall: TypeAlias = Callable[..., Result]  # of a dispatch key set or None, and the arguments of a call


@dataclass(frozen=True)
class _BackwardRecord:
    """The values that a recorded call keeps for its backward in addition to tensors.

    ``layout`` has, for each saved name, the position of its tensor among the saved tensors, or a list of positions.
    ``scalars`` holds the scalar arguments by name. ``shapes`` holds the shapes of the tensor arguments. ``level`` is
    the level of torch.func at which the call was recorded.
    """

    layout: list[tuple[str, SavedSlot]]
    scalars: dict[str, Value]
    shapes: dict[str, Shape]
    level: int


class BackwardContext(Protocol):
    """The attributes of the context of an ``autograd.Function`` that are used here. Shiplap adds ``shiplap_kept``,
    ``shiplap_nest`` and ``shiplap_made``, which hold values for the backward and the lengths of lists.
    """

    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that ``save_for_backward`` has kept, in the order of its arguments."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors for the backward, so that torch notices a later write to them."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Declare that the forward has written to ``tensors``, which are arguments of the call."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Declare that ``tensors``, results of the forward, are not differentiable. Autograd then requests no gradient
        of them.
        """

    shiplap_kept: _BackwardRecord
    shiplap_nest: ListLengths
    shiplap_made: ListLengths


class _RunBackward(Protocol):
    """A function that runs the backward of a recorded call. It takes the context, whether each argument needs a
    gradient, and the gradients of the results. For each argument that the dispatcher passed, it returns the
    gradient, or None if none is needed.
    """

    def __call__(self, ctx: BackwardContext, needed: Sequence[NeedsGradient], *grads: Tensor) -> tuple[Gradient, ...]:
        """Return the gradient of each argument for ``grads``, the gradients of the results. ``needed`` states which
        arguments need one.
        """


# One argument, for each costs time: the call, its keywords, and how its arguments and results nest.
_RecordedCall: TypeAlias = tuple[RecordCall, dict[str, Value], ListLengths, list[ListLengths]]
_SetUp: TypeAlias = Callable[[BackwardContext, Args, Result], None]  # keeps what of a call its backward needs


def _make_backward(spec: OpSpec, backward: Backward, formula: Formula) -> tuple[_RunBackward, _SetUp]:
    """Return ``(run, set_up)`` for the ``autograd.Function`` of the op. ``set_up`` saves what the declared backward
    reads. ``run`` calls that backward and checks its gradients. ``formula`` is the function whose derivative is the
    gradient.
    """
    results = spec.results
    places = {a.name: i for i, a in enumerate(spec.args)} | {name: -1 - i for i, name in enumerate(results)}
    kept = [(n, places[n]) for n in backward.saves if places[n] < 0 or spec.args[places[n]].tensor is not None]
    scalars = [(a.name, places[a.name]) for a in spec.scalars]
    tensors = [(a.name, places[a.name]) for a in spec.tensors]
    single = len(results) == 1
    unused = dict.fromkeys([name for name, _ in tensors], False)  # the dispatcher strips trailing defaults
    make_saved = values_class(spec, "saved", [n for n, _ in (*scalars, *kept)])
    make_needs = values_class(spec, "needs", [n for n, _ in tensors])
    second = SecondDerivative(spec, backward, formula)

    def set_up(ctx: BackwardContext, inputs: Args, output: Result) -> None:
        """Save in ``ctx`` the tensors, scalars and tensor shapes that the declared backward reads. They are found among
        ``inputs`` and ``output``, the arguments and results of the call.
        """
        outs = output if isinstance(output, tuple) else (output,)
        flat: list[Tensor] = []
        layout = [(n, _store_tensors(flat, inputs[i] if i >= 0 else outs[-1 - i])) for n, i in kept]
        ctx.save_for_backward(*flat)
        # save_for_backward takes tensors only, so scalars and shapes are kept beside it.
        ctx.shiplap_kept = _BackwardRecord(
            layout,
            {n: inputs[i] for n, i in scalars},
            {n: shape_of_value(inputs[i]) for n, i in tensors},
            dispatcher_transforms.transform_level(),
        )

    def run(ctx: BackwardContext, needed: Sequence[NeedsGradient], *grads: Tensor) -> tuple[Gradient, ...]:
        """Return the gradient of each argument of the recorded call, computed by the declared backward from ``grads``,
        the gradients of the results. ``needed`` states which arguments need one. For all others, None is returned.
        """
        flat, of = ctx.saved_tensors, ctx.shiplap_kept
        if of.level and not dispatcher_transforms.is_transform_active():
            flat = dispatcher_transforms.unwrap_ended(flat)  # as the function that ``torch.func.vjp`` returns
        saved = make_saved(**of.scalars, **{n: _load_tensors(flat, slot) for n, slot in of.layout})
        wanted = unused.copy()
        for name, i in tensors:
            if i < len(needed):
                need = needed[i]
                asked = need if isinstance(need, bool) else any(need)
                wanted[name] = asked and of.shapes[name] is not None
        needs = make_needs(**wanted)
        # Gradients are only enabled in a backward that is itself differentiated.
        if torch.is_grad_enabled():
            gradients = second(grads, saved, needs, of.shapes, of.level)
        else:
            gradients = backward.fn(grads[0] if single else grads, saved, needs)
        # Results of a traced op may be on another device than its arguments.
        device = None if spec.traced else next((g.device for g in grads if isinstance(g, Tensor)), None)
        backward.check(spec, of.shapes, gradients, wanted, device)
        # One answer for each argument that the dispatcher left in place; a list, even an empty one, gets a list.
        return tuple(
            [
                _gradient_per_member(gradients.get(arg.name) if wanted.get(arg.name) else None, need)
                for arg, need in zip(spec.args, needed, strict=False)
            ]
        )

    return run, set_up


@dataclass
class _UnpackedCall:
    """The saved values of a call that C++ has recorded. They take the place of the context of an ``autograd.Function``,
    whose attributes have the same names.
    """

    saved_tensors: tuple[Tensor, ...]
    shiplap_kept: _BackwardRecord


def make_gradient_call(spec: OpSpec, backward: Backward, formula: Formula) -> Callable[..., Any]:
    """Return ``gradients(*values)``, the backward of a call that C++ has recorded.

    Its values are the op's arguments, then four lists. These are the results, their gradients, a bool for each tensor
    argument that states whether its gradient is needed, and the shapes. The shapes are one flat list with the rank and
    the sizes of each tensor argument, or -1 for an argument that is None.
    """
    run, _ = _make_backward(spec, backward, formula)
    places = {a.name: i for i, a in enumerate(spec.args)} | {name: -1 - i for i, name in enumerate(spec.results)}
    tensors = [i for i, a in enumerate(spec.args) if a.tensor is not None]

    def gradients(*values: Any) -> Gradient | tuple[Gradient, ...]:
        """Return the gradients of the tensor arguments, computed by the declared backward, as a tuple. For a single
        tensor argument, return its gradient itself. The enclosing function documents ``values``.
        """
        args, (results, grads, needs, sizes) = values[: len(spec.args)], values[len(spec.args) :]
        flat, shapes, rest = list[Tensor](), dict[str, Shape](), iter(sizes)
        for i in tensors:
            rank = next(rest)
            shapes[spec.args[i].name] = None if rank < 0 else torch.Size([next(rest) for _ in range(rank)])
        names = [n for n in backward.saves if places[n] < 0 or places[n] in tensors]
        layout = [(n, _store_tensors(flat, args[i] if (i := places[n]) >= 0 else results[-1 - i])) for n in names]
        scalars = {a.name: args[places[a.name]] for a in spec.scalars}
        call = _UnpackedCall(tuple(flat), _BackwardRecord(layout, scalars, shapes, 0))
        wanted = dict(zip(tensors, needs, strict=True))
        needed = [wanted.get(i, False) for i in range(len(spec.args))]
        # As where Python records: a backward inside of an autocast region gives the gradients that it gives after it.
        answers = dispatcher_calls.call_outside_autocast(run, cast("BackwardContext", call), needed, *grads)
        made = tuple([answers[i] for i in tensors])
        return made if len(made) > 1 else made[0]

    return gradients


def _missing_backward(spec: OpSpec) -> tuple[_RunBackward, _SetUp]:
    """Return ``(run, set_up)`` for an op without a declared gradient. ``run`` raises ``SL304``, and ``set_up`` does
    nothing.
    """

    def run(ctx: BackwardContext, needed: Sequence[NeedsGradient], *grads: Tensor) -> tuple[Gradient, ...]:
        """Raise ``SL304``, since the op has no declared gradient."""
        raise _no_gradient_error(spec, "a gradient was requested")

    return run, lambda ctx, inputs, output: None


def _no_gradient_error(spec: OpSpec, got: str) -> ShiplapError:
    """Return the error ``SL304`` for an op without a gradient. ``got`` is the text of the cause. If the op writes to
    its arguments, it cannot have a gradient, and the error advises ``no_grad`` or ``detach()``.
    """
    fix = "call the op under torch.no_grad(), or pass .detach()" if spec.mutated else ""
    return error("SL304", where=spec.name, got=got, expected="no gradient", fix=fix)


def _make_recorders(
    spec: OpSpec, backward: Backward | None, formula: Formula, changes: Sequence[int]
) -> tuple[dispatcher_transforms.AutogradFunction, dispatcher_transforms.AutogradFunction]:
    """Return two autograd functions that record a call of the op. The first is for calls outside the transforms of
    torch.func, and the second is for calls inside them.

    ``changes`` holds the positions of the arguments that are written to. The autograd functions return these arguments
    after the outputs. A gradient of such an argument raises the error of an op without a backward.
    """
    run, set_up = _make_backward(spec, backward, formula) if backward is not None else _missing_backward(spec)
    without, traced = _detached_positions(spec), spec.traced
    special = bool(without or traced or changes)

    def forward(ctx: BackwardContext, how: _RecordedCall, *flat: Value) -> Result:
        """Call the op and save what the backward reads. ``flat`` are the arguments with the members of lists in place
        of the lists. Return the results, then the arguments that were written to. ``how`` holds the function to call,
        its keywords and the list lengths.
        """
        call, kwargs, nest, made = how
        ctx.shiplap_nest, args = nest, cast("Args", _nest_lists(flat, nest))
        output = call(*args, **kwargs)
        set_up(ctx, spec.complete(args, kwargs), output)
        if not special:
            return output
        if without:
            ctx.mark_non_differentiable(*_tensors_in_lists(_results_at(output, without)))
        if traced:
            output, ctx.shiplap_made = _flatten_traced_results(spec, output)
            made.append(ctx.shiplap_made)
        if not changes:
            return output
        written = tuple(t for t in _tensors_in_lists(args[i] for i in changes) if is_real_or_complex(t))
        ctx.mark_dirty(*written)
        return *(output if isinstance(output, tuple) else (output,) if spec.outputs else ()), *written

    def gradients(ctx: BackwardContext, *grads: Tensor) -> tuple[Gradient, ...]:
        """Return None for ``how``, the first argument of ``forward``, then the gradients of the flattened arguments.
        ``grads`` are the gradients of the results. Autocast is off meanwhile, so that the gradients are the same inside
        an autocast region and after it.
        """
        if dispatcher_calls.any_autocast():
            return dispatcher_calls.call_outside_autocast(gradients, ctx, *grads)
        nest = ctx.shiplap_nest
        of_results = _nest_lists(grads, ctx.shiplap_made) if traced else grads
        answers = run(ctx, _nest_lists(ctx.needs_input_grad[1:], nest), *cast("tuple[Tensor, ...]", of_results))
        return (None, *(answers if nest is None else _flatten_lists(answers)))

    # torch shows the class name as the grad_fn of a result.
    name, members = f"{spec.opname}_backward", {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    return dispatcher_transforms.make_autograd_function(name, members), dispatcher_transforms.level_function(
        name, members
    )


def make_autograd(
    spec: OpSpec,
    overload: Overload,
    below: RecordCall,
    reference: RecordCall,
    formula: Formula,
    backward: Backward | None,
) -> tuple[RecordCall, dispatcher_transforms.AutogradFunction | None]:
    """Return ``(implementation, recorder)`` of the op under torch's Autograd dispatch key. ``recorder`` is a cheaper
    ``autograd.Function`` for calls with only positional arguments, or None if the op cannot have one.

    The implementation calls ``below``, the op below autograd. If a gradient is requested, it records the call. The
    recorder makes no further checks. ``overload`` is the op to which outer transforms of torch.func are applied.
    Forward mode differentiates ``reference``. ``formula`` is the function whose derivative is the gradient.
    """
    (ops_without_backward.discard if backward is not None else ops_without_backward.add)(overload.name())
    changes = [i for i, a in enumerate(spec.args) if a.mutated]
    keyed = bool(changes) or any(a.keyword_only for a in spec.tensors)  # all go by position: such tensors count, too
    if keyed:
        below, reference = _call_by_keyword(spec, below), _call_by_keyword(spec, reference)
    if changes:
        below = with_write_counts(below, changes)
    listed = any(a.many for a in spec.args)
    numbers = number_check(spec)

    def at_this_level(keys: Keys) -> RecordCall:
        """Return the function that calls the op below autograd at one level of nested torch.func transforms. ``keys``
        are the dispatch keys left at that level. The function takes all arguments by position.
        """
        call = dispatcher_transforms.below_autograd(overload, keys)
        call = _call_by_keyword(spec, call) if keyed else call
        return with_write_counts(call, changes) if changes else call

    function, at_level = _make_recorders(spec, backward, formula, changes)
    plain = compile_recorder(spec, backward, formula)

    def autograd(keys: Keys | None, /, *args: Value, **kwargs: Value) -> Result:
        """Return the result of the op. If an argument requires a gradient, the call is recorded for autograd. If one
        carries a forward-mode tangent, the result comes from the reference. Otherwise it comes from the kernels.
        ``keys`` are the dispatch keys left at this level of torch.func.
        """
        if numbers is not None:
            numbers(args, kwargs)
        transformed = dispatcher_transforms.is_transform_active()
        if plain is not None and not transformed and not kwargs:
            asked = torch.is_grad_enabled() and dispatcher_calls.any_requires_grad(*args)
            return plain.apply(below, *args) if asked else below(*args)
        if keyed:
            args, kwargs = spec.complete(args, kwargs), {}
        if transformed and dispatcher_transforms.carries_tangent((*args, *kwargs.values())):
            if changes:
                raise _no_gradient_error(spec, "a tangent was requested (forward mode)")
            return reference(*args, **kwargs)
        # autograd.Function looks at tensors, not at lists of them
        flat = _flatten_lists(cast("Sequence[Any]", args)) if listed else args
        if not (torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in flat)):
            # A native kernel skips autograd at all levels, and an outer one may record the call.
            return (at_this_level(keys) if transformed and keys is not None else below)(*args, **kwargs)
        if changes and not transformed and any(t.requires_grad for t in _tensors_in_lists(args[i] for i in changes)):
            return below(*args, **kwargs)  # the argument checks refuse such a tensor with a better error
        nest = [len(a) if isinstance(a, (list, tuple)) else None for a in args] if listed else None
        made: list[ListLengths] = []
        if not transformed:
            result = function.apply((below, kwargs, nest, made), *flat)
            if made:
                return _nest_results(result, made)
            return _first_outputs(result, len(spec.outputs)) if changes else result
        if changes:
            raise _no_gradient_error(spec, "a gradient was requested by a transform of torch.func")
        assert keys is not None  # torch.func calls the op through the dispatcher
        call = dispatcher_transforms.enable_outer_gradients(at_this_level(keys))
        return _nest_results(dispatcher_transforms.apply_at_level(at_level, (call, kwargs, nest, made), *flat), made)

    return (_detach_arguments(spec, autograd), None) if spec.detached else (autograd, plain)


def _detach_arguments(spec: OpSpec, record: RecordCall) -> RecordCall:
    """Return a function with the arguments and the result of ``record``, which records a call for autograd. It first
    detaches the arguments that are declared to have no gradient. If no result carries a gradient, it detaches all
    tensors.
    """
    # Without a result that carries a gradient, autograd would keep the arguments for nothing.
    alone = {*spec.results} <= {*spec.detached} and not spec.mutated
    cut = {a.name for a in spec.tensors if alone or a.name in spec.detached}
    places = [(i, a.name) for i, a in enumerate(spec.args) if a.name in cut]

    def recorded(keys: Keys | None, /, *args: Value, **kwargs: Value) -> Result:
        """Return the result of ``record`` with the arguments detached that are declared to have no gradient. They may
        be passed by position or by keyword.
        """
        values = list(args)
        for i, name in places:
            if i < len(values):
                values[i] = _detach_value(values[i])
            elif name in kwargs:
                kwargs[name] = _detach_value(kwargs[name])
        return record(keys, *values, **kwargs)

    return recorded


def _detach_value(value: Value) -> Value:
    """Return a tensor, or the tensors of a list, detached from the autograd graph. Any other value is returned
    unchanged.
    """
    if isinstance(value, (list, tuple)):
        return cast("Value", [_detach_value(v) for v in value])
    return value.detach() if isinstance(value, Tensor) else value


def _detached_positions(spec: OpSpec) -> list[int]:
    """Return the positions, among the op's results, of those that are declared to carry no gradient."""
    return [i for i, name in enumerate(spec.results) if name in spec.detached]


def _results_at(result: Result, places: Sequence[int]) -> list[Value]:
    """Return the results at the positions ``places`` as a list. ``result`` is a tuple of results, or a single result,
    whose position is 0.
    """
    values = (result,) if not isinstance(result, tuple) else result
    return [values[i] for i in places]


def detach_results(spec: OpSpec, result: Result) -> Result:
    """Return ``result`` with those results detached from the autograd graph that are declared to carry no gradient."""
    places = _detached_positions(spec)
    if not places or result is None:
        return result
    values: list[Any] = list(result) if len(spec.results) > 1 else [result]
    for i in places:
        values[i] = _detach_value(values[i])
    return values[0] if len(values) == 1 else tuple(values)


def _flatten_traced_results(spec: OpSpec, output: Result) -> tuple[Result, ListLengths]:
    """Return ``(flat, lengths)`` for the results of an op whose results only a run of the reference determines.
    ``flat`` is a tuple with the members of each list in place of the list. ``lengths`` holds the length of each
    result's list, or None for a result that is no list.
    """
    values = (output,) if len(spec.made) == 1 else cast("tuple[Value, ...]", output)
    nest: ListLengths = [len(v) if isinstance(v, (list, tuple)) else None for v in values]
    return cast("Result", _flatten_lists(cast("Sequence[Any]", values))), nest


def _nest_results(result: Result, made: Sequence[ListLengths]) -> Result:
    """Return the flat results of a recorded call with their lists restored, as they are declared. ``made`` holds one
    item with the length of each result's list. If no result was flattened, ``made`` is empty.
    """
    if not made:
        return result
    values = _nest_lists(cast("tuple[Any, ...]", result), made[0])
    return cast("Result", values[0] if len(values) == 1 else values)


def _tensors_in_lists(values: Iterable[Value]) -> Iterator[Tensor]:
    """Yield the tensors among ``values`` and in the lists among them, in order."""
    for value in values:
        yield from (v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, Tensor))


def _call_by_keyword(spec: OpSpec, call: RecordCall) -> RecordCall:
    """Return ``called(*args)``, which takes all arguments of the op by position in declared order. It passes the
    keyword-only ones to ``call`` by keyword, and returns the result.
    """

    def called(*args: Value) -> Result:
        """Return the result of the op for the arguments ``args`` in declared order. The keyword-only ones are passed by
        keyword.
        """
        positional, named = spec.split(args)
        return call(*positional, **named)

    return called


def _first_outputs(result: Result, count: int) -> Result:
    """Return the first ``count`` results of a recorded call, without the written arguments that follow them. For 0
    return None, for 1 the result itself, and otherwise a tuple.
    """
    outs = result if isinstance(result, tuple) else (result,)
    return None if count == 0 else outs[0] if count == 1 else cast("Result", outs[:count])


T = TypeVar("T")


def _flatten_lists(values: Iterable[T | Sequence[T]]) -> tuple[T, ...]:
    """Return the values in one tuple, with the members of each list in place of the list."""
    return tuple(v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,)))


def _nest_lists(values: tuple[T, ...], nest: ListLengths) -> tuple[T | list[T], ...]:
    """Return the flat ``values`` with their lists restored. This is the inverse of :func:`_flatten_lists`.

    ``nest`` holds the length of each list, and None for a value that is no list. If ``nest`` itself is None, return
    ``values`` unchanged.
    """
    if nest is None:
        return values
    rest = iter(values)
    return tuple(next(rest) if n is None else [next(rest) for _ in range(n)] for n in nest)


def _gradient_per_member(gradient: Gradient, need: NeedsGradient) -> Gradient:
    """Return the gradient of a list argument as a list with one gradient, or None, for each member. ``need`` states
    which members need one. The gradient of a single tensor is returned unchanged.
    """
    if isinstance(need, bool):
        return gradient
    if gradient is None or isinstance(gradient, Tensor):
        return [None] * len(need)
    return [g if n else None for g, n in zip(gradient, need, strict=True)]


def _store_tensors(flat: list[Tensor], value: Value) -> SavedSlot:
    """Append a tensor, or the tensors of a list, to ``flat``, the tensors saved for the backward. Return their
    positions as a number or a list. Return None for any other value.
    """
    if isinstance(value, Tensor):
        flat.append(value)
        return len(flat) - 1
    if isinstance(value, (list, tuple)):
        flat += value
        return list(range(len(flat) - len(value), len(flat)))
    return None


def _load_tensors(flat: tuple[Tensor, ...], slot: SavedSlot) -> Value:
    """Return the saved tensor at the position ``slot`` of ``flat``. If ``slot`` is a list of positions, return a list
    of tensors. Return None if ``slot`` is None.
    """
    if slot is None:
        return None
    return flat[slot] if isinstance(slot, int) else [flat[i] for i in slot]


def carries_gradients(spec: OpSpec) -> bool:
    """Return whether a gradient can flow from an argument to an output or to an argument that is written to, judging by
    the declared dtypes.
    """
    written = [a.tensor.dtypes for a in spec.args if a.mutated and a.tensor is not None]
    given = any(dtypes.differentiable(a.tensor.dtypes) for a in spec.tensors if a.tensor is not None)
    return given and (floating_outputs(spec) or any(map(dtypes.differentiable, written)))


def floating_outputs(spec: OpSpec, detached: bool = False) -> bool:
    """Return whether an output of the op has a declared dtype that can carry a gradient, or may have any dtype.
    Floating-point and complex dtypes can carry a gradient.

    If ``detached`` is true, outputs that are declared to carry none count, too.
    """
    made = spec.made if spec.traced else spec.outputs
    types = [r.tensor for r in made if r.tensor and (detached or r.name not in spec.detached)]
    dtypes = [[getattr(torch, n) for n in t.dtypes] for t in types]
    return any(not choices or any(d.is_floating_point or d.is_complex for d in choices) for choices in dtypes)
