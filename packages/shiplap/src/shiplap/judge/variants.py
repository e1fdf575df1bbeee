"""Forms of inputs for a reference that comes with one function for inputs only: other shapes and other values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from random import SystemRandom
from typing import Any

import torch
from torch import Tensor

from shiplap.sampling.case import tree_map
from shiplap.sampling.recipe import Recipe
from shiplap.sampling.run import tensors

KINDS = ("drawn", "normal", "wide", "tiny", "skewed", "ties", "shifted", "constant", "scaled", "large", "small")
WHOLE = ("blank", "whole", "flags")  # kinds that are used only if every result of the reference is finite
# Powers of ten between which a scale is drawn.
DECADES = {"scaled": (-3.0, 3.0), "large": (3.0, 5.0), "small": (-7.0, -3.0)}
THRESHOLDS = 6  # the most constants of the candidate around which values are drawn
SIGNED = 4  # the most arguments that get negative numbers, each alone
MOST_WHOLE = 1 << 20  # the largest integer, whose sums are not exact in float32
PLAIN = 6  # the most scalars that get another value
LARGER, ROOM = 4, 1 << 14  # other shapes may grow by this factor, or to this number of elements
WINDOW = 7  # a small size that may be that of a window, and must not vary
FAR = 1e7  # larger constants are no thresholds of values
CHANCE = SystemRandom()

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Form:
    """The shapes and the kind of values of one call.

    For a declared op, ``recipe`` holds both. Otherwise ``shapes`` and ``kind`` do.
    """

    label: str
    timed: bool = False
    recipe: Recipe | None = None
    shapes: Shapes = ()
    kind: str = "drawn"
    scale: float = 0.0  # the approximate size of the values of kind "about"
    signed: tuple[int, ...] = ()  # tensors that get negative numbers although none of their own is negative
    plain: int = -1  # the argument, a number or a flag, that gets another value

    @property
    def whole(self) -> bool:
        """Whether every result of the reference must be finite for this form to be used.

        The reference may not be meant for such values.
        """
        return self.kind in WHOLE or bool(self.signed) or self.plain >= 0


def forms_of(
    first: tuple[Any, ...],
    runs: Callable[[Form], bool],
    *,
    most: int,
    constant: bool = False,
    numbers: Sequence[float] = (),
) -> list[Form]:
    """Return the forms on which a candidate is called.

    These are the shapes of ``first`` with every kind of values, then at most ``most`` other shapes that ``runs``
    accepts. The other shapes are random, so no candidate can know them. ``numbers`` are constants of the
    candidate: some become sizes, and some values are drawn around them. With ``constant``, the inputs of the reference
    are the same in each draw, so other values are timed.
    """
    own = tuple(tuple(t.shape) for t in tensors(first))
    plain = Form(_label(own, "drawn"), shapes=own)
    kinds = [replace(plain, kind=kind, label=_label(own, kind)) for kind in KINDS]
    own_forms = [f for f in kinds if f.kind == "drawn" or runs(f)]
    own_forms += [f for f in _unlike(first, plain, bool(most)) if runs(f)]
    for scale in _thresholds(numbers, min(THRESHOLDS, most or THRESHOLDS)):
        form = replace(plain, kind="about", scale=scale, label=_label(own, f"values about {scale:.3g}"))
        own_forms += [form] if runs(form) else []
    # Times on values that a candidate knows in advance would be worthless.
    wanted = ("normal", "scaled") if constant and len(own_forms) > 1 else ("drawn", "normal")
    own_forms = [replace(f, timed=f.kind in wanted and not f.whole) for f in own_forms]
    whole = [int(v) for v in numbers if v == int(v)]
    others = _others(own, most, whole, runs) if most else []
    usual = [f for f in others if _elements(f.shapes) <= 2 * _elements(own)]
    if usual:  # the largest shape of usual size is timed as well
        largest = max(usual, key=lambda f: _elements(f.shapes))
        others = [replace(f, timed=f is largest) for f in others]
    return [*own_forms, *others]


def _unlike(first: tuple[Any, ...], plain: Form, varied: bool) -> Iterator[Form]:
    """Yield forms with values that inputs of the reference never have: rows of zeros, other signs, other scalars.

    With ``varied``, scalars may have other values too.
    """
    all_of = tensors(first)

    def form(kind: str, what: str, **changes: Any) -> Form:
        """Return ``plain`` with this kind of values."""
        return replace(plain, kind=kind, label=_label(plain.shapes, what), **changes)

    if any(t.is_floating_point() for t in all_of):
        yield form("blank", "some rows of zeros")
    if any(_is_data(t) for t in all_of):
        yield form("whole", "large integers")
    if varied and any(t.dtype == torch.bool for t in all_of):
        yield form("flags", "other flags in tensors")
    never = [i for i, t in enumerate(all_of) if t.is_floating_point() and t.numel() and float(t.min()) >= 0]
    alone = [(i,) for i in CHANCE.sample(never, min(SIGNED, len(never)))]
    for which in dict.fromkeys((tuple(never), *alone) if never else ()):
        yield form("signed", f"negative numbers in tensor {', '.join(map(str, which))}", signed=which)
    numbers = [i for i, v in enumerate(first) if type(v) in (bool, int, float)] if varied else []
    for at in CHANCE.sample(numbers, min(PLAIN, len(numbers))):
        yield form("drawn", f"another value of argument {at}", plain=at)


def _is_data(t: Tensor) -> bool:
    """Return whether integers are data. Indices of rows have 64 bits as a rule, and must stay in their range."""
    return t.dtype in (torch.int8, torch.uint8, torch.int16, torch.int32)


def _thresholds(numbers: Sequence[float], most: int) -> Iterator[float]:
    """Yield scales of values below and above some of these numbers. Numbers that are not whole come first."""
    sizes = {abs(v) for v in numbers if v and abs(v) < FAR}
    for whole in (False, True):
        fitting = sorted(v for v in sizes if (v == int(v)) == whole)
        for number in CHANCE.sample(fitting, min(most, len(fitting))):
            most -= 1
            yield number * 10.0 ** CHANCE.uniform(-1.5, -1.0)
            yield number * 10.0 ** CHANCE.uniform(0.3, 1.0)


def _others(own: Shapes, most: int, numbers: Sequence[int], runs: Callable[[Form], bool]) -> list[Form]:
    """Return at most ``most`` random shapes, and as many from constants of the candidate, that the
    reference accepts.
    """
    forms: dict[Shapes, Form] = {}
    # Larger shapes would take too long in the reference.
    limit = max(LARGER * _elements(own), ROOM)
    for listed in (_shapes(own), _numbered(own, numbers)):
        fitting, tried = 0, 0
        for shapes in listed:
            if shapes in forms or shapes == own or _elements(shapes) > limit:
                continue
            kind = CHANCE.choice(("drawn", "normal"))
            form = Form(_label(shapes, kind), shapes=shapes, kind=kind)
            tried += 1
            if runs(form):
                forms[shapes] = form
                fitting += 1
            # A reference that refuses most shapes must not use up the time.
            if fitting == most or tried == 4 * most:
                break
    return list(forms.values())


def _label(shapes: Shapes, kind: str) -> str:
    """Return the label of a form: its shapes and kind."""
    return f"{', '.join('x'.join(map(str, s)) or 'scalar' for s in shapes)} {kind}"


def _elements(shapes: Shapes) -> int:
    """Return the number of elements of all tensors."""
    return sum(prod(s) for s in shapes)


def _sizes(own: Shapes) -> list[int]:
    """Return the sizes that may vary.

    Small sizes that never occur in the first two dims, such as windows of a convolution, are left out.
    """
    outer = {n for s in own for n in s[:2]}
    return sorted({n for s in own for n in s if n > 1 and (n > WINDOW or n in outer)}, reverse=True)


def _everywhere(own: Shapes, size: int, new: int) -> Shapes:
    """Return the shapes with each occurrence of ``size`` replaced by ``new``."""
    return tuple(tuple(new if n == size else n for n in s) for s in own)


def _shapes(own: Shapes) -> Iterator[Shapes]:
    """Yield varied shapes: each size in all places, all sizes at once, then each dim alone."""
    for new in (lambda n: n + 1 + CHANCE.randrange(n), lambda n: 1 + CHANCE.randrange(n)):
        for size in _sizes(own):
            yield _everywhere(own, size, new(size))
    drawn = {size: 1 + CHANCE.randrange(2 * size) for size in _sizes(own)}
    yield tuple(tuple(drawn.get(n, n) for n in s) for s in own)
    sizes = _sizes(own)
    alone: list[Shapes] = [_everywhere(own, size, new) for size in sizes for new in (size - 1, size + 1, 1)]
    for at, shape in enumerate(own):
        for dim, size in enumerate(shape):
            if size > 1 and size not in sizes:
                continue
            changed = (*shape[:dim], 1 + CHANCE.randrange(2 * size + 2), *shape[dim + 1 :])
            alone.append((*own[:at], changed, *own[at + 1 :]))
    CHANCE.shuffle(alone)
    yield from alone


def _numbered(own: Shapes, numbers: Sequence[int]) -> Iterator[Shapes]:
    """Yield shapes in which one size is a constant of the candidate."""
    pairs = [(size, new) for new in dict.fromkeys(numbers) for size in _sizes(own) if new > 0]
    CHANCE.shuffle(pairs)
    for size, new in pairs:
        yield _everywhere(own, size, new)


def vary(made: tuple[Any, ...], form: Form, seed: int) -> tuple[Any, ...]:
    """Return arguments like ``made``, in the shapes and with the values of ``form``, on the same device."""
    listed = tensors(made)
    device = next((t.device for t in listed if t.device.type != "meta"), torch.device("cpu"))
    rng = torch.Generator(device).manual_seed(seed)
    pairs = enumerate(zip(listed, form.shapes, strict=False))
    drawn = iter([_varied(t, shape, form, rng, i in form.signed) for i, (t, shape) in pairs])
    varied = tree_map(lambda t: next(drawn), made)
    if form.plain < 0:
        return varied
    return (*varied[: form.plain], _other(varied[form.plain]), *varied[form.plain + 1 :])


def _other(value: bool | int | float) -> bool | int | float:
    """Return another number of about the same size, or the other flag."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value * CHANCE.choice((0.5, 0.75, 1.5, 2.0)) if value else CHANCE.uniform(0.1, 1.0)


