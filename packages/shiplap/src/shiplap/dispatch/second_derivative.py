"""The gradient of a gradient. It is shown to be right, computed from the reference, or refused by name (``SL313``).

Autograd differentiates the operations of a backward that it records. It takes for constants the parts that it does not
record, such as ``detach()``, a kernel without a gradient or a number taken out of a tensor. It takes for a constant
also a saved result that carries no gradient. The second derivative would then be wrong without an error. A backward
that is recorded, as under ``create_graph=True``, is therefore watched. If such a part is found, the gradients are those
of the reference, if the backward has all its arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from shiplap import torch_private
from shiplap.declare.gradient import Backward, Gradient, Gradients, Shape
from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.values import Args, Returned, Value
from shiplap.errors import ShiplapError, error, notice
from shiplap.settings import settings
from shiplap.torch_private import dispatcher_transforms
from shiplap.torch_private.dispatcher_transforms import is_tracked

Formula = Callable[[Args], Returned]  # of all arguments in declared order: the function whose derivative is declared


class SecondDerivative:
    """A function that computes the gradients of an op's backward while autograd records the backward itself. A gradient
    of a gradient can therefore be computed.

    ``silent`` lists the saved results that are declared to have no gradient.
    """

    def __init__(self, spec: OpSpec, backward: Backward, formula: Formula) -> None:
        """Prepare second derivatives for the op with the declared gradient ``backward``. They can be computed from the
        differentiable function ``formula``.
        """
        self.spec, self.backward, self.formula = spec, backward, formula
        self.silent = [n for n in backward.saves if n in spec.results and n in spec.detached]
        self._varying: dict[tuple[bool, ...], frozenset[str]] = {}

    def __call__(
        self, grads: Sequence[Any], saved: Any, needs: Any, shapes: Mapping[str, Shape], level: int = 0
    ) -> Gradients:
        """Return the gradients of a backward that is itself differentiated. They are not checked.

        If autograd recorded the declared function fully, they are its gradients. Otherwise they are those of the
        reference, or gradients whose derivatives raise ``SL313``. ``level`` is the level of torch.func at which the
        call was recorded, or 0 outside torch.func.
        """
        grad: Any = grads[0] if len(self.spec.results) == 1 else tuple(grads)
        call = self.backward.fn
        # The author states that the backward can be differentiated as it is.
        if self.backward.once_differentiable is False:
            return call(grad, saved, needs)
        silent = [n for n in self.silent if any(map(is_real_or_complex, _tensors_in_nested(vars(saved)[n])))]
        tensors = list(_tensors_in_nested([*grads, *vars(saved).values()]))
        live = [t for t in tensors if is_tracked(t)]
        if self.backward.once_differentiable:
            with torch.no_grad():
                result = call(grad, saved, needs)
            linked = bool(live) and (not silent or self._linked(saved, needs))
            return self._refusing(result, live if linked else [], tensors, level, "declared once_differentiable=True")
        if silent:
            varying = self._varying_results(shapes, saved)
            silent = [n for n in silent if n in varying]
        # Without a tensor that autograd tracks there is no derivative to lose.
        if not live and not silent:
            return call(grad, saved, needs)
        constants = [
            (t, f"saved.{n}, which carries no gradient") for n in silent for t in _tensors_in_nested(vars(saved)[n])
        ]
        watch = AutogradGapTracker(constants)
        with watch:
            result = call(grad, saved, needs)
        gap = watch.gap(result, needs, live) if isinstance(result, dict) else ""
        if not gap:
            return result
        args = self._arguments(saved)
        # Run again, a reference with random results would draw other numbers.
        if args is not None and not self.spec.random and not settings().strict:
            made = self._by_formula(args, grads, needs)
            if made is not None:
                reason = f"autograd does not record all of its backward: {gap}"
                notice(
                    f"{self.spec.name}/second derivative",
                    f"{self.spec.name}: its reference gives the derivatives of its gradient ({reason})",
                )
                return made
        linked = bool(live) and (not silent or self._linked(saved, needs))
        return self._refusing(result, live if linked else [], tensors, level, gap)

    def _linked(self, saved: Any, needs: Any) -> bool:
        """Return whether the error of a wrong second derivative reaches every argument whose gradient is needed. It
        does if a saved result requires a gradient, or if all these arguments were saved.
        """
        if any(t.requires_grad for n in self.spec.results for t in _tensors_in_nested(vars(saved).get(n))):
            return True
        return all(name in vars(saved) for name, needed in vars(needs).items() if needed)

    # --- what cannot be differentiated --------------------------------------------------------------------------------

    def _refusing(
        self, result: Gradients, live: list[Tensor], tensors: list[Tensor], level: int, gap: str
    ) -> Gradients:
        """Return the gradients ``result`` as tensors whose own derivatives raise ``SL313``. ``gap`` is the reason, an
        operation that autograd did not record. The error is attached to ``live``, the tensors that autograd tracks.

        Inside a nested transform of torch.func, which is recognised by ``tensors`` and ``level``, raise ``SL313``
        immediately. Raise it immediately also if no tensor can carry the error.
        """

        def refuse() -> ShiplapError:
            """Return the error ``SL313`` with the reason ``gap``, the operation of the backward that autograd did not
            record.
            """
            return error(
                "SL313",
                where=f"{self.spec.name}, its backward",
                got=gap,
                expected="a backward of which each operation is recorded",
            )

        if not isinstance(result, dict):
            return result
        if dispatcher_transforms.is_transform_active():
            if dispatcher_transforms.is_nested(level, tensors):
                raise refuse()
            return result
        if not live:
            raise refuse()
        given = [t for t in _tensors_in_nested(result.values()) if is_real_or_complex(t)]
        if not given:
            return result
        recorder: dispatcher_transforms.AutogradFunction = _DerivativeRefusal
        made = cast("tuple[Tensor, ...]", recorder.apply(refuse, len(given), *given, *live))
        rest = dict(zip(map(id, given), made, strict=True))

        def replaced(value: Gradient) -> Gradient:
            """Return a gradient, or a list of gradients, with each floating-point tensor replaced by a tensor whose
            derivative raises ``SL313``. Any other value is returned unchanged.
            """
            if isinstance(value, Tensor):
                return rest.get(id(value), value)
            return [cast("Tensor | None", replaced(v)) for v in value] if isinstance(value, (list, tuple)) else value

        return {name: replaced(value) for name, value in result.items()}

    # --- what the reference gives in its place ------------------------------------------------------------------------

    def _arguments(self, saved: Any) -> list[Value] | None:
        """Return all arguments of the recorded call in order. Return None if a tensor argument was not saved."""
        given = vars(saved)
        if any(a.name not in given for a in self.spec.args):
            return None
        return [
            _detach_nested(given[a.name]) if a.name in self.spec.detached else given[a.name] for a in self.spec.args
        ]

    def _by_formula(self, args: list[Value], grads: Sequence[Any], needs: Any) -> Gradients | None:
        """Return the gradients by argument for ``grads``, the gradients of the results, so that autograd records their
        computation. They are those of the formula, the function whose derivative is the op's gradient. ``needs`` states
        which arguments need one. Return None if no result depends on an argument.
        """
        wanted = {a.name for a in self.spec.tensors if vars(needs)[a.name]}
        given = {a.name: v for a, v in zip(self.spec.args, args, strict=True) if a.name in wanted}
        inputs = [t for t in _tensors_in_nested(given) if is_real_or_complex(t)]
        pulled = [g for g in _tensors_in_nested(list(grads)) if is_real_or_complex(g)]

        def results(*tensors: Tensor) -> tuple[Tensor, ...]:
            """Return the floating-point results of the formula, the op's differentiable function. ``tensors`` take the
            place of the tensors of the arguments that need a gradient.
            """
            rest = iter(tensors)
            own = {name: _replace_floating(value, rest) for name, value in given.items()}
            made = self.formula(tuple([own.get(a.name, v) for a, v in zip(self.spec.args, args, strict=True)]))
            return tuple([t for t in _tensors_in_nested(made) if is_real_or_complex(t)])

        if dispatcher_transforms.is_transform_active():
            made, pull, *_ = torch.func.vjp(results, *inputs)
            gradients = pull(tuple(pulled)) if len(made) == len(pulled) else None
        else:
            gradients = _pull_back(results, inputs, pulled)
        if gradients is None:
            return None
        rest = iter(gradients)
        return {name: cast("Gradient", _replace_floating(value, rest)) for name, value in given.items()}

    # --- which results are constants by nature ------------------------------------------------------------------------

    def _varying_results(self, shapes: Mapping[str, Shape], saved: Any) -> frozenset[str]:
        """Return the names of results declared without a gradient that depend on an argument in a way that has a
        derivative. The mask of a dropout, for example, does not.

        The formula is the op's differentiable function. It is run on fake tensors of the arguments' ``shapes`` to find
        these results, once for each set of arguments that are not None. ``saved`` holds the saved values of the call.
        If that run fails, return all saved results that are declared without a gradient.
        """
        key = tuple(shapes.get(a.name) is not None for a in self.spec.tensors)
        if key not in self._varying:
            try:
                self._varying[key] = self._watched_results(shapes, saved)
            except Exception:
                self._varying[key] = frozenset(self.silent)
        return self._varying[key]

    def _watched_results(self, shapes: Mapping[str, Shape], saved: Any) -> frozenset[str]:
        """Return the names of results declared without a gradient that depend on an argument. They are found in a run
        of the formula, the op's differentiable function, on fake tensors that require gradients.
        """
        scalars = vars(saved)
        with torch_private.fake_mode(symbolic=False), torch.enable_grad():
            args = [
                _fake_tensors(a, shapes.get(a.name)) if a.tensor is not None else scalars[a.name]
                for a in self.spec.args
            ]
            watch = AutogradGapTracker([])
            with watch:
                made = self.formula(tuple(args))
            results = made if isinstance(made, (tuple, list)) and len(self.spec.results) > 1 else (made,)
            return frozenset(
                name
                for name, value in zip(self.spec.results, cast("Sequence[Value]", results), strict=True)
                if name in self.silent and any(t.requires_grad or watch.is_lost(t) for t in _tensors_in_nested(value))
            )


class _DerivativeRefusal(torch.autograd.Function):
    """An autograd function that returns views of its first ``count`` tensors and raises an error if it is
    differentiated.
    """

    @staticmethod
    def forward(ctx: Any, refuse: Callable[[], ShiplapError], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return views of the first ``count`` tensors. ``refuse``, which makes the error for the backward, is stored in
        ``ctx``.
        """
        ctx.refuse = refuse
        return tuple([t.view_as(t) for t in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Raise the error that the stored function ``refuse`` returns, since a derivative of these tensors would be
        wrong.
        """
        raise ctx.refuse()


# Functions whose results do not depend on the values of their arguments.
_CONSTANT = frozenset(
    [
        "empty_like",
        "full_like",
        "ones_like",
        "rand_like",
        "randint_like",
        "randn_like",
        "zeros_like",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "normal_",
        "uniform_",
        "bernoulli_",
        "zero_",
        "random_",
        "exponential_",
        "heaviside",
        "sign",
    ]
)
# Functions by which the values of a tensor leave what autograd and a watch can see.
_EXPORTS = frozenset(
    [
        "__array__",
        "__complex__",
        "__cuda_array_interface__",
        "__dlpack__",
        "__float__",
        "data_ptr",
        "item",
        "numpy",
        "storage",
        "tolist",
        "untyped_storage",
    ]
)


ops_without_backward: set[str] = set()  # what torch calls the declared ops without a gradient


class AutogradGapTracker(torch.overrides.TorchFunctionMode):
    """A mode for torch functions which finds results that depend on a tensor with a gradient although autograd has not
    recorded the dependence.

    A tensor is *lost* if it depends on the values of a tensor with a gradient, but has no gradient itself.
    """

    def __init__(self, lost: Sequence[tuple[Tensor, str]]) -> None:
        """Start with the tensors of ``lost``, each with the reason why its dependence on arguments is not recorded."""
        super().__init__()
        self._lost = {id(t): (t, why) for t, why in lost}  # the tensor stays, so that its id is not given again
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._exported = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function of torch and return its result. Record which tensors it made, and which lost their
        gradient.
        """
        result = func(*args, **(kwargs or {}))
        self._note(_torch_function_name(func), args, kwargs or {}, result)
        return result

    def _note(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record which tensors the call of the torch function ``name`` makes. If an argument requires a gradient,
        record also each result through which autograd passes none, with the reason. ``args`` and ``kwargs`` are the
        arguments, and ``result`` is the result of the call.
        """
        outs = list(_tensors_in_nested(result))
        given = [t for t in _tensors_in_nested([*args, *kwargs.values()]) if is_real_or_complex(t)]
        why = next((self._lost[id(t)][1] for t in given if id(t) in self._lost), "")
        # Results of constants alone have no gradient to lose.
        if not (why or any(map(is_tracked, given))) or name in _CONSTANT:
            self._made.update((id(t), weakref.ref(t)) for t in outs)
            return
        if name in _EXPORTS:
            self._exported = self._exported or why or f"{name}() of a tensor with a gradient"
        # A write to a view changes the tensor below it as well.
        if _writes_in_place(name) and args and isinstance(args[0], Tensor):
            outs += [t for t in (args[0], args[0]._base) if t is not None]
        for out in outs:
            if is_real_or_complex(out):
                if reason := why or _autograd_gap(name, out):
                    self._lost[id(out)] = out, reason
                else:
                    self._lost.pop(id(out), None)

    def is_lost(self, tensor: Tensor) -> bool:
        """Return whether the tensor may depend on values that autograd did not record. After values of a tensor with a
        gradient were passed out of torch, for example as Python numbers, the result is True for every tensor.
        """
        return id(tensor) in self._lost or bool(self._exported)

    def gap(self, result: Mapping[str, Gradient], needs: Any, live: Sequence[Tensor]) -> str:
        """Return the reason why the derivative of a gradient in ``result`` that ``needs`` marks would be wrong, such as
        an operation that was not recorded. Return an empty string if none would be. ``live`` are the tensors that
        autograd tracks.
        """
        known = {id(t) for t in live}
        for name, value in result.items():
            for tensor in _tensors_in_nested(value) if vars(needs).get(name) else ():
                if id(tensor) in self._lost:
                    return self._lost[id(tensor)][1]
                if self._exported:
                    return self._exported
                # The id alone does not suffice, since it may belong to a newer object.
                made = self._made.get(id(tensor), lambda: None)() is tensor
                seen = is_tracked(tensor) or made or id(tensor) in known
                if not seen and live and is_real_or_complex(tensor):
                    return f"the gradient of {name!r}, which is made by code that autograd does not record"
        return ""


def _autograd_gap(name: str, out: Tensor) -> str:
    """Return the reason why autograd cannot differentiate ``out``, the result of the torch function ``name``. Return an
    empty string if it can.
    """
    if not is_tracked(out):
        return f"{name}(), whose result autograd does not follow"
    if name in ops_without_backward or any(
        "NotImplemented" in node.name() for node in dispatcher_transforms.graph_nodes(out)
    ):
        return f"{name}, which has no backward"
    return ""


def _writes_in_place(name: str) -> bool:
    """Return whether the torch function ``name``, such as ``add_`` or ``__setitem__``, changes its first argument."""
    if name in ("__setitem__", "__set__"):
        return True
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name not in ("__index__",))


def _torch_function_name(func: Any) -> str:
    """Return the name of a torch function, operator or attribute getter as ``__torch_function__`` receives it."""
    if type(func).__name__ == "OpOverload":
        return str(func.name())
    name = str(func.__name__)
    return str(func.__self__.__name__) if name == "__get__" else name


def is_real_or_complex(tensor: Tensor) -> bool:
    """Return whether the tensor has a floating-point or complex dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors_in_nested(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested lists, tuples and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (str, bytes)):
        return
    elif isinstance(value, Mapping):
        yield from _tensors_in_nested(list(value.values()))
    elif isinstance(value, (list, tuple)) or type(value).__name__ in ("dict_values", "odict_values"):
        for each in value:
            yield from _tensors_in_nested(each)


def _pull_back(
    results: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> Sequence[Tensor | None] | None:
    """Return the gradient of ``results(*inputs)`` for each input, or None for an input without one. ``grads`` are the
    gradients of the results. Autograd records the computation of the returned gradients. Return None if no result
    depends on an input.
    """
    with torch.enable_grad():
        own = [t.view_as(t) for t in inputs]  # the gradient of one argument, whatever the arguments have in common
        made = results(*own)
        pairs = [(o, g) for o, g in zip(made, grads, strict=False) if o.requires_grad]
        if len(made) != len(grads) or not pairs:
            return None
        asked = [t for t in own if t.requires_grad]
        outs, pulled = [o for o, _ in pairs], [g for _, g in pairs]
        rest = iter(torch.autograd.grad(outs, asked, pulled, create_graph=True, allow_unused=True))
        return [next(rest) if t.requires_grad else None for t in own]


def _replace_floating(value: Value, rest: Iterator[Tensor | None]) -> Any:
    """Return ``value`` with each floating-point tensor replaced by the next one of ``rest``, and any other tensor by
    None. Lists are kept.
    """
    if isinstance(value, Tensor):
        return next(rest) if is_real_or_complex(value) else None
    return [_replace_floating(v, rest) for v in cast("Sequence[Any]", value)] if value is not None else None


def _detach_nested(value: Value) -> Value:
    """Return a tensor, or the tensors in a list, detached from the autograd graph. Any other value is returned
    unchanged.
    """
    if isinstance(value, (list, tuple)):
        return cast("Value", [_detach_nested(cast("Value", v)) for v in value])
    return value.detach() if isinstance(value, Tensor) else value


def _fake_tensors(arg: Arg, shape: Shape) -> Any:
    """Return a tensor of zeros for an argument of this shape under the current fake mode, or a list of tensors for a
    list. It requires a gradient if its dtype can have one. Return None if ``shape`` is None.
    """
    if shape is None:
        return None
    if isinstance(shape, list):
        return [_fake_tensors(arg, each) for each in shape]
    kinds = arg.tensor.dtypes if arg.tensor is not None else ()
    dtype = torch.float32 if not kinds or "float32" in kinds else getattr(torch, kinds[0])
    # The values do not matter under fake tensors, only what autograd records of them.
    made = torch.zeros(tuple(shape), dtype=dtype)
    return made.requires_grad_() if is_real_or_complex(made) else made
