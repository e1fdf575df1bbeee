"""What a program prints in two runs: the same lines in the same order, with the same numbers but for rounding."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence

# The address of an object, which is another one in each run, and the operation that an edit may replace.
_VARIES = re.compile(r"\b0x[0-9a-f]+\b|(?<=grad_fn=)<\w+>")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def different_lines(before: str, after: str) -> set[tuple[str, ...]]:
    """Return the lines that are in one of the outputs ``before`` and ``after`` more often than in the other, or with
    other numbers. Each is what stands around its numbers. The order of lines does not count (:func:`moved_lines`).
    """
    old, new = map(numbers_by_line, (before, after))
    return {line for line in old.keys() | new.keys() if not _is_alike(old.get(line, ()), new.get(line, ()))}


def moved_lines(before: str, after: str, varying: Collection[tuple[str, ...]] = ()) -> set[tuple[str, ...]]:
    """Return the lines between the first and the last one whose place differs in the outputs ``before`` and ``after``.
    Each is what stands around its numbers. Lines in ``varying`` are left out.
    """
    old, new = ([line for line in _lines_of(text) if line not in varying] for text in (before, after))
    while old and new and old[0] == new[0]:
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return {*old, *new}


def _lines_of(text: str) -> Iterator[tuple[str, ...]]:
    """Yield what stands around the numbers of each line of ``text``."""
    return (tuple(_NUMBER.split(row)) for row in _VARIES.sub("...", text).splitlines())


def numbers_by_line(text: str) -> dict[tuple[str, ...], list[tuple[float, ...]]]:
    """Return the numbers of all lines of ``text`` in order of size, by what stands around them in their lines."""
    found: dict[tuple[str, ...], list[tuple[float, ...]]] = {}
    for row in _VARIES.sub("...", text).splitlines():
        found.setdefault(tuple(_NUMBER.split(row)), []).append(tuple(map(float, _NUMBER.findall(row))))
    return {line: sorted(rows) for line, rows in found.items()}


def _is_alike(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> bool:
    """Return whether two lists of as many lines have numbers that agree but for rounding."""
    pairs = [pair for rows in zip(first, second, strict=False) for pair in zip(*rows, strict=True)]
    return len(first) == len(second) and all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5) for a, b in pairs)


def zeros_in_output(before: str, after: str) -> list[str]:
    """Return the lines of the output ``before`` that have a number which is 0 in the same line of ``after``. Lines are
    the same if only their numbers differ.
    """
    # What is around the numbers, since a sign in their place could be in the line itself.
    known: dict[tuple[str, ...], list[str]] = {}
    for row in before.splitlines():
        known.setdefault(tuple(_NUMBER.split(row)), []).append(row)
    found = []
    for row in after.splitlines():
        same = known.get(tuple(_NUMBER.split(row)), [])
        columns = list(zip(*(map(float, _NUMBER.findall(each)) for each in same), strict=True))
        if any(not float(n) and all(column) for n, column in zip(_NUMBER.findall(row), columns, strict=bool(same))):
            found.append(same[0])
    return found
