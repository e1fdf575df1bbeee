"""Shapes like those of the inputs of a reference: random ones, and ones that code may treat apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from math import prod
from random import SystemRandom

LARGEST_WINDOW = 7  # a small size that may be that of a window, and must not vary
EQUAL_SIZES = 4  # the most pairs of sizes that become equal
MANY_ROWS = 2000  # the least number of rows in one shape; a table of rows by rows still fits into the memory
PAIRS_OF_NUMBERS = 8  # the most pairs of sizes that become two constants of the code
SECRET_RANDOM = SystemRandom()

Shapes = tuple[tuple[int, ...], ...]


def count_elements(shapes: Shapes) -> int:
    """Return how many elements tensors of these shapes have together."""
    return sum(prod(s) for s in shapes)


def varied_sizes(own: Shapes) -> list[int]:
    """Return the sizes above 1 in the shapes ``own`` that may be varied, in descending order and without repetitions.

    Sizes of at most 7 that occur in neither of the first two dims of a shape, such as windows of a convolution, are
    left out.
    """
    outer = {n for s in own for n in s[:2]}
    return sorted({n for s in own for n in s if n > 1 and (n > LARGEST_WINDOW or n in outer)}, reverse=True)


def replace_size(own: Shapes, size: int, new: int) -> Shapes:
    """Return the shapes ``own`` with each occurrence of ``size`` replaced by ``new``."""
    return tuple(tuple(new if n == size else n for n in s) for s in own)


def varied_shapes(own: Shapes) -> Iterator[Shapes]:
    """Yield random variations of the shapes ``own``. In the first ones, one size is changed wherever it occurs. In the
    next ones, a single dim is changed whose size others have as well, two sizes become equal, and all sizes are changed
    at once. In the last ones, one size or a single dim is changed, in random order.
    """
    for new in (lambda n: n + 1 + SECRET_RANDOM.randrange(n), lambda n: 1 + SECRET_RANDOM.randrange(n)):
        for size in varied_sizes(own):
            yield replace_size(own, size, new(size))
    # Two dims of ``own`` may have one size by chance only, as those of queries and keys.
    coupled = [shapes for shapes, size in _single_dims(own) if sum(n == size for s in own for n in s) > 1]
    yield from SECRET_RANDOM.sample(coupled, len(coupled))
    # A candidate may take two sizes that are equal for one another.
    pairs = [(size, other) for size in varied_sizes(own) for other in varied_sizes(own) if other < size]
    for size, other in SECRET_RANDOM.sample(pairs, min(EQUAL_SIZES, len(pairs))):
        yield replace_size(own, size, other)
    drawn = {size: 1 + SECRET_RANDOM.randrange(2 * size) for size in varied_sizes(own)}
    yield tuple(tuple(drawn.get(n, n) for n in s) for s in own)
    sizes = varied_sizes(own)
    alone: list[Shapes] = [replace_size(own, size, new) for size in sizes for new in (size - 1, size + 1, 1)]
    alone += [shapes for shapes, _ in _single_dims(own)]
    SECRET_RANDOM.shuffle(alone)
    yield from alone


def _single_dims(own: Shapes) -> Iterator[tuple[Shapes, int]]:
    """Yield the shapes ``own`` with the size of a single dim changed to another one at random, and its old size, for
    each dim that may be varied.
    """
    sizes = varied_sizes(own)
    for at, shape in enumerate(own):
        for dim, size in enumerate(shape):
            if size > 1 and size not in sizes:
                continue
            # One of several dims of this size is not 1: the reference would broadcast it, which callers never ask for.
            least = 2 if sum(n == size for other in own for n in other) > 1 else 1
            new = least + SECRET_RANDOM.randrange(2 * size + 2)
            new += new == size
            yield (*own[:at], (*shape[:dim], new, *shape[dim + 1 :]), *own[at + 1 :]), size


def shapes_with_many_rows(own: Shapes) -> Iterator[Shapes]:
    """Yield the shapes ``own`` with some thousand rows in the first tensor that has rows, and small sizes elsewhere.
    Those with as many rows wherever that size occurs follow, with small sizes elsewhere, and with their own ones.
    """
    for at, shape in enumerate(own):
        if len(shape) > 1 and shape[0] in varied_sizes(own):
            small = {n: 2 + SECRET_RANDOM.randrange(3) for n in varied_sizes(own)}
            rows = MANY_ROWS + SECRET_RANDOM.randrange(MANY_ROWS)
            less, *more = (
                tuple(tuple(new.get(n, n) for n in s) for s in own)
                for new in (small, small | {shape[0]: rows}, {shape[0]: rows})
            )
            yield from dict.fromkeys([(*less[:at], (rows, *less[at][1:]), *less[at + 1 :]), *more])
            return


def shapes_near_constants(own: Shapes, numbers: Sequence[int], limit: int) -> Iterator[Shapes]:
    """Yield the shapes ``own`` with one size, wherever it occurs, replaced by one of the positive ``numbers``, then by
    one more, then with two sizes replaced by two of the numbers, each in random and secret order. If that makes more
    than ``limit`` elements, the other sizes become small.
    """
    sizes, numbers = varied_sizes(own), [n for n in dict.fromkeys(numbers) if n > 0]
    exact, above = ([{size: n + more} for size in sizes for n in numbers] for more in (0, 1))
    both = [{a: m, b: n} for a, b in permutations(sizes, 2) for m, n in combinations(numbers, 2)]
    both = SECRET_RANDOM.sample(both, min(PAIRS_OF_NUMBERS, len(both)))
    # What the code compares is the likeliest to be decided on, and not all of these may be tried.
    for changes in (exact, above):
        SECRET_RANDOM.shuffle(changes)
    for new in (*exact, *above, *both):
        shapes = tuple(tuple(new.get(n, n) for n in s) for s in own)
        if count_elements(shapes) > limit:
            small = {n: 2 + SECRET_RANDOM.randrange(3) for n in sizes if n not in new}
            shapes = tuple(tuple((small | new).get(n, n) for n in s) for s in own)
        yield shapes


def shapes_from_constants(own: Shapes, numbers: Sequence[int]) -> Iterator[Shapes]:
    """Yield the shapes ``own`` with one size, wherever it occurs, replaced by one of the positive ``numbers``. These
    are constants in the candidate's code. The order is random and secret.
    """
    pairs = [(size, new) for new in dict.fromkeys(numbers) for size in varied_sizes(own) if new > 0]
    SECRET_RANDOM.shuffle(pairs)
    for size, new in pairs:
        yield replace_size(own, size, new)
