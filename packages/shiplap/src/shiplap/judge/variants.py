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
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.run import tensors_among

VALUE_KINDS = ("drawn", "normal", "wide", "tiny", "skewed", "ties", "shifted", "constant", "scaled", "large", "small")
FINITE_KINDS = ("blank", "whole", "flags")  # kinds that are used only if every result of the reference is finite
# Powers of ten between which a scale is drawn.
DECADES = {"scaled": (-3.0, 3.0), "large": (3.0, 5.0), "small": (-7.0, -3.0)}
MAX_THRESHOLDS = 6  # the most constants of the candidate around which values are drawn
MAX_SIGNED_FORMS = 4  # the most arguments that get negative numbers, each alone
LARGEST_INTEGER = 1 << 20  # the largest integer, whose sums are not exact in float32
MAX_SCALAR_FORMS = 6  # the most scalars that get another value
LARGER, ROOM = 4, 1 << 14  # other shapes may grow by this factor, or to this number of elements
LARGEST_WINDOW = 7  # a small size that may be that of a window, and must not vary
LARGEST_THRESHOLD = 1e7  # larger constants are no thresholds of values
SECRET_RANDOM = SystemRandom()

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class InputForm:
    """The shapes and the kind of values of one call.

    For a declared op, ``recipe`` holds both. Otherwise ``shapes`` and ``kind`` do.
    """

    label: str
    timed: bool = False
    recipe: SampleRecipe | None = None
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
        return self.kind in FINITE_KINDS or bool(self.signed) or self.plain >= 0


def make_input_forms(
    first: tuple[Any, ...],
    runs: Callable[[InputForm], bool],
    *,
    most: int,
    constant: bool = False,
    numbers: Sequence[float] = (),
) -> list[InputForm]:
    """Return the forms on which a candidate is called.

    These are the shapes of ``first`` with every kind of values, then at most ``most`` other shapes that ``runs``
    accepts. The other shapes are random, so no candidate can know them. ``numbers`` are constants of the
    candidate: some become sizes, and some values are drawn around them. With ``constant``, the inputs of the reference
    are the same in each draw, so other values are timed.
    """
    own = tuple(tuple(t.shape) for t in tensors_among(first))
    plain = InputForm(_form_label(own, "drawn"), shapes=own)
    kinds = [replace(plain, kind=kind, label=_form_label(own, kind)) for kind in VALUE_KINDS]
    own_forms = [f for f in kinds if f.kind == "drawn" or runs(f)]
    own_forms += [f for f in _unusual_value_forms(first, plain, bool(most)) if runs(f)]
    for scale in _threshold_scales(numbers, min(MAX_THRESHOLDS, most or MAX_THRESHOLDS)):
        form = replace(plain, kind="about", scale=scale, label=_form_label(own, f"values about {scale:.3g}"))
        own_forms += [form] if runs(form) else []
    # Times on values that a candidate knows in advance would be worthless.
    wanted = ("normal", "scaled") if constant and len(own_forms) > 1 else ("drawn", "normal")
    own_forms = [replace(f, timed=f.kind in wanted and not f.whole) for f in own_forms]
    whole = [int(v) for v in numbers if v == int(v)]
    others = _other_shape_forms(own, most, whole, runs) if most else []
    usual = [f for f in others if _count_elements(f.shapes) <= 2 * _count_elements(own)]
    if usual:  # the largest shape of usual size is timed as well
        largest = max(usual, key=lambda f: _count_elements(f.shapes))
        others = [replace(f, timed=f is largest) for f in others]
    return [*own_forms, *others]


