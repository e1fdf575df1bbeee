"""Whether a candidate is the reference again: by the operators of the framework that a call of each runs."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any


def resubmitted(reference: list[tuple[str, Any]] | str, candidate: list[tuple[str, Any]] | str) -> str:
    """Why a candidate is the reference again, or an empty text.

    It is if a call of it runs each operator that the reference runs: on the same shapes or, where the reference runs
    several ones, on as many elements in rows of the same length.
    """
    if isinstance(reference, str) or isinstance(candidate, str) or not reference:
        return ""
    same = not Counter(map(str, reference)) - Counter(map(str, candidate))
    wanted, ran = _work(reference), _work(candidate)
    if not same and (len(wanted) < 2 or any(ran[what] < count for what, count in wanted.items())):
        return ""
    names = ", ".join(dict.fromkeys(name for name, _ in reference))
    return f"it runs the framework's own operators as the reference does: {names}"[:300]


def _work(ops: list[tuple[str, Any]]) -> Counter[str]:
    """Elements that each operator worked on, whether at once or in parts; by its name and by the length of rows."""
    done: Counter[str] = Counter()
    for name, told in ops:
        shapes = [s for s in told if isinstance(s, list) and s] if isinstance(told, list) else [str(told)]
        rows = [s[-1] if isinstance(s, list) else s for s in shapes]
        done[f"{name} {rows}"] += sum(prod(s) for s in shapes if all(type(n) is int for n in s)) or 1
    return done
