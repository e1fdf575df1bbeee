"""Values that look like earlier ones by their sums, shapes or single elements, and cheap new values.

All choices here use a secret generator, since torch's own generator starts alike in every process.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase, tensors_among, tree_map
from shiplap.sampling.layouts import has_independent_values
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.samples import Samples

MANY = 1 << 18  # elements above which an eighth of so many pairs are exchanged
_secret = random.SystemRandom()


def perturb_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with pairs of elements of each floating-point tensor exchanged.

    Shapes, sums, and half of the elements or more stay the same. A candidate that caches results by these returns a
    wrong result.
    """
    return tuple(_exchange_pairs(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def _exchange_pairs(t: Tensor) -> Tensor:
    """Return a copy of ``t`` in which randomly chosen pairs of elements are exchanged, at most half of all elements.
    Return ``t`` itself if it has fewer than four elements, has elements of one byte, or is not contiguous.
    """
    if not _can_exchange(t):
        return t
    flat = t.detach().clone().reshape(-1)
    if flat.numel() > MANY:  # a permutation of all places takes longer than most kernels
        drawn = torch.randint(0, flat.numel(), (MANY // 4,), device=flat.device).unique()
        # An even number, so that each place has a partner.
        places = drawn[torch.randperm(drawn.numel() // 2 * 2, device=flat.device)]
    else:
        places = torch.randperm(flat.numel(), device=flat.device)[: 2 * max(1, flat.numel() // 4)]
    flat[places] = flat[places.flip(0)]
    return flat.reshape(t.shape)


def swap_stretches(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with two random stretches (runs of neighbouring elements) of each floating-point tensor
    exchanged.

    A stretch has at most a quarter of all elements. Shapes, sums, and often most elements stay the same. A candidate
    that caches results by these returns a wrong result. The exchange takes no longer than a copy.
    """
    return tuple(_swap_two_stretches(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def _swap_two_stretches(t: Tensor) -> Tensor:
    """Return a copy of ``t`` in which two random stretches of equal length, which do not overlap, are exchanged. Return
    ``t`` itself if it has fewer than four elements, has elements of one byte, or is not contiguous.
    """
    if not _can_exchange(t):
        return t
    flat = t.detach().clone().reshape(-1)
    most = flat.numel() // 4
    # Half of the lengths are drawn on a logarithmic scale, so that short stretches occur, too.
    length = most if _secret.random() < 0.5 else int(most ** _secret.random())
    first = _secret.randrange(flat.numel() - 2 * length + 1)
    second = _secret.randrange(first + length, flat.numel() - length + 1)
    # A copy, since the next line overwrites these elements.
    kept = flat[first : first + length].clone()
    flat[first : first + length] = flat[second : second + length]
    flat[second : second + length] = kept
    return flat.reshape(t.shape)


def _can_exchange(t: Tensor) -> bool:
    """Return whether elements of ``t`` can be exchanged. It must be contiguous and have at least four elements of at
    least two bytes each.
    """
    return t.numel() >= 4 and t.itemsize >= 2 and t.is_contiguous()


class FreshArguments:
    """A source of samples of one recipe whose values are secret and differ in each call.

    Drawing normal numbers takes longer than most kernels. If the recipe has normal numbers and any values are valid,
    one sample is drawn. Each call then gets weighted sums of two of its elements, at a secret distance and with secret
    weights. These sums are normally distributed again. The drawn sample itself is never passed to a candidate (a kernel
    that is not trusted).
    """

    def __init__(self, op: Op, recipe: SampleRecipe, device: str) -> None:
        """Draw a first sample of ``recipe``. If its values are independent normal numbers, later samples are mixed from
        it cheaply instead of being drawn.
        """
        self.op, self.recipe, self.device = op, recipe, device
        self._drawn = self._build()
        self._stored: list[SampleCase] = []
        plain = op.sampler is None and recipe.values == "normal" and not op.spec.random
        self._mixes = plain and all(
            has_independent_values(t) and t.is_contiguous() for t in tensors_among(self._drawn.args)
        )

    def store(self, count: int) -> None:
        """Draw ``count`` samples in advance, which ``cases`` then returns. Nothing is drawn if new samples can be mixed
        cheaply from the first one.
        """
        if not self._mixes:
            self._stored += [self._build() for _ in range(count)]

    def cases(self, count: int) -> list[SampleCase]:
        """Return ``count`` samples of the recipe with values that cannot be predicted. They are mixtures of the first
        sample if possible. Otherwise stored samples are removed and returned, and further ones are newly drawn.
        """
        if not self._mixes:
            return [self._stored.pop() if self._stored else self._build() for _ in range(count)]
        return [replace(self._drawn, args=tree_map(_mix_elements, self._drawn.args)) for _ in range(count)]

    def _build(self) -> SampleCase:
        """Return a newly drawn sample of the recipe. Its seed comes from the operating system and cannot be
        predicted.
        """
        return Samples(self.op, _secret.getrandbits(40), self.device).build(self.recipe)


def _mix_elements(t: Tensor) -> Tensor:
    """Return a tensor with the shape of ``t`` whose elements are ``cos(a) * x + sin(a) * y``. ``x`` and ``y`` are two
    random cyclic shifts of the flattened elements of ``t``, and ``a`` is a random angle. Normal numbers stay normally
    distributed.
    """
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