def _unusual_value_forms(first: tuple[Any, ...], plain: InputForm, varied: bool) -> Iterator[InputForm]:
    """Yield forms with values that inputs of the reference never have: rows of zeros, other signs, other scalars.

    With ``varied``, scalars may have other values too.
    """
    all_of = tensors_among(first)

    def form(kind: str, what: str, **changes: Any) -> InputForm:
        """Return ``plain`` with this kind of values."""
        return replace(plain, kind=kind, label=_form_label(plain.shapes, what), **changes)

    if any(t.is_floating_point() for t in all_of):
        yield form("blank", "some rows of zeros")
    if any(_is_integer_data(t) for t in all_of):
        yield form("whole", "large integers")
    if varied and any(t.dtype == torch.bool for t in all_of):
        yield form("flags", "other flags in tensors")
    never = [i for i, t in enumerate(all_of) if t.is_floating_point() and t.numel() and float(t.min()) >= 0]
    alone = [(i,) for i in SECRET_RANDOM.sample(never, min(MAX_SIGNED_FORMS, len(never)))]
    for which in dict.fromkeys((tuple(never), *alone) if never else ()):
        yield form("signed", f"negative numbers in tensor {', '.join(map(str, which))}", signed=which)
    numbers = [i for i, v in enumerate(first) if type(v) in (bool, int, float)] if varied else []
    for at in SECRET_RANDOM.sample(numbers, min(MAX_SCALAR_FORMS, len(numbers))):
        yield form("drawn", f"another value of argument {at}", plain=at)


def _is_integer_data(t: Tensor) -> bool:
    """Return whether integers are data. Indices of rows have 64 bits as a rule, and must stay in their range."""
    return t.dtype in (torch.int8, torch.uint8, torch.int16, torch.int32)


def _threshold_scales(numbers: Sequence[float], most: int) -> Iterator[float]:
    """Yield scales of values below and above some of these numbers. Numbers that are not whole come first."""
    sizes = {abs(v) for v in numbers if v and abs(v) < LARGEST_THRESHOLD}
    for whole in (False, True):
        fitting = sorted(v for v in sizes if (v == int(v)) == whole)
        for number in SECRET_RANDOM.sample(fitting, min(most, len(fitting))):
            most -= 1
            yield number * 10.0 ** SECRET_RANDOM.uniform(-1.5, -1.0)
            yield number * 10.0 ** SECRET_RANDOM.uniform(0.3, 1.0)


def _other_shape_forms(
    own: Shapes, most: int, numbers: Sequence[int], runs: Callable[[InputForm], bool]
) -> list[InputForm]:
    """Return at most ``most`` random shapes, and as many from constants of the candidate, that the
    reference accepts.
    """
    forms: dict[Shapes, InputForm] = {}
    # Larger shapes would take too long in the reference.
    limit = max(LARGER * _count_elements(own), ROOM)
    for listed in (_varied_shapes(own), _shapes_from_constants(own, numbers)):
        fitting, tried = 0, 0
        for shapes in listed:
            if shapes in forms or shapes == own or _count_elements(shapes) > limit:
                continue
            kind = SECRET_RANDOM.choice(("drawn", "normal"))
            form = InputForm(_form_label(shapes, kind), shapes=shapes, kind=kind)
            tried += 1
            if runs(form):
                forms[shapes] = form
                fitting += 1
            # A reference that refuses most shapes must not use up the time.
            if fitting == most or tried == 4 * most:
                break
    return list(forms.values())


def _form_label(shapes: Shapes, kind: str) -> str:
    """Return the label of a form: its shapes and kind."""
    return f"{', '.join('x'.join(map(str, s)) or 'scalar' for s in shapes)} {kind}"


def _count_elements(shapes: Shapes) -> int:
    """Return the number of elements of all tensors."""
    return sum(prod(s) for s in shapes)


def _varied_sizes(own: Shapes) -> list[int]:
    """Return the sizes that may vary.

    Small sizes that never occur in the first two dims, such as windows of a convolution, are left out.
    """
    outer = {n for s in own for n in s[:2]}
    return sorted({n for s in own for n in s if n > 1 and (n > LARGEST_WINDOW or n in outer)}, reverse=True)


def _replace_size(own: Shapes, size: int, new: int) -> Shapes:
    """Return the shapes with each occurrence of ``size`` replaced by ``new``."""
    return tuple(tuple(new if n == size else n for n in s) for s in own)


