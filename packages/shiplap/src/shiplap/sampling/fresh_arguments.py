"""Samples of one recipe with secret values, which are cheaper than newly drawn ones where values may be mixed."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch
from torch import Tensor

from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase, tensors_among, tree_map
from shiplap.sampling.layouts import has_independent_values
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.samples import Samples

_secret = random.SystemRandom()


class FreshArguments:
    """A source of samples of one recipe whose values are secret and differ in each call.

    Drawing normally distributed numbers takes longer than most kernels. If the recipe has normally distributed numbers
    and any values are valid, one sample is drawn. Each call then gets weighted sums of two of its elements, at a secret
    distance and with secret weights. These sums are normally distributed again. The drawn sample itself is never passed
    to a candidate (a kernel that is not trusted).
    """

    def __init__(self, op: Op, recipe: SampleRecipe, device: str) -> None:
        """Draw a first sample of ``recipe``. If its values are independent, normally distributed numbers, later samples
        are mixed from it cheaply instead of being drawn.
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
