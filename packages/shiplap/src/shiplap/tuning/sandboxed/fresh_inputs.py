"""The arguments of a confirmation: drawn when they are needed, or ahead, while other processes start."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase, tensors_among, tree_map
from shiplap.sampling.fresh_arguments import FreshArguments
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.samples import Samples
from shiplap.sampling.sizes import EDGE_SIZES, free_dims, scalar_candidates
from shiplap.sampling.values import PLAIN_KINDS, RANGE_KINDS
from shiplap.sandbox.strided_memory import elements_overlap
from shiplap.tuning.inputs import Inputs, given_ones

MOST, ROOM = 24, 32 << 20  # calls of a batch, and bytes of their arguments
OTHERS, SMALL = 24, 300  # other inputs, and how large one of their sizes may be
NUMBERS = 6  # other values of plain arguments
FEW = 3  # sizes of which both neighbours are tried
OTHER_KINDS = (*RANGE_KINDS, "cancelling", "beyond float16", "mixed", "positive", "negative", "constant", "mostly zero")
AT_ONCE = 24  # other inputs in one batch
AHEAD, LARGE = 7, 4 << 20  # values of the call's size that are drawn ahead, and bytes of those of which none is


class ConfirmationInputs:
    """The arguments for the checks of one candidate. No other candidate receives them.

    Drawing them runs the op's builder of samples, but never its reference. The reference runs in this process only
    after it has run in a process of its own.
    """

    def __init__(self, op: Op, inputs: Inputs) -> None:
        """Prepare to draw arguments for the confirmation of candidates of ``op``."""
        self.op, self.inputs = op, inputs
        self._made: deque[SampleCase | None] = deque()  # of the first recipes

    @cached_property
    def fresh(self) -> FreshArguments:
        """The source of new values with the sizes of the call."""
        return FreshArguments(self.op, self.inputs.recipe, self.inputs.device)

    @cached_property
    def small(self) -> FreshArguments | None:
        """The source of new values with the smallest available sizes, or None if there are none."""
        small = self.inputs.small
        return FreshArguments(self.op, small.recipe, "cpu") if small is not None else None

    def draw_ahead(self, over: Callable[[], bool]) -> None:
        """Draw and store the arguments of a confirmation, one after another, until ``over()`` returns True. Do nothing
        if the arguments of the call take more than 4 MiB. Arguments that are not stored are drawn when they are needed.
        """
        if argument_bytes(self.inputs.real[0]) <= LARGE:
            for _ in self._one_by_one():
                if over():
                    return

    def _one_by_one(self) -> Iterator[None]:
        """Draw and store the arguments of a confirmation one after another. Yield None after each, so that the caller
        can stop there.
        """
        for _ in range(AHEAD):
            self.fresh.store(1)
            yield
        for recipes in self._recipes:
            for recipe in recipes:
                self._made.append(self._samples.make(recipe))
                yield
        if (small := self.small) is not None:
            for _ in range(2 * MOST):
                small.store(1)
                yield

    def batches_of_others(self) -> Iterator[list[SampleCase]]:
        """Yield lists of samples for further checks of a candidate. The first list has every kind of values and some
        small sizes. Lists with sizes near those of the call follow, and lists with more small sizes come last.
        """
        for recipes in self._recipes:
            made = [self._made.popleft() if self._made else self._samples.make(recipe) for recipe in recipes]
            cases = [with_other_gaps(case) for case in made if case]
            if sum(map(argument_bytes, cases)) <= ROOM:
                yield cases
            else:
                yield from ([case] for case in cases)

    @cached_property
    def _samples(self) -> Samples:
        """A source of samples with a secret seed."""
        # The seed is secret, so that no candidate can compute the values of its own confirmation.
        return Samples(self.op, secrets.randbits(40), self.inputs.device)

    @cached_property
    def _recipes(self) -> list[list[SampleRecipe]]:
        """The recipes of the samples that ``batches_of_others`` yields, in lists. Some small sizes and kinds of values
        come first, then sizes near those of the call, then the remaining small ones.
        """
        small, near = self._small(), self._near()
        return [small[:AT_ONCE], near, *(small[at : at + AT_ONCE] for at in range(AT_ONCE, len(small), AT_ONCE))]

    def _near(self) -> list[SampleRecipe]:
        """Return recipes in which one size of the call is a little smaller or larger, in random order. If more than
        three sizes of the call exceed 2, each of them is changed in one direction only, which is random.
        """
        recipe, secret = self.inputs.recipe, secrets.SystemRandom()
        sizes = [(n, v) for n, v in recipe.sizes if type(v) is int and v > 2]
        changed = []
        for name, value in sizes:
            around = [(name, value - 1), (name, value + 1 + secret.randrange(7))]
            changed += around if len(sizes) <= FEW else [secret.choice(around)]
        secret.shuffle(changed)
        return [recipe.but(sizes={n: v}) for n, v in changed]

    def _small(self) -> list[SampleRecipe]:
        """Return recipes of every kind of values, of other scalar values, and of small sizes in random order.

        The sizes are common sizes of edge cases, those near the sizes of kernels' tiles and near numbers in the op's
        code, and random ones.
        """
        recipe, samples = self.inputs.recipe, self._samples
        same: dict[str, Any] = {"dtypes": dict(recipe.dtypes), "absent": recipe.absent, "layouts": dict(recipe.layouts)}
        near = {v + by for v in (*samples.code_constants.ints, 16, 64, 128) if 2 < v < SMALL for by in (-1, 0, 1)}
        sizes = [*EDGE_SIZES[1:], *near, *(secrets.randbelow(SMALL) for _ in range(8))]
        names = [n for n, kind in free_dims(self.op.spec).items() if kind != "variadic"]
        scalars = dict(recipe.scalars)
        plain = samples.base.but(sizes=given_ones(self.op.spec, recipe), scalars=scalars, **same)
        named = [v for v in samples.code_constants.ints if 2 < v < SMALL]
        listed: dict[str, SampleRecipe] = {}
        for these, most in ((named, OTHERS // 2), (sizes, OTHERS)):
            recipes = [plain.but(sizes={n: size}) for n in names for size in dict.fromkeys(these)]
            left = [r for r in recipes if str(r) not in listed]
            # Without a seed, so that no kernel can predict the sizes.
            drawn = secrets.SystemRandom().sample(left, min(most - len(listed), len(left)))
            listed |= {str(r): r for r in drawn}
        mixed = list(listed.values())
        secrets.SystemRandom().shuffle(mixed)
        kinds = (*PLAIN_KINDS, *OTHER_KINDS)
        return [*(plain.but(values=kind) for kind in kinds), *self._other_numbers(plain), *mixed]

    def _other_numbers(self, plain: SampleRecipe) -> list[SampleRecipe]:
        """Return at most six random copies of the recipe ``plain`` in which one scalar argument has another value.

        Only values with which a call would use the same choice as the tuned call are taken.
        """
        secret, given, changed = secrets.SystemRandom(), dict(plain.scalars), list[SampleRecipe]()
        for arg in self.op.spec.scalars:
            values = [v for v in scalar_candidates(arg) if v is not None and v != given.get(arg.name)][:2]
            if str(arg.scalar) == "float":
                values = [secret.uniform(0.2, 3.0)]
            others = [{**given, arg.name: v} for v in values if arg.name in given]
            changed += [plain.but(scalars=other) for other in others if self._shares(other)]
        return secret.sample(changed, min(NUMBERS, len(changed)))

    def _shares(self, scalars: dict[str, Any]) -> bool:
        """Return whether the call that is tuned would stay in its bucket with the values ``scalars`` of its scalar
        arguments. A bucket is a class of calls that share one choice.
        """
        env, rule = dict(self.inputs.call.env), self.op.rule
        return rule.bucket({**env, **scalars}) == rule.bucket(env)


def with_other_gaps(case: SampleCase) -> SampleCase:
    """Return a copy of the sample in which tensors with unused elements between their elements in memory have more or
    fewer of these. A call with the copy uses the same tuned choice.
    """
    return replace(case, args=tree_map(_with_other_gaps, case.args))


def _with_other_gaps(t: Tensor) -> Tensor:
    """Return a copy of ``t`` with other strides, whose dims lie in the same order in memory. Return ``t`` itself if its
    elements fill their memory without gaps, or overlap.
    """
    order = sorted(range(t.dim()), key=lambda d: (t.stride(d), -d))
    if t.is_contiguous() or elements_overlap(t.shape, t.stride()) or t.permute(order[::-1]).is_contiguous():
        return t
    strides = list(t.stride())
    # By chance they may be those of the tensor.
    while strides == list(t.stride()):
        reach = max(1, min(t.stride())) + (min(t.stride()) > 1)
        for d in order:
            strides[d] = reach
            reach *= t.shape[d] + 1 + secrets.randbelow(9)
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def argument_bytes(case: SampleCase) -> int:
    """Return the number of bytes that the elements of all tensors of a sample take."""
    return sum(t.numel() * t.itemsize for t in tensors_among(case.args))