def _varied_shapes(own: Shapes) -> Iterator[Shapes]:
    """Yield varied shapes: each size in all places, all sizes at once, then each dim alone."""
    for new in (lambda n: n + 1 + SECRET_RANDOM.randrange(n), lambda n: 1 + SECRET_RANDOM.randrange(n)):
        for size in _varied_sizes(own):
            yield _replace_size(own, size, new(size))
    drawn = {size: 1 + SECRET_RANDOM.randrange(2 * size) for size in _varied_sizes(own)}
    yield tuple(tuple(drawn.get(n, n) for n in s) for s in own)
    sizes = _varied_sizes(own)
    alone: list[Shapes] = [_replace_size(own, size, new) for size in sizes for new in (size - 1, size + 1, 1)]
    for at, shape in enumerate(own):
        for dim, size in enumerate(shape):
            if size > 1 and size not in sizes:
                continue
            changed = (*shape[:dim], 1 + SECRET_RANDOM.randrange(2 * size + 2), *shape[dim + 1 :])
            alone.append((*own[:at], changed, *own[at + 1 :]))
    SECRET_RANDOM.shuffle(alone)
    yield from alone


def _shapes_from_constants(own: Shapes, numbers: Sequence[int]) -> Iterator[Shapes]:
    """Yield shapes in which one size is a constant of the candidate."""
    pairs = [(size, new) for new in dict.fromkeys(numbers) for size in _varied_sizes(own) if new > 0]
    SECRET_RANDOM.shuffle(pairs)
    for size, new in pairs:
        yield _replace_size(own, size, new)


def vary_arguments(made: tuple[Any, ...], form: InputForm, seed: int) -> tuple[Any, ...]:
    """Return arguments like ``made``, in the shapes and with the values of ``form``, on the same device."""
    listed = tensors_among(made)
    device = next((t.device for t in listed if t.device.type != "meta"), torch.device("cpu"))
    rng = torch.Generator(device).manual_seed(seed)
    pairs = enumerate(zip(listed, form.shapes, strict=False))
    drawn = iter([_vary_tensor(t, shape, form, rng, i in form.signed) for i, (t, shape) in pairs])
    varied = tree_map(lambda t: next(drawn), made)
    if form.plain < 0:
        return varied
    return (*varied[: form.plain], _other_scalar(varied[form.plain]), *varied[form.plain + 1 :])


def _other_scalar(value: bool | int | float) -> bool | int | float:
    """Return another number of about the same size, or the other flag."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value * SECRET_RANDOM.choice((0.5, 0.75, 1.5, 2.0)) if value else SECRET_RANDOM.uniform(0.1, 1.0)


def _vary_tensor(
    t: Tensor, shape: tuple[int, ...], form: InputForm, rng: torch.Generator, signed: bool = False
) -> Tensor:
    """Return one tensor in another shape and with another kind of values."""
    kind = form.kind
    if tuple(t.shape) != shape:
        t = _resample_values(t, shape, rng)
    if kind == "whole" and _is_integer_data(t):
        return _large_integers(t, rng)
    if kind == "flags" and t.dtype == torch.bool:
        return (torch.rand(t.shape, generator=rng, device=rng.device) < 0.5).to(t.device)
    if (
        kind in ("drawn", *FINITE_KINDS[1:])
        or not t.is_floating_point()
        or not t.numel()
        or (form.signed and not signed)
    ):
        return t
    values = _noise_of_kind(t, form, torch.randn(t.shape, generator=rng, device=rng.device, dtype=torch.float64), rng)
    return (values.abs() if float(t.min()) >= 0 and not signed else values).to(t.dtype)


def _large_integers(t: Tensor, rng: torch.Generator) -> Tensor:
    """Return large random integers, negative only where those of ``t`` are."""
    high = min(torch.iinfo(t.dtype).max, LARGEST_INTEGER)
    low = -high if t.numel() and int(t.min()) < 0 else 0
    return torch.randint(low, high + 1, t.shape, generator=rng, device=rng.device).to(t.device, t.dtype)


def _noise_of_kind(t: Tensor, form: InputForm, noise: Tensor, rng: torch.Generator) -> Tensor:
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


def _resample_values(t: Tensor, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
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
