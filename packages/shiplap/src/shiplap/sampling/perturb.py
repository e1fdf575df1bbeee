"""Values that look like others to whoever looks at sums, shapes or single elements, and new ones for a copy's price.

All that is drawn here is secret: torch's own generator starts alike in every process.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shiplap.dispatch import Op
from shiplap.sampling.case import Case, tree_map
from shiplap.sampling.layouts import independent
from shiplap.sampling.recipe import Recipe
from shiplap.sampling.run import tensors
from shiplap.sampling.samples import Samples

_secret = random.SystemRandom()


def nudged(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with pairs of elements of each floating tensor exchanged.

    Sums and shapes stay what they were, and half of the elements: what remembers results by those is wrong now.
    """
    return tuple(_nudged(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def _nudged(t: Tensor) -> Tensor:
    if not _is_long(t):
        return t
    flat = t.detach().clone().reshape(-1)
    half = flat.numel() // 2
    places = torch.randperm(flat.numel(), device=flat.device)[: 2 * max(1, half // 2)]
    flat[places] = flat[places.flip(0)]
    return flat.reshape(t.shape)


def swapped(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with two stretches of each floating tensor exchanged, of any length up to a quarter of it.

    This takes no longer than a copy. Sums and shapes stay what they were, and often all elements but a few.
    """
    return tuple(_swapped(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def _swapped(t: Tensor) -> Tensor:
    if not _is_long(t):
        return t
    flat = t.detach().clone().reshape(-1)
    most = flat.numel() // 4
    length = most if _secret.random() < 0.5 else int(most ** _secret.random())
    first = _secret.randrange(flat.numel() - 2 * length + 1)
    second = _secret.randrange(first + length, flat.numel() - length + 1)
    kept = flat[first : first + length].clone()
    flat[first : first + length] = flat[second : second + length]
    flat[second : second + length] = kept
    return flat.reshape(t.shape)


def _is_long(t: Tensor) -> bool:
    return t.numel() >= 4 and t.itemsize >= 2 and t.is_contiguous()


class Fresh:
    """Arguments of one recipe, with values that nobody knows and that are others each time.

    Drawing normal numbers takes longer than most kernels. Where any values may be in every tensor, and the recipe asks
    for normal ones, they are drawn once. Each call then gets sums of two elements that lie a secret distance apart, in
    a secret direction, which are normal numbers again. What was drawn is given to nobody.
    """

    def __init__(self, op: Op, recipe: Recipe, device: str) -> None:
        self.op, self.recipe, self.device = op, recipe, device
        self._drawn = self._build()
        self._stored: list[Case] = []
        plain = op.sampler is None and recipe.values == "normal" and not op.spec.random
        self._mixes = plain and all(independent(t) and t.is_contiguous() for t in tensors(self._drawn.args))

    def store(self, count: int) -> None:
        """Draw so many ahead, where drawing is what takes the time."""
        if not self._mixes:
            self._stored += [self._build() for _ in range(count)]

    def cases(self, count: int) -> list[Case]:
        if not self._mixes:
            return [self._stored.pop() if self._stored else self._build() for _ in range(count)]
        return [replace(self._drawn, args=tree_map(_mixed, self._drawn.args)) for _ in range(count)]

    def _build(self) -> Case:
        return Samples(self.op, _secret.getrandbits(40), self.device).build(self.recipe)


def _mixed(t: Tensor) -> Tensor:
    """Each element the sum of two, turned by an angle."""
    size, angle = t.numel(), _secret.uniform(0, 2 * math.pi)
    if not size:
        return t
    flat, mixed = t.detach().reshape(-1), torch.empty(size, dtype=t.dtype, device=t.device)
    first, second = (_secret.randrange(size) for _ in range(2))
    torch.mul(flat[first:], math.cos(angle), out=mixed[: size - first])
    torch.mul(flat[:first], math.cos(angle), out=mixed[size - first :])
    mixed[: size - second].add_(flat[second:], alpha=math.sin(angle))
    mixed[size - second :].add_(flat[:second], alpha=math.sin(angle))
    return mixed.reshape(t.shape)
