"""Which cases of a parametrised test ``make test`` runs, and which are left to ``nox -s long``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

__all__ = ["EFFORTS", "sampled"]


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


EFFORTS = sampled(["some", "every"], long=["every"])
"""Arguments of scripts with many cases: ``some``, often drawn anew each time, or (``nox -s long``) ``every`` one."""
