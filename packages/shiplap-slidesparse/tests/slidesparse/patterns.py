"""Masks and weights of the (2N-2):2N patterns, and packing as the greedy loop that the closed form replaces."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from shiplap_slidesparse import formats


def text(pairs: int) -> str:
    return f"{2 * pairs - 2}:{2 * pairs}"


def masks(pairs: int, *, most: int | None = None) -> Tensor:
    """bool ``[*, 2 N]``: every mask of a group with at most ``most`` non-zeros (by default those of the pattern)."""
    number = torch.arange(1 << (2 * pairs))
    bits = (number[:, None] >> torch.arange(2 * pairs)) & 1
    return bits[bits.sum(1) <= (2 * pairs - 2 if most is None else most)].bool()


def by_counts(pairs: int) -> Tensor:
    """bool ``[*, 2 N]``: of each way to distribute non-zeros over pairs one mask, of the pattern or not."""
    counts = torch.tensor(list(itertools.product(range(3), repeat=pairs)))
    return torch.stack((counts >= 1, counts == 2), -1).flatten(1)


def integers(mask: Tensor, rng: torch.Generator) -> Tensor:
    """int8 with non-zeros exactly where ``mask`` is set."""
    size = torch.randint(1, 128, mask.shape, generator=rng) * (1 - 2 * torch.randint(0, 2, mask.shape, generator=rng))
    return (size * mask).to(torch.int8)


def greedy(row: list[int], pairs: int) -> list[int] | None:
    """One row of whole groups, packed window by window from the left; None where something is left over."""
    out: list[int] = []
    for start in range(0, len(row), 2 * pairs):
        rest = {i: v for i, v in enumerate(row[start : start + 2 * pairs]) if v}
        for w in range(pairs - 1):
            lanes = [i for i in range(2 * w, 2 * w + 4) if i in rest][:2]
            out += [rest.pop(i) if i in lanes else 0 for i in range(2 * w, 2 * w + 4)]
        if rest:
            return None
    return out + [0] * (formats.lifted_depth(len(row), pairs) - len(out))
