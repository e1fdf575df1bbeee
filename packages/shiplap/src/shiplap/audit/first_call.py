"""The first call of an op in a process: its result, and its changes to the state of the process.

Later calls show neither: a kernel that initialises itself has done so by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.run import run_op

CHANGED_BY_LOADING = (
    *("threads", "open files", "the environment", "Python's recursion limit", "the module search path"),
    *("warning filters", "signal handlers", "locale", "NumPy's floating point errors"),
)


@dataclass(frozen=True)
class FirstCall:
    """The first call of an op in a process. It holds the sample, the results, and the changes to the state of the
    process as tuples ``(name, value before, value after)``.

    ``changed`` are changes that only the op can have made. ``loaded`` are changes that a library may make when it is
    loaded. They are a fault only if a later call makes them again.
    """

    case: SampleCase
    got: tuple[Tensor, ...]
    changed: tuple[tuple[str, Any, Any], ...]
    loaded: tuple[tuple[str, Any, Any], ...] = ()


# Weak, so that an op that a test declares can be collected.
_FIRST_CALLS: WeakKeyDictionary[Op, FirstCall] = WeakKeyDictionary()


def make_first_call(op: Op, case: SampleCase, state: Callable[[], dict[str, Any]]) -> FirstCall:
    """Return the record of the first call of ``op`` in this process, with the changes of the state that ``state()``
    returns.

    The op is called with ``case``. If an earlier check has made the first call, nothing is called and the record of
    that call is returned.
    """
    if (known := _FIRST_CALLS.get(op)) is not None:
        return known
    before = state()
    got = run_op(op, case)
    after = state()
    # State that was empty before, such as that of NumPy, comes from an import and not from the op.
    moved = [(n, before[n], after[n]) for n in before if n in after and before[n] != after[n] and before[n] != ""]
    changed, loaded = (tuple(m for m in moved if (m[0] in CHANGED_BY_LOADING) is which) for which in (False, True))
    made = _FIRST_CALLS[op] = FirstCall(case, got, changed, loaded)
    return made


def why_first_call_was_wrong(op: Op) -> str:
    """Return a message that says how the result of the op's first call in this process was wrong. Return an empty
    string if it was right, if a later call on the same sample is wrong, too, or if no first call was recorded.
    """
    first = _FIRST_CALLS.get(op)
    if first is None:
        return ""
    problem = against_reference(op, first.case, first.got).problem
    later = run_op(op, first.case) if problem else first.got
    alike = (
        not bitwise_difference(later, first.got) if [t.shape for t in later] == [t.shape for t in first.got] else False
    )
    return "" if not problem or alike or against_reference(op, first.case, later).problem else problem
