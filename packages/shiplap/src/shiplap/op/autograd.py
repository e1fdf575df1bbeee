"""``@op.backward``: the gradient as a function of saved values, told which gradients are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shiplap.compat import transforms
from shiplap.errors import error
from shiplap.op.source import source_digest
from shiplap.op.spec import OpSpec

__all__ = ["Backward", "floating_outputs", "make_autograd", "make_backward", "missing_backward"]


@dataclass(frozen=True)
class Backward:
    """A declared gradient: ``fn(grad, saved, needs) -> {argument: gradient}`` and the tensors it wants kept."""

    fn: Callable[[Any, SimpleNamespace, SimpleNamespace], dict[str, Any]]
    saves: tuple[str, ...]
    source: str

    @classmethod
    def declare(cls, spec: OpSpec, fn: Callable[..., Any], saves: Iterable[str] | None) -> Backward:
        """``saves`` defaults to every tensor argument; outputs may be named too. SL110 for an unknown name."""
        if spec.mutated:
            raise error(
                "SL110",
                where=spec.name,
                got=f"mutates {', '.join(spec.mutated)}",
                expected="a functional op",
                fix="declare a functional op that returns the new value",
            )
        names = tuple(saves) if saves is not None else tuple(a.name for a in spec.tensors)
        known = {a.name for a in spec.args} | {o.name for o in spec.outputs}
        for name in names:
            if name not in known:
                raise error(
                    "SL110", where=spec.name, got=f"saves {name!r}", expected=f"one of {', '.join(sorted(known))}"
                )
        return cls(fn, names, source_digest(fn))

    def gradients(self, spec: OpSpec, shapes: dict[str, Any], *given: Any) -> dict[str, Any]:
        """Call the declared function with ``grad, saved, needs`` and hold its answer to the contract (SL110, SL303)."""
        result = self.fn(*given)
        if not isinstance(result, dict):
            raise error("SL110", where=spec.name, got=type(result).__name__, expected="a dict {argument: gradient}")
        for name, value in result.items():
            if name not in shapes:
                raise error("SL110", where=spec.name, got=f"gradient of {name!r}", expected="a tensor argument")
            got, expected = _shape(value), shapes[name]
            if value is not None and expected is not None and got != expected:
                raise error(
                    "SL303",
                    where=f"{spec.name}, argument {name!r}",
                    got=f"gradient {_text(got)}",
                    expected=_text(expected),
                )
        return result


def make_backward(spec: OpSpec, backward: Backward) -> tuple[Callable[..., Any], Callable[..., None]]:
    """``(run, setup_context)`` of an ``autograd.Function`` of the op; ``needed`` is its ``needs_input_grad``."""
    places = {a.name: i for i, a in enumerate(spec.args)} | {o.name: -1 - i for i, o in enumerate(spec.outputs)}
    listed = {a.name for a in spec.args if a.many}
    kept = [(n, places[n]) for n in backward.saves if places[n] < 0 or spec.args[places[n]].tensor is not None]
    scalars = [(a.name, places[a.name]) for a in spec.scalars]
    tensors = [(a.name, places[a.name]) for a in spec.tensors]
    single = len(spec.outputs) == 1
    unused = dict.fromkeys([name for name, _ in tensors], False)  # the dispatcher strips trailing defaults

    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: dict[str, Any] | None = None
    ) -> None:
        if keyword_only_inputs:
            inputs = (*inputs, *(keyword_only_inputs[a.name] for a in spec.args[len(inputs) :]))
        outs = output if isinstance(output, tuple) else (output,)
        flat: list[Tensor] = []
        ctx.shiplap_layout = [(n, _store(flat, inputs[i] if i >= 0 else outs[-1 - i])) for n, i in kept]
        ctx.save_for_backward(*flat)
        ctx.shiplap_scalars = {n: inputs[i] for n, i in scalars}
        ctx.shiplap_shapes = {n: _shape(inputs[i]) for n, i in tensors}

    def run(ctx: Any, needed: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        flat, shapes = ctx.saved_tensors, ctx.shiplap_shapes
        saved = SimpleNamespace(**ctx.shiplap_scalars, **{n: _load(flat, slot) for n, slot in ctx.shiplap_layout})
        wanted = unused.copy()
        for name, i in tensors:
            if i < len(needed) and (any(needed[i]) if name in listed else needed[i]):
                wanted[name] = shapes[name] is not None
        found = backward.gradients(spec, shapes, grads[0] if single else grads, saved, SimpleNamespace(**wanted))
        # One answer for each argument that the dispatcher left in place; a list, even an empty one, gets a list.
        return tuple(
            [
                _answer(found.get(arg.name) if wanted.get(arg.name) else None, need)
                for arg, need in zip(spec.args, needed, strict=False)
            ]
        )

    return run, setup_context


def make_autograd(
    spec: OpSpec,
    overload: Any,
    raw: Callable[..., Any],
    reference: Callable[..., Any],
    backward: Backward | None,
) -> Callable[..., Any]:
    """The implementation of the Autograd key: ``raw``, the op below autograd, recorded where a gradient is asked for.

    Graphs traced through it hold ``raw``, so compiled code never comes back here. ``overload`` is what transforms of
    torch.func further out must see. A tangent (forward mode) is that of ``reference``, which is what the op computes.
    """
    if backward is not None:
        run, setup_context = make_backward(spec, backward)
    else:
        run, setup_context = missing_backward(spec), lambda *_: None
    defaults = [a.default for a in spec.args if not a.keyword_only]
    keywords = [(a.name, a.default) for a in spec.args if a.keyword_only]
    listed = any(a.many for a in spec.args)

    def forward(ctx: Any, below: Callable[..., Any], kwargs: dict[str, Any], nest: Any, *args: Any) -> Any:
        ctx.shiplap_nest, args = nest, _nested(args, nest)
        output = below(*args, **kwargs)
        named = {name: kwargs.get(name, default) for name, default in keywords}
        setup_context(ctx, (*args, *defaults[len(args) :]), output, named)
        return output

    def gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        nest = ctx.shiplap_nest
        found = run(ctx, _nested(ctx.needs_input_grad[3:], nest), *grads)
        return (None, None, None, *(found if nest is None else _flat(found)))

    name, members = f"{spec.opname}_backward", {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    function: Any = type(name, (torch.autograd.Function,), members)
    at_level = transforms.level_function(name, members)

    def autograd(keys: Any, /, *args: Any, **kwargs: Any) -> Any:
        transformed = transforms.active()
        if transformed and transforms.carries_tangent((*args, *kwargs.values())):
            return reference(*args, **kwargs)
        flat = _flat(args) if listed else args  # autograd.Function looks at tensors, not at lists of them
        if not (torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in flat)):
            return raw(*args, **kwargs)
        nest = [len(a) if isinstance(a, (list, tuple)) else None for a in args] if listed else None
        if not transformed:
            return function.apply(raw, kwargs, nest, *flat)
        return transforms.apply_at_level(at_level, transforms.below_autograd(overload, keys), kwargs, nest, *flat)

    return autograd


def _flat(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,)))


def _nested(values: tuple[Any, ...], nest: list[int | None] | None) -> tuple[Any, ...]:
    """The inverse of :func:`_flat`: ``nest`` holds the length of each list and None for all else."""
    if nest is None:
        return values
    rest = iter(values)
    return tuple(next(rest) if n is None else [next(rest) for _ in range(n)] for n in nest)


def _answer(gradient: Any, need: Any) -> Any:
    if not isinstance(need, (list, tuple)):
        return gradient
    return [None] * len(need) if gradient is None else [g if n else None for g, n in zip(gradient, need, strict=True)]


def _shape(value: Any) -> Any:
    """Sizes of a tensor, a list of them for a list, None for None."""
    if isinstance(value, Tensor):
        return value.shape
    return [_shape(v) for v in value] if isinstance(value, (list, tuple)) else None


def _text(shape: Any) -> str:
    plain = [_text(s) for s in shape] if isinstance(shape, list) else shape if shape is None else tuple(shape)
    return str(plain).replace("'", "")


def _store(flat: list[Tensor], value: Any) -> int | list[int] | None:
    if value is None:
        return None
    if isinstance(value, Tensor):
        flat.append(value)
        return len(flat) - 1
    return [_store(flat, v) for v in value]  # type: ignore[misc]


def _load(flat: tuple[Tensor, ...], slot: int | list[int] | None) -> Any:
    if slot is None:
        return None
    return flat[slot] if isinstance(slot, int) else [flat[i] for i in slot]


def missing_backward(spec: OpSpec) -> Callable[..., Any]:
    """A backward that says SL304 instead of silently dropping the gradient."""

    def run(ctx: Any, needed: tuple[Any, ...], *grads: Any) -> Any:
        raise error("SL304", where=spec.name, got="a gradient was requested", expected="no gradient")

    return run


def floating_outputs(spec: OpSpec) -> bool:
    """Whether any output could carry a gradient; one of any dtype could."""
    dtypes = [[getattr(torch, n) for n in o.tensor.dtypes] for o in spec.outputs]
    return any(not choices or any(d.is_floating_point or d.is_complex for d in choices) for choices in dtypes)
