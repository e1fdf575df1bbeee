"""Whether a candidate runs the operators of its reference, and so is the reference again."""

from __future__ import annotations

from collections import Counter
from math import prod

from shiplap.sandbox.protocol import OperatorUse


def describe_resubmission(reference: list[OperatorUse] | str, candidate: list[OperatorUse] | str) -> str:
    """Return a message that says why a candidate counts as a copy of the reference, or an empty string if it does not.

    The arguments list the framework operators that one call of the reference and of the candidate ran. Either may be a
    string, which says why they could not be listed. A candidate is a copy if it runs each operator of the reference on
    the same shapes. If the reference runs several kinds of operators, the same total of elements in rows of the same
    lengths is enough.
    """
    if isinstance(reference, str) or isinstance(candidate, str) or not reference:
        return ""
    # A candidate may run more operators than the reference, and still be it.
    same = not _count_operators(reference) - _count_operators(candidate)
    wanted, ran = _count_operator_elements(reference), _count_operator_elements(candidate)
    if not same and (len(wanted) < 2 or any(ran[what] < count for what, count in wanted.items())):
        return ""
    names = ", ".join(dict.fromkeys(use.name for use in reference))
    return f"it runs the framework's own operators as the reference does: {names}"[:300]


def _count_operators(operators: list[OperatorUse]) -> Counter[str]:
    """Return how often each of ``operators`` ran on arguments of the same sizes. A key has its name and these sizes."""
    counts: Counter[str] = Counter()
    for use in operators:
        counts[f"{use.name} {use.shapes}"] += use.count
    return counts


def _count_operator_elements(operators: list[OperatorUse]) -> Counter[str]:
    """Return a mapping from operators to the number of elements on which they ran. A key is text with the operator's
    name and the sizes of the last dims of its arguments.

    An operator that runs on parts of a tensor, one after the other, therefore counts as much as one that runs on the
    whole tensor.
    """
    done: Counter[str] = Counter()
    for use in operators:
        shapes = [s for s in use.shapes if s]
        plain = [[n for n in s if isinstance(n, int)] for s in shapes]  # others are lists of shapes
        count = sum(prod(sizes) for sizes, s in zip(plain, shapes, strict=True) if len(sizes) == len(s))
        done[f"{use.name} {[s[-1] for s in shapes]}"] += use.count * (count or 1)
    return done
