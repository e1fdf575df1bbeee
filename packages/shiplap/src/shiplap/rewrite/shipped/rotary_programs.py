"""Rotary embeddings in the ways in which models write them. The rewrite is proven on these programs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shiplap.rewrite.program import Program


def _rotate_half(x: Tensor) -> Tensor:
    """Return ``x`` with the halves of its last dim exchanged and the new first half negated."""
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def _rotate_as_llama(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the sigmoid of ``x``, rotated by halves as Llama writes it. ``cos`` and ``sin`` are the cosines and sines
    of the angles.
    """
    return ((x * cos.unsqueeze(1)) + (_rotate_half(x) * sin.unsqueeze(1))).sigmoid()


def _of_a_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` with the first 8 elements of its last dim rotated by halves. The other elements are unchanged.
    ``cos`` and ``sin`` are the cosines and sines of the angles.
    """
    turned, rest = x[..., :8], x[..., 8:]
    return torch.cat(((turned * cos) + (_rotate_half(turned) * sin), rest), dim=-1)


def _in_float32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` rotated by halves in float32 and cast back to its own dtype. ``cos`` and ``sin`` are the cosines and
    sines of the angles.
    """
    a, b = x.float().chunk(2, dim=-1)
    mixed = torch.cat((-b, a), -1)
    return (sin * mixed + cos * x.float()).to(x.dtype)


def _rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x``, of four dims, rotated in pairs of neighbours. ``cos`` and ``sin`` hold one number for each pair,
    which is repeated for both elements.
    """
    cos, sin = (torch.repeat_interleave(t[:, :, None, :], 2, 3) for t in (cos, sin))
    mixed = torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1).flatten(-2)
    return (x * cos) + (mixed * sin)


def _rotate_backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x``, whose last dim has 8 elements, rotated by halves in the opposite direction. ``cos`` and ``sin`` are
    the cosines and sines of the angles.
    """
    mixed = torch.cat((x[..., 4:], -x[..., :4]), -1)
    return x * cos + mixed * sin


def rotary_programs() -> Iterator[Program]:
    """Yield the programs on which the rewrite is proven. A program is a function with arguments. Together they compute
    a rotary embedding in the ways in which models write it, with several dtypes and layouts.
    """
    # With a fixed seed, the proof of one digest has one result.
    rng = torch.Generator().manual_seed(0)

    def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """Return a tuple of tensors of the given shapes and dtype with normally distributed numbers from ``rng``."""
        return tuple(torch.randn(s, generator=rng).to(dtype) for s in shapes)

    x, cos, sin = drawn((2, 5, 3, 8), (2, 5, 8), (2, 5, 8))
    yield Program(_rotate_as_llama, (x.transpose(1, 2), cos, sin), "halves, transposed")
    yield Program(_of_a_part, drawn((2, 3, 5, 12), (5, 8), (5, 8)), "a part of each head")
    yield Program(_in_float32, drawn((2, 3, 5, 8), (5, 8), (5, 8), dtype=torch.bfloat16), "bfloat16 in float32")
    yield Program(_rotate_neighbours, drawn((2, 5, 3, 8), (2, 5, 4), (2, 5, 4)), "neighbours")
    yield Program(_rotate_backwards, drawn((3, 8), (3, 8), (3, 8), dtype=torch.float16), "backwards, float16")
