"""The ledger of a proof: the combinations of an axis and an obligation that were looked at.

An *axis* is a property of calls that samples vary, such as a size. An *obligation* is a property of the op that a check
observes, such as the gradient. A *cell* is one of each: the gradient of calls of other sizes. The tables of this module
say which cells a verdict requires, and why it does not require the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from shiplap.sampling.case import SampleCase, tensors_among

AXES = {
    "size": "each dim at other sizes than those of the first sample",
    "large size": "a tensor of more than 65,536 elements",
    "rank": "no, one and several dims in the place of a variadic one",
    "layout": "memory that is not contiguous",
    "offset": "tensors that do not begin where their storage begins",
    "alignment": "addresses that are aligned to one element only",
    "dtype": "each dtype that the declaration admits",
    "value": "values other than normally distributed ones",
    "scalar": "other values of each scalar than its default",
    "absence": "optional tensors left out",
    "mode": "inference mode, no gradients, autocast, and the modes of compilers",
    "seed": "several seeds of random results",
    "order of calls": "other calls before, between and after",
    "thread": "other threads, and several at the same time",
}
"""Axis → the variation of calls."""

OBLIGATIONS = {
    "value": "the results are those of the reference",
    "gradient": "the gradients are those of the reference",
    "second gradient": "gradients of gradients are those of the reference, or are refused",
    "fake": "the fake promises what the op returns",
    "alias": "results share no memory that the declaration does not name",
    "mutation": "no argument is written that the declaration does not name",
    "determinism": "the same call gives the same bits",
    "mode": "a call leaves the process as it was",
    "capture": "compiled code and CUDA graphs give what the call gives",
}
"""Obligation → the property that is observed."""

Key = tuple[str, str]  # axis and obligation
CellState = Literal["covered", "untouched", "does not apply"]


def _cells(*rows: tuple[str, str, str]) -> dict[Key, str]:
    """Return a mapping from (axis, obligation) to the name of the check that looks at this combination.

    An axis is what samples vary, such as a size. An obligation is what a check observes, such as the gradient. Each row
    is ``(obligation, check, axes joined by ", ")``.
    """
    return {(axis, obligation): looked_by for obligation, looked_by, axes in rows for axis in axes.split(", ")}


AUDIT = _cells(
    ("value", "edges", "size, rank, layout, offset"),
    ("value", "addresses", "alignment"),
    ("value", "numerics", "dtype"),
    ("value", "special", "value"),
    ("value", "numerics", "scalar, absence"),
    ("value", "requires_grad", "mode"),
    ("value", "distribution", "seed"),
    ("value", "determinism", "order of calls"),
    ("value", "threads", "thread"),
    ("gradient", "gradient", "size, rank, layout, offset, dtype, value, scalar, absence"),
    ("gradient", "backward", "order of calls, thread"),
    ("second gradient", "backward", "size, rank, scalar, absence"),
    ("fake", "fake", "size, rank, layout, offset, dtype, scalar, absence"),
    ("alias", "fresh", "size, layout, offset, scalar, order of calls"),
    ("mutation", "schema", "dtype, layout, value"),
    ("value", "sizes", "large size"),
    ("determinism", "sizes", "size, large size"),
    ("determinism", "determinism", "value, order of calls"),
    ("determinism", "threads", "thread"),
    ("determinism", "distribution", "seed"),
    ("mode", "process", "mode, order of calls"),
    ("capture", "compile", "size, layout, absence, mode"),
    ("capture", "cuda_graph", "order of calls"),
)
"""Required cell of an audit → the check that has to look at it."""

JUDGE = _cells(
    ("value", "other shapes", "size"),
    ("value", "other values", "value, scalar"),
    ("value", "layouts", "layout, alignment"),
    ("value", "other arguments", "absence"),
    ("value", "many calls", "order of calls"),
    ("gradient", "gradients", "value"),
)
"""Required cell of a judgement → the part of the judgement that has to look at it."""

TUNE = _cells(
    ("value", "tune.verify", "value, order of calls"),
    ("determinism", "tune.confirm", "order of calls"),
)
"""Required cell of a tuning → the step that has to look at it."""

ANY = "*"
ALIGNED = 16  # bytes of a usual vector load
LARGE_ELEMENTS = 1 << 16  # elements of a tensor that 16 bits number, and that one thread may handle alone
_OPTIONAL: dict[Key, str] = {
    ("large size", "gradient"): "finite differences of many elements take minutes; other sizes are required",
    ("large size", "fake"): "a fake computes with sizes alone; `large` calls it beyond 2^31 elements",
    ("large size", "capture"): "a graph of other sizes is required, and it calls the kernel whose values are compared",
    ("large size", ANY): "many elements decide on loops, threads and counters, which show in values",
    ("value", "fake"): "a fake has no values",
    ("value", "alias"): "which memory a result has follows from sizes, layouts and scalars",
    ("absence", "alias"): "which memory a result has follows from sizes, layouts and scalars",
    ("dtype", "alias"): "which memory a result has follows from sizes, layouts and scalars",
    ("rank", "alias"): "a variadic dim is one dim to the allocator; other sizes and layouts are required",
    ("order of calls", "fake"): "a fake computes nothing and is called again for each size",
    ("order of calls", "mutation"): "`process` and `aliases` call again, and `schema` compares all bytes of one call",
    ("order of calls", "second gradient"): "the first gradient is looked at between other calls",
    ("dtype", "second gradient"): "the rule is the same in each dtype, and the first gradient is looked at in each",
    ("value", "second gradient"): "second derivatives at kinks are not defined; the first gradient is looked at there",
    ("layout", "second gradient"): "the op's own gradient gives torch these tensors, which are as it allocates them",
    ("offset", "second gradient"): "the op's own gradient gives torch these tensors, which are as it allocates them",
    ("mode", "gradient"): "`requires_grad` and `autocast` look at the dtype and presence of gradients in each mode",
    ("mode", "fake"): "`compile` calls the fake in each mode of the compilers",
    ("mode", ANY): "the modes are tried on values, and `process` looks at what a call changes in them",
    ("alignment", ANY): "an alignment decides on loads and stores, whose results are compared as values",
    ("seed", ANY): "a seed decides on random values and on nothing else",
    ("thread", ANY): "values and gradients of other threads show state that a thread keeps",
    (ANY, "mutation"): "a write to an argument follows from dtype, layout and values, which are required",
    (ANY, "determinism"): "a race shows with many elements, values and threads, which are required",
    (ANY, "mode"): "state of the process is set by a call as such, whatever its arguments",
    (ANY, "capture"): "a graph fixes sizes, layouts and absent arguments, which are required; the rest is data to it",
}


def optional_reason(axis: str, obligation: str) -> str:
    """Return why samples that vary ``axis`` (such as a size) need not be checked for ``obligation`` (such as the
    gradient). The result is an empty string if an audit requires the check.
    """
    if (axis, obligation) in AUDIT:
        return ""
    keys = (axis, obligation), (axis, ANY), (ANY, obligation)
    return next(_OPTIONAL[key] for key in keys if key in _OPTIONAL)


@dataclass(frozen=True)
class Cell:
    """One cell of the ledger of a verdict, that is, one combination of an axis (what samples vary) and an obligation
    (what a check observes).

    Attributes:
        axis, obligation: names of ``AXES`` and ``OBLIGATIONS``.
        looked_by: the name of the check that has to cover the cell. It is empty for an optional cell.
        state: ``"covered"`` if a sample was examined, and otherwise ``"does not apply"`` if there is a reason against
            it, or ``"untouched"``.
        samples: the number of samples that were examined.
        reason: the reason why the cell does not apply, was not reached or is optional.
    """

    axis: str
    obligation: str
    looked_by: str
    state: CellState
    samples: int = 0
    reason: str = ""

    @property
    def required(self) -> bool:
        """Whether a verdict requires this combination of an axis (what samples vary) and an obligation (what a check
        observes). If so, ``looked_by`` names the check that has to examine such samples.
        """
        return bool(self.looked_by)

    def __str__(self) -> str:
        """Return ``axis x obligation``."""
        return f"{self.axis} x {self.obligation}"


class Ledger:
    """The numbers of samples that each check has examined, for each axis (what samples vary) and obligation (what a
    check observes).
    """

    def __init__(self) -> None:
        """Make an empty ledger."""
        self._looked: dict[tuple[str, Key], int] = {}
        self._declined: dict[tuple[str, Key], str] = {}
        self.absent: dict[str, str] = {}  # axis → the reason why the declaration admits no such sample

    def look(self, check: str, axes: Iterable[str], obligations: Iterable[str], samples: int = 1) -> None:
        """Record that ``check`` has examined ``samples`` samples, each of which varies all ``axes`` (such as size and
        layout). In each of them it has observed all ``obligations`` (such as value and gradient).
        """
        named = tuple(obligations)
        for axis in axes:
            for obligation in named:
                key = check, (axis, obligation)
                self._looked[key] = self._looked.get(key, 0) + samples

    def decline(self, check: str, axes: Iterable[str], obligations: Iterable[str], reason: str) -> None:
        """Record why ``check`` has left out a sample that varies all ``axes`` (such as size and layout). The ``reason``
        is kept for each of the ``obligations`` (such as value and gradient). A reason that was recorded earlier stays.
        """
        named = tuple(obligations)
        for axis in axes:
            for obligation in named:
                self._declined.setdefault((check, (axis, obligation)), reason)

    def merge(self, other: Ledger) -> None:
        """Add the records of another ledger to this one. Counts of samples are summed. If both ledgers hold a reason
        for the same combination, that of this ledger is kept.
        """
        for key, samples in other._looked.items():
            self._looked[key] = self._looked.get(key, 0) + samples
        self._declined = {**other._declined, **self._declined}
        self.absent |= other.absent

    def records(self) -> list[list[Any]]:
        """Return the records as lists of strings and numbers, which ``load`` reads in another process. Each record is
        ``[check, axis, obligation, samples, reason]``.
        """
        looked = [[check, axis, obligation, n, ""] for (check, (axis, obligation)), n in self._looked.items()]
        return looked + [[check, axis, duty, 0, why] for (check, (axis, duty)), why in self._declined.items()]

    def load(self, records: Iterable[Iterable[Any]]) -> None:
        """Add ``records``, which the method ``records`` has returned, possibly in another process, to this ledger."""
        for check, axis, obligation, samples, reason in records:
            if reason:
                self.decline(check, (axis,), (obligation,), reason)
            else:
                self.look(check, (axis,), (obligation,), samples)

    def samples(self, axis: str, obligation: str) -> int:
        """Return the number of samples that vary ``axis`` (such as a size) and in which a check has observed
        ``obligation`` (such as the gradient). A sample that two checks have examined counts twice.
        """
        return sum(n for (_, key), n in self._looked.items() if key == (axis, obligation))

    def cells(self, required: Mapping[Key, str], verdicts: Mapping[str, tuple[str, str]]) -> tuple[Cell, ...]:
        """Return a tuple with a cell and its state for every combination of an axis (what samples vary) and an
        obligation (what a check observes).

        ``required`` maps the required pairs (axis, obligation) to the name of the check that has to look at them.
        ``verdicts`` maps the name of each check that ran to (verdict, evidence). If the required check did not run, the
        cell is optional.
        """
        return tuple(self._cell((a, o), required, verdicts) for a in AXES for o in OBLIGATIONS)

    def _cell(self, key: Key, required: Mapping[Key, str], verdicts: Mapping[str, tuple[str, str]]) -> Cell:
        """Return the cell of ``key``, a pair of an axis (what samples vary) and an obligation (what a check observes).
        The arguments ``required`` and ``verdicts`` are those of ``cells``. The cell holds the number of samples, or the
        reason why there are none.
        """
        axis, obligation = key
        samples, check = self.samples(*key), required.get(key, "")
        if check not in verdicts:
            state: CellState = "covered" if samples else "untouched"
            return Cell(axis, obligation, "", state, samples, "" if samples else optional_reason(*key))
        verdict, evidence = verdicts[check]
        if self._looked.get((check, key)) and verdict != "skip":
            return Cell(axis, obligation, check, "covered", samples)
        reason = self.absent.get(axis) or (evidence if verdict == "skip" else "")
        reason = reason or (self._declined.get((check, key), "") if verdict == "ok" else "")
        if reason:
            return Cell(axis, obligation, check, "does not apply", samples, reason)
        why = f"no sample varied the {axis}" if verdict == "ok" else f"the check is {verdict}"
        return Cell(axis, obligation, check, "untouched", samples, why)


def is_large(tensors: Iterable[Tensor]) -> bool:
    """Return whether one of the ``tensors`` has more than 65,536 elements."""
    return any(t.numel() > LARGE_ELEMENTS for t in tensors)


def varied_axes(case: SampleCase, base: SampleCase) -> tuple[str, ...]:
    """Return the names of the axes, such as ``size`` and ``layout``, in which the sample ``case`` differs from
    ``base``, the base sample of the op. The arguments themselves are compared, since a builder of samples may deviate
    from the requested sizes and dtypes.
    """
    free, given = dict(case.recipe.sizes), tensors_among(case.args)
    pairs = [(case.env.get(n), base.env.get(n)) for n in free]
    scalars = {n for n, _ in case.recipe.scalars}
    varied = {
        "large size": is_large(given) and not is_large(tensors_among(base.args)),
        "size": any(v != u for v, u in pairs) or case.recipe.lists != base.recipe.lists,
        "rank": any(isinstance(v, tuple) and isinstance(u, tuple) and len(v) != len(u) for v, u in pairs),
        "layout": any(not t.is_contiguous() for t in given),
        "offset": any(t.storage_offset() for t in given),
        "alignment": any(t.storage_offset() * t.itemsize % ALIGNED for t in given),
        "dtype": [t.dtype for t in given] != [t.dtype for t in tensors_among(base.args)]
        and case.graph_key == base.graph_key,
        "value": case.recipe.values != base.recipe.values,
        "scalar": any(case.env.get(n) != base.env.get(n) for n in scalars),
        "absence": case.recipe.absent != base.recipe.absent,
    }
    return tuple(axis for axis, differs in varied.items() if differs)