def _varied(t: Tensor, shape: tuple[int, ...], form: Form, rng: torch.Generator, signed: bool = False) -> Tensor:
    """Return one tensor in another shape and with another kind of values."""
    kind = form.kind
    if tuple(t.shape) != shape:
        t = _resampled(t, shape, rng)
    if kind == "whole" and _is_data(t):
        return _integers(t, rng)
    if kind == "flags" and t.dtype == torch.bool:
        return (torch.rand(t.shape, generator=rng, device=rng.device) < 0.5).to(t.device)
    if kind in ("drawn", *WHOLE[1:]) or not t.is_floating_point() or not t.numel() or (form.signed and not signed):
        return t
    values = _floats(t, form, torch.randn(t.shape, generator=rng, device=rng.device, dtype=torch.float64), rng)
    return (values.abs() if float(t.min()) >= 0 and not signed else values).to(t.dtype)


def _integers(t: Tensor, rng: torch.Generator) -> Tensor:
    """Return large random integers, negative only where those of ``t`` are."""
    high = min(torch.iinfo(t.dtype).max, MOST_WHOLE)
    low = -high if t.numel() and int(t.min()) < 0 else 0
    return torch.randint(low, high + 1, t.shape, generator=rng, device=rng.device).to(t.device, t.dtype)


