"""Estimates of the processor time that a sample will take, from the times of the samples before it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from shiplap.sampling.boundary_sizes import LONG_SUM
from shiplap.sampling.recipe import SampleRecipe

Dims = tuple[str, ...]
TimedSample = tuple[int, float]  # elements, and seconds of processor time
AFFORDED_S = 8.0  # seconds of processor time that one sample may be expected to take
SLOW_SIZE_S = 2.0  # seconds for all samples of one size, after which a dim is slow


class SampleTimes:
    """The processor times of the samples of one op so far, by the dims that are larger than in the base sample.

    A dim may cost more than another one of the same size, such as a dim whose elements are compared in pairs, so times
    are compared only among samples in which the same dims are larger. ``left_out`` has the fewest elements of a sample
    that was left out for its time, by these dims. ``stopped`` has the largest size at which a slow dim was examined.
    """

    def __init__(self) -> None:
        """Make an object that holds no times."""
        self._built: dict[Dims, list[TimedSample]] = {}
        self._examined: dict[Dims, list[TimedSample]] = {}
        self._slow_before: set[str] = set()
        self._slow_from: dict[str, int] = {}
        self.left_out: dict[Dims, int] = {}
        self.stopped: dict[str, int] = {}

    def forget_left_out(self) -> None:
        """Empty ``left_out`` and ``stopped``, as before the samples of another check. The times are kept."""
        self.left_out.clear()
        self.stopped.clear()

    def add(self, dims: Dims, elements: int, seconds: float, *, built: bool = False) -> None:
        """Store the seconds that a sample of ``elements`` elements took in which the named ``dims`` are larger than in
        the base sample. If ``built`` is true, this is the time to make it, and otherwise the time to examine it. A
        small sample, whose time says little about a large one, is left out.
        """
        if elements > LONG_SUM:
            (self._built if built else self._examined).setdefault(dims, []).append((elements, seconds))

    def exceed(self, dims: Dims, elements: int) -> bool:
        """Return whether a sample of ``elements`` elements in which the named ``dims`` are larger is expected to take
        more than ``AFFORDED_S`` seconds. If so, note in ``left_out`` that the sample is left out.
        """
        if elements * self.pace(dims) <= AFFORDED_S:
            return False
        self.left_out[dims] = min(elements, self.left_out.get(dims, elements))
        return True

    def pace(self, dims: Dims) -> float:
        """Return the seconds that one element is expected to take, to make it and to examine it, in a sample in which
        the named ``dims`` are larger. Return 0 if no large sample was timed.
        """
        return _pace(self._built, dims) + _pace(self._examined, dims)

    def add_size(self, dim: str, size: int, seconds: float) -> None:
        """Store the seconds that all samples took in which the dim has the size ``size``. A size that is slow alone may
        be one for which something was compiled, so a dim is slow from the second slow size in a row on.
        """
        if seconds <= SLOW_SIZE_S:
            self._slow_before.discard(dim)
        elif dim in self._slow_before:
            self._slow_from[dim] = size
        else:
            self._slow_before.add(dim)

    def is_slow(self, dim: str, size: int) -> bool:
        """Return whether the dim is larger at the size ``size`` than at one where it is known to be slow. If so, note
        in ``stopped`` the size from which on the dim does not grow.
        """
        if size <= self._slow_from.get(dim, size):
            return False
        self.stopped[dim] = self._slow_from[dim]
        return True

    def describe_left_out(self) -> str:
        """Return a text that says from how many elements on samples were left out for their time, in which dims, and
        which slow dims stopped to grow. Return an empty string if there are none.
        """
        parts = [f"{' and '.join(dims) or 'all dims'} from {n:,} elements on" for dims, n in self.left_out.items()]
        left_out = f"left out, as they would take more than {AFFORDED_S:.0f} s: larger {', '.join(parts)}"
        stops = " and ".join(f"{dim} at {size:,}" for dim, size in self.stopped.items())
        stopped = f"dims that grow no further in small steps, of which two took {SLOW_SIZE_S:.0f} s each: {stops}"
        return "; ".join([*([left_out] if parts else []), *([stopped] if stops else [])])


def larger_dims(recipe: SampleRecipe, base: SampleRecipe) -> Dims:
    """Return the names of the dims that are larger in ``recipe`` than in ``base``."""
    usual = dict(base.sizes)
    return tuple(name for name, size in recipe.sizes if count_elements(size) > count_elements(usual.get(name, 0)))


def count_elements(size: Any) -> int:
    """Return the number of elements of a dim of ``size``, which is a tuple of sizes for a variadic dim."""
    return prod(size) if isinstance(size, tuple) else int(size)


def _pace(times: dict[Dims, list[TimedSample]], dims: Dims) -> float:
    """Return the seconds of processor time for one element of a sample in which the named ``dims`` are larger than in
    the base sample. If no such sample is in ``times``, the dearest other dims count. Return 0 if ``times`` is empty.
    """
    groups = [times[dims]] if dims in times else [*times.values()]
    return max(map(_seconds_per_element, groups), default=0.0)


def _seconds_per_element(timed: Sequence[TimedSample]) -> float:
    """Return the seconds of processor time for one element, from the largest of the ``timed`` samples, which are two at
    least if there are two.

    The least of their times counts. A single sample may include what is done once in a process, such as an import or a
    compilation.
    """
    largest = sorted(timed, reverse=True)
    near = [each for each in largest if 2 * each[0] >= largest[0][0]]
    return min(seconds / elements for elements, seconds in (near if len(near) > 1 else largest[:2]))
