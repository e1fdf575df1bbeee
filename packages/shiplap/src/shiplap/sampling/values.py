"""Values of a tensor: by dtype, and by a property on which a kernel might wrongly rely, such as order or magnitude."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shiplap.dtypes import integers

POOL_NUMBERS = 4_194_301  # numbers drawn for a large tensor, a prime
PLAIN_KINDS = ("normal", "ties", "descending", "zeros", "large")
SPECIAL_KINDS = (
    "nan",
    "infinite",
    "negative zero",
    "subnormal",
    "beyond float16",
    "overflowing",
    "cancelling",
    "saturating",
    "mixed",
    "positive",
    "negative",
    "constant",
    "mostly zero",
    "whole",
    "skewed",
    "last",
    "ascending",
    "peaks",
    "masked",
    "masked nan",
    "tiny",
    "sunk",
    "low",
    "powers",
    "below zero",
    "extreme",
    "ends",
)
"""Kinds of values that break a kernel which is right for normal ones. The last three concern integers alone."""
RANGE_KINDS = ("tiny", "sunk", "saturating")
"""Kinds of finite values beside which a kernel may put a constant: an epsilon, or a number for minus infinity."""
CROWDED_KINDS = ("cancelling", "ties", "masked")
"""Kinds of values of which so many are alike that a buffer for equal or neighbouring ones is too small."""
SHARED_NUMBERS = "shared"  # the kind of a builder's values of which many are equal, also in different tensors
SOME_ZEROS = "mostly zero"  # of the kinds the one that the values of a builder are given: some of them are zero then
AROUND_PREFIX = "around "  # followed by numbers: values at these, and next to them on both sides
INTEGER_STEPS, LARGEST_ROUNDED = 8.0, float(1 << 20)  # steps between 0 and 1 of rounded numbers, and their bound
COMPLEX = ("complex64", "complex128")
DATA_KINDS = ("powers", "below zero", "extreme", "ends")  # kinds of integers that are no indices of rows


def draw_values(shape: tuple[int, ...], dtype: torch.dtype, kind: str, below: int, rng: torch.Generator) -> Tensor:
    """Return a contiguous CPU tensor of random values of the ``kind``, a name such as ``normal`` or ``nan``.

    ``ties`` are few distinct values, zeros among them. ``descending`` values are sorted in memory order, from the
    largest to the smallest. ``large`` are magnitudes around 1e3. ``around 0.5 6`` are these numbers of either sign, and
    their neighbours in the dtype. The kinds of ``SPECIAL_KINDS`` are described by their names.

    Integers lie in ``[0, below)``, as indices of rows do. They leave this range only for the kinds of ``DATA_KINDS``.
    """
    if kind == "normal" and dtype.is_floating_point and math.prod(shape) > 2 * POOL_NUMBERS:
        return _repeat_pool(shape, dtype, rng)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=rng).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return _draw_integers(shape, dtype, kind, below, rng).to(dtype)
    # Drawn in float64, so that a seed gives the same normal numbers in every dtype.
    values = torch.randn(shape, generator=rng, dtype=torch.float64)
    if dtype.is_complex:
        parts = (values, torch.randn(shape, generator=rng, dtype=torch.float64))
        real = torch.float32 if dtype == torch.complex64 else torch.float64
        return torch.complex(*(_floats_of_kind(part, real, kind, rng) for part in parts)).to(dtype)
    drawn = _floats_of_kind(values, dtype, kind, rng).to(dtype)
    return _vary_nan_bits(drawn, rng) if kind == "nan" and dtype.itemsize > 1 else drawn


def as_numbers(t: Tensor, wanted: str) -> Tensor:
    """Return ``t`` in the integer, bool or complex dtype named ``wanted``, since a builder of samples is asked for
    floating-point numbers, and is not told which others a recipe asks for. Return ``t`` itself if no such dtype is
    wanted, or if a value does not fit.

    Floating-point numbers are multiplied before they are rounded, and keep their order and, in signed dtypes, their
    sign. Otherwise most of them would be 0. The imaginary parts of complex numbers are the real parts of others.
    """
    own = str(t.dtype).removeprefix("torch.")
    if own == wanted or not (own in (*integers(), "bool") or t.is_floating_point()):
        return t
    if wanted == "bool":
        return t > 0
    if own == "bool":
        return t.to(getattr(torch, wanted)) if wanted in integers() else t
    if wanted in COMPLEX and t.is_floating_point():
        real = t.to(getattr(torch, wanted).to_real())
        return torch.complex(real, real.flatten().roll(1).reshape(real.shape))
    if wanted not in integers():
        return t
    limits = torch.iinfo(getattr(torch, wanted))
    if t.is_meta or not t.numel():
        return t.to(getattr(torch, wanted))
    if t.is_floating_point():
        if not bool(torch.isfinite(t).all()):
            return t
        ends = max(limits.min, -LARGEST_ROUNDED), min(limits.max, LARGEST_ROUNDED)
        t = (t.double() * INTEGER_STEPS).round().clamp(*ends)
    fits = limits.min <= int(t.min()) <= int(t.max()) <= limits.max
    return t.to(getattr(torch, wanted)) if fits else t


def _vary_nan_bits(t: Tensor, rng: torch.Generator) -> Tensor:
    """Return a copy of ``t`` in which some NaNs have other bit patterns. In these all bits of the payload are set, with
    either sign.

    A conversion to another dtype may treat them differently. One that rounds by adding to the bits carries a full
    payload into the sign.
    """
    bits = t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])
    full = torch.tensor([torch.iinfo(bits.dtype).max, -1], dtype=bits.dtype)
    drawn = torch.cat((full, bits.new_zeros(1)))[torch.randint(0, 3, t.shape, generator=rng)]
    return torch.where(torch.isnan(t) & (drawn != 0), drawn, bits).view(t.dtype)


def _floats_of_kind(values: Tensor, dtype: torch.dtype, kind: str, rng: torch.Generator) -> Tensor:
    """Return a float64 tensor with values of the kind named ``kind``, of the shape of ``values``.

    ``values`` holds normally distributed float64 numbers and is not changed. The kind ``nan``, for example, replaces
    some of them by NaN. Elements and numbers are chosen with ``rng``. Finite values of the result lie in the range of
    ``dtype``. If ``kind`` is unknown, the result is ``values``.
    """
    finfo = torch.finfo(dtype)

    def some(share: float) -> Tensor:
        """Return a random boolean mask of the shape of ``values`` in the enclosing function. At least one element is
        set. The expected share of set elements is ``share`` (0 to 1).
        """
        at = torch.rand(values.shape, generator=rng) < share
        if at.numel() and not at.any():
            at.view(-1)[int(torch.randint(at.numel(), (1,), generator=rng))] = True
        return at

    def uniform(low: float, high: float) -> Tensor:
        """Return random float64 numbers between ``low`` and ``high``, of the shape of ``values`` in the enclosing
        function.
        """
        return torch.rand(values.shape, generator=rng, dtype=torch.float64) * (high - low) + low

    if kind.startswith(AROUND_PREFIX):
        return _values_at_thresholds(kind, values, finfo.eps, rng)
    if kind == "ties":
        return torch.randint(-1, 2, values.shape, generator=rng).double() / 2
    if kind in ("descending", "ascending"):
        return values.flatten().sort(descending=kind == "descending").values.reshape(values.shape)
    if kind in ("masked", "masked nan"):  # as in attention: places of -inf, and whole rows of -inf
        whole = torch.rand((*values.shape[:-1], 1) if values.dim() else (), generator=rng) < 0.3
        masked = values.masked_fill(some(0.4) | whole, -math.inf)
        return masked.masked_fill(some(0.2), math.nan) if kind == "masked nan" else masked
    makers: dict[str, Callable[[], Tensor]] = {
        "nan": lambda: values.masked_fill(some(0.05), math.nan),
        "infinite": lambda: torch.where(some(0.05), values.sign() * math.inf, values),
        "zeros": lambda: torch.zeros_like(values),
        "large": lambda: values * 1e3,
        "negative zero": lambda: torch.where(some(0.5), -0.0, 0.0),
        "subnormal": lambda: values * finfo.tiny / 4,
        "beyond float16": lambda: values * min(1e5, finfo.max / 8),
        "overflowing": lambda: values * min(1e20, finfo.max / 64),
        "cancelling": lambda: values + 1000.0,
        "saturating": lambda: values * 100.0,
        "tiny": lambda: values * 1e-4,
        "sunk": lambda: values - min(1e5, finfo.max / 2),
        "low": lambda: -8 - values.abs() * 4,  # where exponential functions have small results, and no others
        "mixed": lambda: values * 10.0 ** uniform(-4, 4),
        "positive": lambda: values.abs() + 0.5,
        "negative": lambda: -values.abs() - 0.5,
        "constant": lambda: torch.full_like(values, 1.5),
        "mostly zero": lambda: torch.where(some(0.1), values, 0.0),
        "whole": lambda: (values * 4).round(),
        "peaks": lambda: _rows_with_peak(values, rng),
        "powers": lambda: _float_powers(values, finfo.eps, rng),
    }
    return makers[kind]() if kind in makers else values


def _values_at_thresholds(kind: str, values: Tensor, eps: float, rng: torch.Generator) -> Tensor:
    """Return a tensor of numbers drawn from those in the name ``kind``, such as ``around 0.5 6``, and from their
    neighbours at a relative distance of ``eps``. The numbers have the signs of ``values``.
    """
    pool = torch.tensor([float(v) for v in kind.removeprefix(AROUND_PREFIX).split()], dtype=torch.float64)
    chosen = pool[torch.randint(len(pool), values.shape, generator=rng)].copysign(values)
    return chosen * (1 + eps * torch.randint(-1, 2, values.shape, generator=rng))


def _float_powers(values: Tensor, eps: float, rng: torch.Generator) -> Tensor:
    """Return a tensor of random powers of two from 2^-12 to 2^12 and their neighbours in the dtype with the machine
    epsilon ``eps``. The exponent changes at such a number. The numbers have the shape and the signs of ``values``.
    """
    steps = torch.tensor([-0.5, 0.0, 1.0], dtype=torch.float64)[torch.randint(0, 3, values.shape, generator=rng)]
    powers = torch.exp2(torch.randint(-12, 13, values.shape, generator=rng).double())
    return powers.copysign(values) * (1 + eps * steps)


def _rows_with_peak(values: Tensor, rng: torch.Generator) -> Tensor:
    """Return a copy of ``values`` in which one element of each row is far larger or smaller than the others. It shows
    whether a kernel loses a maximum or minimum.

    The column of this element advances from row to row, so that as many rows as columns cover all columns. If there are
    few rows, the columns are drawn from the boundaries of tiles.
    """
    if not values.numel():
        return values
    rows = values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)
    count, width = rows.shape
    tiles = [e for k in range(3, width.bit_length()) for e in ((1 << k) - 1, 1 << k, (1 << k) + 1)]
    places = torch.tensor([e for e in (width - 1, 0, *tiles) if e < width])
    drawn = places[torch.randint(len(places), (count,), generator=rng)]
    start = int(torch.randint(width, (1,), generator=rng))
    columns = (torch.arange(count) + start) % width if count >= width // 2 else drawn
    sign = torch.where(torch.rand(count, generator=rng) < 0.7, 1.0, -1.0).double()
    peaked = rows.clone()
    peaked[torch.arange(count), columns] = sign * (8.0 + torch.rand(count, generator=rng).double())
    return peaked.reshape(values.shape)


def _repeat_pool(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Return a large tensor of normally distributed numbers that repeat, because drawing 10^8 different ones would take
    seconds.

    The numbers repeat after a prime number of elements, so that no two rows or tiles of a tensor are equal.
    """
    pool = torch.randn(POOL_NUMBERS, generator=rng, dtype=torch.float64).to(dtype)
    count = math.prod(shape)
    return pool.repeat(-(-count // POOL_NUMBERS))[:count].reshape(shape)


def _draw_integers(shape: tuple[int, ...], dtype: torch.dtype, kind: str, below: int, rng: torch.Generator) -> Tensor:
    """Return a tensor of random int64 values of the ``kind`` (a name such as ``last`` or ``skewed``). They are indices
    in ``[0, below)``. For the kinds of ``DATA_KINDS`` they lie in the range of ``dtype`` instead.
    """
    top = max(1, min(below, 2) if kind == "ties" else below)
    info = torch.iinfo(dtype)
    # Unsigned integers have no negative values, so they are drawn from their whole range.
    if kind in DATA_KINDS and info.min == 0:
        return torch.randint(0, info.max + 1 if info.bits < 64 else 1 << 40, shape, generator=rng)
    if kind == "below zero":
        low = max(info.min, -1000)
        return torch.randint(low, -low, shape, generator=rng)
    if kind == "ends":
        return torch.tensor([info.max, info.max - 1, info.max // 2 + 1, info.min, info.min + 1])[
            torch.randint(0, 5, shape, generator=rng)
        ]
    if kind == "powers":
        return _integer_powers(shape, info, rng)
    if kind == "extreme":
        # Smaller than the extremes of wide dtypes, whose sums would overflow in the reference.
        high = info.max if info.bits < 32 else (1 << 30 if info.bits == 32 else 1 << 40)
        low = info.min if info.bits < 32 else -high
        return torch.tensor([low, high, low + 1, high - 1, 0, -1])[torch.randint(0, 6, shape, generator=rng)]
    if kind == "skewed":  # Zipf distribution: half of all indices are the same row
        ranks = torch.rand(shape, generator=rng, dtype=torch.float64).clamp_min(1e-9).reciprocal().log2().long()
        return ranks.clamp_max(top - 1)
    if kind == "last":
        return torch.full(shape, top - 1)
    values = torch.randint(0, top, shape, generator=rng)
    if kind in ("descending", "ascending"):
        return values.flatten().sort(descending=kind == "descending").values.reshape(shape)
    return torch.zeros_like(values) if kind in ("zeros", "constant") else values


def _integer_powers(shape: tuple[int, ...], info: torch.iinfo, rng: torch.Generator) -> Tensor:
    """Return random powers of two and their neighbours within the range of the dtype that ``info`` describes. Three
    quarters of them are positive. No magnitude repeats before all have occurred.
    """
    ups = torch.tensor([(1 << k) + step for k in range(info.bits - 1) for step in (-1, 0, 1)])
    chosen = ups[torch.randperm(len(ups), generator=rng)].repeat(-(-math.prod(shape) // len(ups)) or 1)
    negative = torch.rand(shape, generator=rng) < 0.25
    drawn = chosen[: math.prod(shape)].reshape(shape)
    return torch.where(negative, -drawn, drawn).clamp(info.min, info.max)
