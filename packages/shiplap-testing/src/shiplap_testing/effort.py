"""Which cases of a parametrised test ``make test`` runs, and which are left to ``nox -s long``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def sampled(
    cases: Iterable[Any], count: int | None = None, *, long: Collection[str] = (), name: Callable[[Any], str] = str
) -> list[Any]:
    """Return a list of ``cases`` in their order as values for ``pytest.mark.parametrize``. The cases that ``make test``
    leaves out are marked ``long``, and only ``nox -s long`` runs them.

    The choice is the same in every run. Neighbours in a list are often alike, so ``count`` cases are taken at equal
    distances.

    Args:
        cases: The values of the parameter, each of which may be a ``pytest.param``.
        count: The number of cases that ``make test`` runs of those that ``long`` does not name, by default all.
        long: Names of cases that only ``nox -s long`` runs.
        name: A function that returns the name of a case.

    Raises:
        ValueError: ``long`` has a name that no case has, or names every case.
    """
    cases = list(cases)
    unknown = set(long) - {name(case) for case in cases}
    if unknown:
        raise ValueError(f"no case is called {', '.join(sorted(unknown))}")
    short = [number for number, case in enumerate(cases) if name(case) not in long]
    if cases and not short:
        raise ValueError("every case is marked long: make test would run none")
    if count is not None and count < len(short):
        # Neighbours are often alike, so that cases at equal distances differ the most.
        short = [short[turn * len(short) // count] for turn in range(count)]
    return [case if number in short else _long(case) for number, case in enumerate(cases)]


def _long(case: Any) -> Any:
    """Return ``case``, a value or a ``pytest.param``, as a ``pytest.param`` marked ``long``."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.long], id=case.id)
    return pytest.param(case, marks=pytest.mark.long)


EFFORTS = sampled(["some", "every"], long=["every"])
"""Arguments of scripts with many cases: ``some``, or (``nox -s long``) ``every`` one."""

DEVICE_CHECKS = (
    *("numerics", "edges", "addresses", "determinism", "fresh", "process", "threads"),
    *("large", "cuda_graph", "cudagraph_trees"),
)
"""The checks of an audit that show what depends on an accelerator: its kernels, memory, streams and graphs. A full
audit takes several times as long, mostly for checks that find the same on a CPU."""
