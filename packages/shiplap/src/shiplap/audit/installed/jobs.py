"""The jobs of an op that has no declaration: which check runs on which call, in levels of what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from shiplap.audit.installed import checks, gradients
from shiplap.audit.installed.checks import Make
from shiplap.audit.installed.recipes import CallRecipe, malformed_calls
from shiplap.scaffold.schema import SchemaForm

# The names are part of stored results and baselines.
BY_NAME: dict[str, Callable[[Any, Make], str]] = {
    "repeat": checks.check_repeat,
    "uninitialized": checks.check_uninitialized,
    "mutation": checks.check_mutation,
    "alias": checks.check_alias,
    "layout": checks.check_layout,
    "fake": checks.check_fake,
    "precision": checks.check_precision,
    "reference": checks.check_reference,
    "gradient": gradients.check_gradient,
    "gradient_layout": gradients.check_gradient_layout,
    "gradient_mutation": gradients.check_gradient_mutation,
    "gradient_alone": gradients.check_gradient_alone,
    "double_backward": gradients.check_double_backward,
    "autocast": gradients.check_autocast,
    "compile": checks.check_compile,
    "surplus": checks.check_surplus,
    "rows": checks.check_rows,
    "crash": checks.check_crash,
}
CHECKS = tuple(name for name in BY_NAME if name not in ("crash", "rows"))  # of a call as it is
FIRST = ("repeat", "uninitialized")  # where these fail, comparisons of the same call say nothing more
OTHER_SIZES = (0, 1, 33)  # in place of each size that a call has
_MOST_VALUES = 1_000_000  # of all tensors of a call with other sizes
# These call the op once for each number of its arguments, or compile it.
_DEAR = ("gradient", "double_backward", "autocast", "compile")


class Level(IntEnum):
    """What the jobs of an op cost and say. All ops of a package pass through one level before the next one begins."""

    CHEAP = 0  # some calls of the op
    DEAR = 1  # finite differences and compiled code
    MALFORMED = 2  # arguments that do not fit each other; these tend to end their process, and say least


@dataclass(frozen=True)
class Job:
    """A check to run on one call of an op. ``texts`` are the Python expressions of the call's arguments. ``origin``
    says where the call comes from. ``note`` says what was changed in it, and may be empty.
    """

    check: str
    texts: Mapping[str, str]
    origin: str
    note: str = ""


def jobs_of(calls: Sequence[CallRecipe], form: SchemaForm) -> dict[Level, list[Job]]:
    """Return the jobs of all ``calls`` of an op with the schema ``form``, by level. In each level, those of the calls
    as they are come before those of calls with other sizes.
    """
    every = [j for call in calls for j in _jobs_of_call(call)]
    every = [j for j in every if not j.note] + [j for j in every if j.note]
    return {
        Level.CHEAP: [j for j in every if j.check not in _DEAR],
        Level.DEAR: [j for j in every if j.check in _DEAR],
        Level.MALFORMED: [j for call in calls for j in _jobs_of_malformed_calls(call, form)],
    }


def _jobs_of_call(call: CallRecipe) -> Iterator[Job]:
    """Yield the jobs of a call, each of which is one check of one call. All checks of the call itself come first. Some
    checks of the call with other sizes follow.
    """
    texts = call.texts()
    for check in CHECKS:
        yield Job(check, texts, call.origin)
    rows = next((t.shape[0] for _, t in call.tensors() if t.shape), 0)
    for size, other, resized in _resized_calls(call):
        if _reaches_beyond(call, resized, size, other):
            continue
        note = f"{other} in place of each size {size}"
        yield Job("crash", resized.texts("guarded"), call.origin, note)
        yield Job("fake", resized.texts(), call.origin, note)
        if size == rows and other <= 1:
            yield Job("rows", resized.texts(), call.origin, note)
        for check in (*FIRST, "layout") if other > 1 else ("gradient",):
            yield Job(check, resized.texts(), call.origin, note)


def _resized_calls(call: CallRecipe) -> Iterator[tuple[int, int, CallRecipe]]:
    """Yield ``(size, other, resized)`` for each size of a dim of ``call`` and each other size. In ``resized``,
    ``other`` is in place of ``size`` wherever that occurs.
    """
    for size in sorted({n for _, t in call.tensors() for n in t.shape if n > 1}):
        for other in OTHER_SIZES:
            resized = call.with_size(size, other)
            if sum(math.prod(t.shape) for _, t in resized.tensors()) <= _MOST_VALUES:
                yield size, other, resized


def _reaches_beyond(call: CallRecipe, resized: CallRecipe, size: int, other: int) -> bool:
    """Return whether an index of ``resized``, which is ``call`` with ``other`` in place of each ``size``, may lie
    outside of a tensor that is shorter now. Results of such a call say nothing.
    """
    pairs = zip(call.tensors(), resized.tensors(), strict=True)
    highs = [high for (_, t), (_, new) in pairs if math.prod(new.shape) for high in t.largest_whole_numbers()]
    # A larger number was no index of a dim of that size before. The last offset may be equal to the size.
    return any(other <= high <= size for high in highs)


def _jobs_of_malformed_calls(call: CallRecipe, form: SchemaForm) -> Iterator[Job]:
    """Yield the jobs of each call that is made from ``call`` and whose arguments do not fit each other, or may not.
    They check that the process survives, and the fake implementation for other sizes.
    """
    for note, malformed in malformed_calls(call, form):
        yield Job("crash", malformed.texts("guarded"), call.origin, note)
    for size, other, resized in _resized_calls(call):
        if _reaches_beyond(call, resized, size, other):
            note = f"{other} in place of each size {size}"
            yield Job("crash", resized.texts("guarded"), call.origin, note)
            yield Job("fake", resized.texts(), call.origin, note)
