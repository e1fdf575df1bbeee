"""Shapes like those of the inputs of a reference: random ones, and ones that code may treat apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from math import prod
from random import SystemRandom

LARGEST_WINDOW = 7  # a small size that may be that of a window, and must not vary
EQUAL_SIZES = 4  # the most pairs of sizes that become equal
SWAPPED_SIZES = 2  # the most pairs of sizes that change places
ONES = 2  # the most sizes that become 1, for which compilers compile anew
MANY_ROWS = 2000  # the least number of rows in one shape; a table of rows by rows still fits into the memory
MOST_ROWS = 3000  # the most rows, and ``MANY_ROWS`` at random, by which a shape exceeds ``MANY_ELEMENTS``
MANY_ELEMENTS = 1 << 16  # 16 bits count fewer elements
FEW_COLUMNS = 64  # sizes beside many rows that stay as they are
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
    return _with_sizes(own, {size: new})


def _with_sizes(own: Shapes, new: dict[int, int]) -> Shapes:
    """Return the shapes ``own`` with each size that is a key of ``new`` replaced by its value."""
    return tuple(tuple(new.get(n, n) for n in s) for s in own)


def varied_shapes(own: Shapes, ones: int = ONES) -> Iterator[Shapes]:
    """Yield random variations of the shapes ``own``. In the first ones, one size is changed wherever it occurs. In the
    next ones, a single dim is changed whose size others have as well, a size becomes 1, two sizes become equal or
    change places, and all sizes are changed at once. In the last ones, one size or a single dim is changed, in random
    order. At most ``ones`` of the sizes become 1 before these last ones.
    """
    for new in (lambda n: n + 1 + SECRET_RANDOM.randrange(n), lambda n: 1 + SECRET_RANDOM.randrange(n)):
        for size in varied_sizes(own):
            yield replace_size(own, size, new(size))
    # Two dims of ``own`` may have one size by chance only, as those of queries and keys.
    coupled = [shapes for shapes, size in _single_dims(own) if sum(n == size for s in own for n in s) > 1]
    yield from SECRET_RANDOM.sample(coupled, len(coupled))
    sizes = varied_sizes(own)
    # Dims of one element are those that code drops, or adds, without an error.
    yield from (replace_size(own, size, 1) for size in SECRET_RANDOM.sample(sizes, min(ones, len(sizes))))
    # A candidate may take two sizes that are equal for one another, or know a shape by its number of elements.
    pairs = [(size, other) for size in sizes for other in sizes if other < size]
    for size, other in SECRET_RANDOM.sample(pairs, min(EQUAL_SIZES, len(pairs))):
        yield replace_size(own, size, other)
    for size, other in SECRET_RANDOM.sample(pairs, min(SWAPPED_SIZES, len(pairs))):
        yield _with_sizes(own, {size: other, other: size})
    yield _with_sizes(own, {size: 1 + SECRET_RANDOM.randrange(2 * size) for size in sizes})
    alone: list[Shapes] = [replace_size(own, size, new) for size in sizes for new in (size - 1, size + 1, 1)]
    alone += [shapes for shapes, _ in _single_dims(own)]
    SECRET_RANDOM.shuffle(alone)
    yield from alone


def neighbouring_shapes(shapes: Shapes, base: Shapes) -> Iterator[tuple[Shapes, Shapes]]:
    """Yield the ``shapes`` with one more element, and with twice as many, for each size in which they differ from
    ``base``, wherever they have that size and ``base`` another one. A reference that takes neither takes the size by
    broadcasting alone, for which a candidate may be another function.
    """
    both = [list(zip(s, b, strict=True)) for s, b in zip(shapes, base, strict=False)]
    for new in dict.fromkeys(n for pairs in both for n, before in pairs if n != before):
        more, twice = (
            tuple(tuple(n + extra if n == new != before else n for n, before in pairs) for pairs in both)
            for extra in (1, new)
        )
        yield more, twice


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
    """Yield the shapes ``own`` with some thousand rows in the first tensor that has rows, then with as many wherever
    that size occurs. Other sizes above 64 become small, then none, then all of them. Unless that takes too many rows,
    the tensor has more elements than 16 bits count.
    """
    for at, shape in enumerate(own):
        if len(shape) > 1 and shape[0] in (sizes := varied_sizes(own)):
            small = {n: 2 + SECRET_RANDOM.randrange(3) for n in sizes}
            less = {n: new for n, new in small.items() if n > FEW_COLUMNS or n == shape[0]}
            columns = max(1, prod(less.get(n, n) for n in shape[1:]))
            rows = min(max(MANY_ROWS, MANY_ELEMENTS // columns + 1), MOST_ROWS) + SECRET_RANDOM.randrange(MANY_ROWS)
            series = []
            for new in (less, {}, small):
                alone = _with_sizes(own, new)
                series += [(*alone[:at], (rows, *alone[at][1:]), *alone[at + 1 :])] if new else []
                series.append(_with_sizes(own, new | {shape[0]: rows}))
            yield from dict.fromkeys(series)
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
        shapes = _with_sizes(own, new)
        if count_elements(shapes) > limit:
            small = {n: 2 + SECRET_RANDOM.randrange(3) for n in sizes if n not in new}
            shapes = _with_sizes(own, small | new)
        yield shapes


def shapes_from_constants(own: Shapes, numbers: Sequence[int]) -> Iterator[Shapes]:
    """Yield the shapes ``own`` with one size, wherever it occurs, replaced by one of the positive ``numbers``. These
    are constants in the candidate's code. The order is random and secret.
    """
    pairs = [(size, new) for new in dict.fromkeys(numbers) for size in varied_sizes(own) if new > 0]
    SECRET_RANDOM.shuffle(pairs)
    for size, new in pairs:
        yield replace_size(own, size, new)
