"""Which cases of a parametrised test ``make test`` runs, and which are left to ``nox -s long``."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

__all__ = ["DAY", "EFFORTS", "rotating", "sampled"]

# Set once for all workers of a run, which must agree on its tests.
DAY = os.environ.setdefault("SHIPLAP_TEST_DAY", datetime.datetime.now(datetime.UTC).date().isoformat())


def sampled(cases: Iterable[Any], *, long: Collection[str], name: Callable[[Any], str] = str) -> list[Any]:
    """The cases in their order; those that ``long`` names are marked ``long``.

    Args:
        cases: The values of ``pytest.mark.parametrize``.
        long: Names of the cases that only ``nox -s long`` runs.
        name: The name of a case.

    Raises:
        ValueError: ``long`` names what is no case, or every case.
    """
    cases = list(cases)
    unknown = set(long) - {name(case) for case in cases}
    if unknown:
        raise ValueError(f"no case is called {', '.join(sorted(unknown))}")
    if cases and all(name(case) in long for case in cases):
        raise ValueError("every case is marked long: make test would run none")
    return [pytest.param(case, marks=pytest.mark.long) if name(case) in long else case for case in cases]


def rotating(
    cases: Iterable[Any], count: int, *, long: Collection[str] = (), name: Callable[[Any], str] = str
) -> list[Any]:
    """The cases in their order, of which ``count`` are left in ``make test``: others each day, and in turn all of them.

    ``SHIPLAP_TEST_DAY=2026-11-26`` draws those of that day; ``nox -s long`` runs what today's ``make test`` does not.

    Args:
        cases: The values of ``pytest.mark.parametrize``, or a ``pytest.param``.
        count: How many run on one day.
        long: Names of the cases that only ``nox -s long`` runs.
        name: The name of a case.

    Raises:
        ValueError: ``long`` names what is no case, or every case.
    """
    cases = list(cases)
    sampled(cases, long=long, name=name)  # which refuses names of no case
    turns = [number for number, case in enumerate(cases) if name(case) not in long]
    random.Random(len(turns)).shuffle(turns)  # neighbours are often alike
    first = datetime.date.fromisoformat(DAY).toordinal() * count
    drawn = {turns[(first + turn) % len(turns)] for turn in range(min(count, len(turns)))}
    return [case if number in drawn else _long(case) for number, case in enumerate(cases)]


def _long(case: Any) -> Any:
    """The case, marked ``long``; it may be a ``pytest.param`` already."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.long], id=case.id)
    return pytest.param(case, marks=pytest.mark.long)


EFFORTS = sampled(["some", "every"], long=["every"])
"""Arguments of scripts with many cases: ``some``, often drawn anew each time, or (``nox -s long``) ``every`` one."""
