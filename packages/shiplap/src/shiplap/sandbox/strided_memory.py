"""Whether elements of a strided tensor lie in the same memory, from its sizes and strides alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

MAX_STEPS = 20_000  # distances that are tried, in a few milliseconds


def elements_overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether two elements of a tensor with the sizes ``shape`` and the strides ``stride`` share memory.

    The answer is exact for up to two dims with more than one element. For more dims, the question is as hard as to find
    a subset of numbers with a given sum. If it is open after ``MAX_STEPS`` steps, True is returned, so that a tensor
    whose elements share memory is never called free of it.
    """
    if 0 in shape:
        return False
    # From the largest stride down. A negative stride only turns the order of a dim around.
    axes = sorted(((abs(step), size) for step, size in zip(stride, shape, strict=True) if size > 1), reverse=True)
    if not _may_meet(axes):
        return False
    if axes[-1][0] == 0:
        return True
    if len(axes) == 2:
        (far, most), (near, count) = axes
        divisor = gcd(far, near)
        return near // divisor < most and far // divisor < count
    return _DistanceSearch(axes).finds_zero()


def _may_meet(axes: Sequence[tuple[int, int]]) -> bool:
    """Return False if each dim of ``axes``, pairs of stride and size from the largest stride down, steps over all that
    the later ones reach. Elements then lie in different places, as in memory that is filled in any order of dims.
    """
    reach = 0
    for step, size in reversed(axes):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


class _DistanceSearch:
    """A search for two elements at the distance 0, over the differences of their indices in each dim.

    Args:
        axes: pairs of positive stride and size, from the largest stride down. There are at least two.
    """

    def __init__(self, axes: Sequence[tuple[int, int]]) -> None:
        """Compute how far the later dims reach, and by which divisor of their strides, for each dim."""
        self.axes, self.steps = axes, 0
        self.failed: set[tuple[int, int]] = set()  # (dim, distance) without a solution
        self.reach, self.divisors = [0], [0]
        for step, size in reversed(axes):
            self.reach.append(self.reach[-1] + (size - 1) * step)
            self.divisors.append(gcd(self.divisors[-1], step))
        self.reach.reverse()
        self.divisors.reverse()

    def finds_zero(self) -> bool:
        """Return whether some two different elements have the distance 0, or whether the steps are used up."""
        # The first dim in which the indices differ may be taken as increasing.
        return any(
            self._may_cancel(at + 1, by * step) for at, (step, size) in enumerate(self.axes) for by in range(1, size)
        )

    def _may_cancel(self, at: int, distance: int) -> bool:
        """Return whether the dims from ``at`` on can make up for ``distance``, or whether the steps are used up."""
        distance = abs(distance)  # differences of indices have both signs
        if self.steps >= MAX_STEPS:
            return True
        self.steps += 1
        if distance == 0:
            return True
        if distance > self.reach[at] or distance % self.divisors[at] or (at, distance) in self.failed:
            return False
        step, size = self.axes[at]
        rest = self.reach[at + 1]
        least, most = max(1 - size, -((distance + rest) // step)), min(size - 1, (rest - distance) // step)
        if any(self._may_cancel(at + 1, distance + by * step) for by in range(least, most + 1)):
            return True
        self.failed.add((at, distance))
        return False
