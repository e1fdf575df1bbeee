"""``Backward``: a declared gradient, held to what it promises."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TypeAlias

import torch
from torch import Tensor

from shiplap.errors import error
from shiplap.op.source import source_digest
from shiplap.op.spec import OpSpec
from shiplap.op.values import Returned, Value

__all__ = ["Backward", "Gradient", "GradientFn", "Shape", "Surrogate", "shape_of_value"]

Gradient: TypeAlias = Tensor | Sequence[Tensor | None] | None  # of one argument; a sequence for a list of tensors
Gradients: TypeAlias = Mapping[str, Gradient]  # by argument
GradientFn: TypeAlias = Callable[..., Gradients]  # of grad, saved and needs
Shape: TypeAlias = torch.Size | list[torch.Size | None] | None  # of an argument: of a list, the shape of each
Surrogate: TypeAlias = Callable[..., Returned]  # a function in plain PyTorch


@dataclass(frozen=True)
class Backward:
    """A declared gradient: ``fn(grad, saved, needs) -> {argument: gradient}`` and the tensors it wants kept.

    Attributes:
        surrogate: the function whose derivative the gradient is, where that is not the reference's.
    """

    fn: GradientFn
    saves: tuple[str, ...]
    source: str
    surrogate: Surrogate | None = None

    @classmethod
    def declare(
        cls,
        spec: OpSpec,
        fn: GradientFn,
        saves: Iterable[str] | None,
        surrogate: Surrogate | None = None,
    ) -> Backward:
        """``saves`` defaults to every tensor argument; outputs may be named too. SL110 for an unknown name, and for a
        surrogate that takes other arguments than the op."""
        if spec.mutated:
            raise error(
                "SL110",
                where=spec.name,
                got=f"mutates {', '.join(spec.mutated)}",
                expected="a functional op",
                fix="declare a functional op that returns the new value",
            )
        names = tuple(saves) if saves is not None else tuple(a.name for a in spec.tensors)
        known = {a.name for a in spec.args} | {o.name for o in spec.outputs} | {r.name for r in spec.made}
        for name in names:
            if name not in known:
                raise error(
                    "SL110", where=spec.name, got=f"saves {name!r}", expected=f"one of {', '.join(sorted(known))}"
                )
        source = source_digest(fn)
        if surrogate is None:
            return cls(fn, names, source)
        takes = list(inspect.signature(surrogate).parameters) if callable(surrogate) else []
        if takes != [a.name for a in spec.args]:
            got = f"surrogate= with arguments {', '.join(takes)}" if takes else f"surrogate={surrogate!r}"
            expected = f"a function of {', '.join(a.name for a in spec.args)}"
            fix = "give a function in plain PyTorch with the parameters of the reference"
            raise error("SL110", where=spec.name, got=got, expected=expected, fix=fix)
        return cls(fn, names, f"{source}/{source_digest(surrogate)}", surrogate)

    def gradients(
        self,
        spec: OpSpec,
        shapes: Mapping[str, Shape],
        grad: Tensor | tuple[Tensor, ...],
        saved: SimpleNamespace,
        needs: SimpleNamespace,
    ) -> Gradients:
        """Call the declared function and hold its answer to the contract (SL110, SL303)."""
        result = self.fn(grad, saved, needs)
        if not isinstance(result, dict):
            raise error("SL110", where=spec.name, got=type(result).__name__, expected="a dict {argument: gradient}")
        for name, value in result.items():
            if name not in shapes:
                raise error("SL110", where=spec.name, got=f"gradient of {name!r}", expected="a tensor argument")
            got, expected = shape_of_value(value), shapes[name]
            if value is not None and expected is not None and got != expected:
                raise error(
                    "SL303",
                    where=f"{spec.name}, argument {name!r}",
                    got=f"gradient {_text(got)}",
                    expected=_text(expected),
                )
        for name, needed in vars(needs).items():
            if needed and name not in result:
                raise error(
                    "SL110",
                    where=f"{spec.name}, argument {name!r}",
                    got=f"no gradient of {name!r}, which was needed",
                    expected=f"an entry {name!r}",
                    fix=f"return the gradient of {name}, or None for it where the gradient is zero",
                )
        return result


def shape_of_value(value: Value | Gradient) -> Shape:
    """Sizes of a tensor, a list of them for a list, None for None."""
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, (list, tuple)):
        return [v.shape if isinstance(v, Tensor) else None for v in value]
    return None


def _text(shape: Shape) -> str:
    if isinstance(shape, list):
        return f"[{', '.join(map(_text, shape))}]"
    return str(None if shape is None else tuple(shape))