def _floats(t: Tensor, form: Form, noise: Tensor, rng: torch.Generator) -> Tensor:
    """Return ``noise`` transformed into the kind of values of ``form``, on the device of ``t``."""
    kind, noise = form.kind, noise.to(t.device)

    def uniform(shape: Sequence[int] = ()) -> Tensor:
        """Return random numbers between 0 and 1."""
        return torch.rand(tuple(shape), generator=rng, device=rng.device).to(t.device)

    # Zeros, halves and minus halves: equal values, and sums without rounding errors.
    if kind == "ties":
        drawn = torch.randint(-1, 2, t.shape, generator=rng, device=rng.device)
        return drawn.to(t.device, torch.float64) / 2
    if kind == "skewed":  # most values are small, and a few large ones decide the result
        return noise * torch.where(uniform(t.shape) < 0.02, 300.0, 0.01)
    if kind == "constant":
        return torch.full_like(noise, float(torch.randn((), generator=rng, device=rng.device)))
    if kind == "blank":  # a single row becomes zero as a whole
        rows = uniform((*t.shape[:-1], 1) if t.dim() else ()) < 0.25
        rows.view(-1)[:1] = True
        return torch.where(rows, 0.0, noise)
    if kind in DECADES:
        low, high = DECADES[kind]
        return torch.mul(noise, 10.0 ** (low + (high - low) * float(uniform())))
    if kind == "about":
        return noise * form.scale
    scale = {"normal": 1.0, "wide": 30.0, "tiny": 1e-3, "shifted": 1.0, "signed": 1.0}[kind]
    return noise * scale + (20.0 if kind == "shifted" else 0.0)


def _resampled(t: Tensor, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Return a tensor of another shape whose values are drawn from those of ``t``.

    The values of ``t`` are known to be valid for the reference.
    """
    count = prod(shape)
    if not t.numel() or not count:
        return t.new_zeros(shape)
    flat = t.detach().reshape(-1)
    if count <= flat.numel():
        return flat[:count].reshape(shape).clone()
    return flat[torch.randint(0, flat.numel(), (count,), generator=rng, device=rng.device).to(t.device)].reshape(shape)
