"""Values of a tensor: by dtype, and by what a kernel might wrongly rely on (order, distinctness, magnitude)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["KINDS", "draw"]

POOL = 4_194_301  # numbers drawn for a large tensor
KINDS = ("normal", "ties", "descending", "zeros", "large")


def draw(shape: tuple[int, ...], dtype: torch.dtype, kind: str, below: int, rng: torch.Generator) -> Tensor:
    """A contiguous CPU tensor; integers lie in ``[0, below)``, so that they may serve as row numbers.

    ``ties``: few distinct values, zeros among them; ``descending``: the reverse of what sorted code expects;
    ``large``: magnitudes around 1e3.
    """
    if kind == "normal" and dtype.is_floating_point and math.prod(shape) > 2 * POOL:
        return _large(shape, dtype, rng)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=rng).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return _integers(shape, kind, below, rng).to(dtype)
    values = torch.randn(shape, generator=rng, dtype=torch.float64)
    if dtype.is_complex:
        values = torch.complex(values, torch.randn(shape, generator=rng, dtype=torch.float64))
    elif kind == "ties":
        values = torch.randint(-1, 2, shape, generator=rng).double() / 2
    elif kind == "descending":
        values = values.flatten().sort(descending=True).values.reshape(shape)
    if kind == "zeros":
        values = torch.zeros_like(values)
    return (values * 1e3 if kind == "large" else values).to(dtype)


def _large(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Drawing 10^8 numbers takes seconds. The pool's length is prime: no two rows or tiles of a tensor are alike."""
    pool = torch.randn(POOL, generator=rng, dtype=torch.float64).to(dtype)
    count = math.prod(shape)
    return pool.repeat(-(-count // POOL))[:count].reshape(shape)


def _integers(shape: tuple[int, ...], kind: str, below: int, rng: torch.Generator) -> Tensor:
    top = max(1, min(below, 2) if kind == "ties" else below)
    values = torch.randint(0, top, shape, generator=rng)
    if kind == "descending":
        return values.flatten().sort(descending=True).values.reshape(shape)
    return torch.zeros_like(values) if kind == "zeros" else values
