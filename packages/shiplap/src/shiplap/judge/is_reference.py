"""Detection of a candidate that runs the operators of the reference again."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any


def describe_resubmission(reference: list[tuple[str, Any]] | str, candidate: list[tuple[str, Any]] | str) -> str:
    """Return why a candidate is the reference again, or an empty text.

    The condition is that a call runs each operator of the reference: on the same shapes or, if the reference runs
    several operators, on as many elements in rows of the same length.
    """
    if isinstance(reference, str) or isinstance(candidate, str) or not reference:
        return ""
    same = not Counter(map(str, reference)) - Counter(map(str, candidate))
    wanted, ran = _count_operator_elements(reference), _count_operator_elements(candidate)
    if not same and (len(wanted) < 2 or any(ran[what] < count for what, count in wanted.items())):
        return ""
    names = ", ".join(dict.fromkeys(name for name, _ in reference))
    return f"it runs the framework's own operators as the reference does: {names}"[:300]


def _count_operator_elements(ops: list[tuple[str, Any]]) -> Counter[str]:
    """Count the elements on which each operator ran, keyed by operator and length of rows.

    An operator that runs on parts of a tensor therefore counts as much as one that runs on the whole.
    """
    done: Counter[str] = Counter()
    for name, told in ops:
        shapes = [s for s in told if isinstance(s, list) and s] if isinstance(told, list) else [str(told)]
        rows = [s[-1] if isinstance(s, list) else s for s in shapes]
        done[f"{name} {rows}"] += sum(prod(s) for s in shapes if all(type(n) is int for n in s)) or 1
    return done
