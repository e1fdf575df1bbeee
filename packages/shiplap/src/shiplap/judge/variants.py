"""Other shapes and other values for a reference that comes with one maker of inputs only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shiplap.referee.recipe import Recipe

__all__ = ["KINDS", "Form", "forms_of", "vary"]

KINDS = ("drawn", "normal", "wide", "tiny", "skewed", "ties", "shifted", "constant")
MOST = 10  # other shapes

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Form:
    """Shapes and kind of values of one call. ``recipe`` says both for a declared op; else ``shapes`` and ``kind``."""

    label: str
    timed: bool = False
    recipe: Recipe | None = None
    shapes: Shapes = ()
    kind: str = "drawn"


def forms_of(first: tuple[Any, ...], runs: Callable[[Form], bool], vary_shapes: bool) -> list[Form]:
    """The shapes of ``first`` with every kind of values, then other shapes that the reference takes."""
    own = tuple(tuple(v.shape) for v in first if isinstance(v, Tensor))
    plain = Form(_label(own, "drawn"), shapes=own)
    kinds = [replace(plain, kind=kind, label=_label(own, kind)) for kind in KINDS]
    own_forms = [f for f in kinds if f.kind == "drawn" or runs(f)]
    own_forms = [replace(f, timed=f.kind in ("drawn", "normal")) for f in own_forms]
    others: list[Form] = []
    for shapes in _shapes(own) if vary_shapes else ():
        form = Form(_label(shapes, "drawn"), shapes=shapes)
        if len(others) < MOST and runs(form):
            others.append(form)
            normal = replace(form, kind="normal", label=_label(shapes, "normal"))
            others += [normal] if len(others) < MOST and runs(normal) else []
    if others:  # one more to be timed, the largest
        largest = max(others, key=lambda f: sum(_numel(s) for s in f.shapes))
        others = [replace(f, timed=f is largest) for f in others]
    return [*own_forms, *others]


def _label(shapes: Shapes, kind: str) -> str:
    return f"{', '.join('x'.join(map(str, s)) or 'scalar' for s in shapes)} {kind}"


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _shapes(own: Shapes) -> Iterator[Shapes]:
    """Each size changed wherever it stands, then each dim alone; sizes that divide nothing."""
    for size in sorted({n for s in own for n in s if n > 1}, reverse=True):
        for new in (size - 1, size // 2 + 1, size // 4 * 3 + 2):
            if 0 < new != size:
                yield tuple(tuple(new if n == size else n for n in s) for s in own)
    for at, shape in enumerate(own):
        for dim, size in enumerate(shape):
            for new in (size + 1, size // 2 + 3):
                changed = (*shape[:dim], new, *shape[dim + 1 :])
                yield (*own[:at], changed, *own[at + 1 :])


def vary(made: tuple[Any, ...], form: Form, rng: torch.Generator) -> tuple[Any, ...]:
    """``made`` in the shapes and with the kind of values of ``form``."""
    shapes = iter(form.shapes)
    return tuple(_varied(v, next(shapes), form.kind, rng) if isinstance(v, Tensor) else v for v in made)


def _varied(t: Tensor, shape: tuple[int, ...], kind: str, rng: torch.Generator) -> Tensor:
    if tuple(t.shape) != shape:
        t = _resampled(t, shape, rng)
    if kind == "drawn" or not t.is_floating_point() or not t.numel():
        return t
    noise = torch.randn(t.shape, generator=rng, dtype=torch.float64).to(t.device)
    if kind == "ties":
        values = torch.randint(-1, 2, t.shape, generator=rng).to(t.device, torch.float64) / 2
    elif kind == "skewed":  # most are small, and a few decide
        values = noise * torch.where(torch.rand(t.shape, generator=rng).to(t.device) < 0.02, 300.0, 0.01)
    elif kind == "constant":
        values = torch.full_like(noise, float(torch.randn((), generator=rng)))
    else:
        scale = {"normal": 1.0, "wide": 30.0, "tiny": 1e-3, "shifted": 1.0}[kind]
        values = noise * scale + (20.0 if kind == "shifted" else 0.0)
    return (values.abs() if float(t.min()) >= 0 else values).to(t.dtype)


def _resampled(t: Tensor, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Values of ``t`` in another shape: what the argument may hold, its own values show."""
    count = _numel(shape)
    if not t.numel() or not count:
        return t.new_zeros(shape)
    flat = t.detach().reshape(-1)
    if count <= flat.numel():
        return flat[:count].reshape(shape).clone()
    return flat[torch.randint(0, flat.numel(), (count,), generator=rng).to(t.device)].reshape(shape)
