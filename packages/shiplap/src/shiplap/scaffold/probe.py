"""Probe a meta kernel for sizes: those that it takes together, and the results that they give. No real kernel runs.

From one accepted call, each size is changed alone. A size that is refused alone is changed together with others of the
same value: sizes that are accepted together are one dim. A size that is refused every time is fixed by the op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import torch

from shiplap import torch_private
from shiplap.errors import first_line
from shiplap.sampling.run import suppress_warnings
from shiplap.scaffold.calls import (
    DispatchedCall,
    SeenTensor,
    as_empty_tensors,
    make_dispatched_call,
    map_seen,
    seen_tensors,
)
from shiplap.scaffold.schema import SchemaField, SchemaForm
from shiplap.torch_private.dispatcher_library import Overload, has_meta_kernel

Slot = tuple[str, int]  # an argument that is one tensor, and an axis of it
# Matrices first: most kernels take them.
TRIED_RANKS = (2, 1, 3, 4, 0, 5)
TRIED_SIZES = (6, 4, 5, 3, 1, 2)  # tried for all sizes at once: an op may want boxes of 4 coordinates
GROWTH_STEPS = (5, 12)  # by which a size grows: to values that no other size has
# Bounds the time for kernels with many arguments.
MOST_TRIES = 600
# Harmless values, by which few kernels refuse a call.
TRIED_SCALARS: dict[str, Any] = {
    "int": 1,
    "SymInt": 1,
    "float": 1.0,
    "bool": False,
    "Scalar": 2,
    "ScalarType": torch.float32,
    "Device": torch.device("cpu"),
}
PROBE_REFUSALS = Exception  # a meta kernel may raise anything, and all of it means no


@dataclass
class ProbeResult:
    """The results of calls of a meta kernel.

    ``calls`` are the accepted calls. ``ranks`` maps each argument to the numbers of dims that it may have. A slot is a
    pair of an argument name and an axis. ``ties`` are sets of slots whose sizes must be equal, and ``fixed`` are the
    slots whose size the op fixes. ``reason`` states why there are no calls, and is empty if there are some.
    """

    calls: list[DispatchedCall] = field(default_factory=list)
    ties: list[frozenset[Slot]] = field(default_factory=list)
    fixed: set[Slot] = field(default_factory=set)
    ranks: dict[str, set[int]] = field(default_factory=dict)
    reason: str = ""


def probe_meta_kernel(form: SchemaForm, overload: Overload, start: DispatchedCall | None = None) -> ProbeResult:
    """Call the meta kernel of ``overload``, an op with the schema ``form``, with tensors that have no data. Return the
    calls that it accepts, the sizes that have to be equal, and the sizes that it accepts at one value only.

    The first call is ``start`` or, if that is None, one that is found by trial.
    """
    if not has_meta_kernel(form.name):
        return ProbeResult(reason="no meta kernel")
    asker = _MetaProber(form, overload)
    with suppress_warnings(), torch_private.fake_mode(symbolic=True, fallbacks=False):  # torch logs what a fake refuses
        base = asker.find_accepted_call() if start is None else asker.try_call(start.arguments)
        if base is None:
            return ProbeResult(reason=asker.reason or "the meta kernel takes none of the calls that were tried")
        answers = ProbeResult([base])
        if start is None:
            asker.probe_ranks(base, answers)
        asker.probe_sizes(base, answers)
    return answers


def dtype_follows_arguments(form: SchemaForm, overload: Overload, probed: ProbeResult) -> bool:
    """Return whether each result of ``overload`` has the dtype of the tensor arguments. This is tested by one call of
    the meta kernel, the first in ``probed`` with all tensors in float64. Return False if ``probed`` has no call.
    """
    base = probed.calls[0] if probed.calls else None
    if base is None:
        return False
    wide = {n: map_seen(v, lambda t: SeenTensor("float64", t.shape, t.device)) for n, v in base.arguments.items()}
    with suppress_warnings(), torch_private.fake_mode(symbolic=True, fallbacks=False):
        call = _MetaProber(form, overload).try_call(wide)
    if call is None:
        return False
    # Arguments that had float64 already would show nothing.
    return all(s.dtype == "float64" for r in call.results for s in seen_tensors(r)) and wide != base.arguments


class _MetaProber:
    """A caller of the meta kernel of one op, which finds arguments that the kernel accepts. It makes at most
    ``MOST_TRIES`` calls.
    """

    def __init__(self, form: SchemaForm, overload: Overload) -> None:
        """Store the schema ``form`` and the ``overload`` of the op, and allow ``MOST_TRIES`` calls."""
        self.form, self.overload, self.left, self.reason = form, overload, MOST_TRIES, ""

    def try_call(self, arguments: Mapping[str, Any]) -> DispatchedCall | None:
        """Call the op's meta kernel with fake tensors for ``arguments``, in which a :class:`SeenTensor` stands for a
        tensor. Return the call with its results. Return None if it is refused or if the allowed number of tries is used
        up.
        """
        if self.left <= 0:
            return None
        self.left -= 1
        try:
            positional, named = self.form.split({n: as_empty_tensors(v) for n, v in arguments.items()})
            # A fake of an op with an autograd kernel would record a graph for nothing.
            with torch.no_grad():
                result = self.overload(*positional, **named)
            results = make_dispatched_call(self.overload._schema, (), {}, result).results
        except PROBE_REFUSALS as e:
            # No further call can succeed, so the remaining tries are given up.
            if isinstance(e, NotImplementedError) or type(e).__name__ == "UnsupportedOperatorException":
                self.left, self.reason = 0, "no meta kernel"
                return None
            self.reason = first_line(e)[:160]
            return None
        # No fake has a range of values.
        unknown = {n: map_seen(v, lambda t: SeenTensor(t.dtype, t.shape, t.device)) for n, v in arguments.items()}
        return DispatchedCall(unknown, results)

    def find_accepted_call(self) -> DispatchedCall | None:
        """Return the first call that the meta kernel accepts, or None if there is none. First all tensors get an equal
        number of dims, and then every combination of numbers is tried.
        """
        scalars = {a.name: _make_scalar(a) for a in self.form.arguments if not a.tensor}
        if any(v is ... for v in scalars.values()):
            return None
        tensors = [a for a in self.form.arguments if a.tensor]
        same = [(r,) * len(tensors) for r in TRIED_RANKS]
        # Six ranks for each of five tensors are 7776 combinations, far above MOST_TRIES.
        mixed = [] if len(tensors) > 4 else list(product(TRIED_RANKS, repeat=len(tensors)))
        for ranks, size in product([*same, *(m for m in mixed if m not in same)], TRIED_SIZES[:2]):
            # Kernels on indices refuse floats, most others refuse integers.
            for dtype in ("float32", "int64"):
                given = {a.name: _make_argument(a.kind, r, size, dtype) for a, r in zip(tensors, ranks, strict=True)}
                if (
                    call := self.try_call({a.name: {**scalars, **given}[a.name] for a in self.form.arguments})
                ) is not None:
                    return call
            # Half of the tries are left for the sizes.
            if self.left < MOST_TRIES // 2:
                return None
        return None

    def probe_ranks(self, base: DispatchedCall, answers: ProbeResult) -> None:
        """Find, for each tensor of the accepted call ``base``, the numbers of dims that it may have while all other
        tensors keep theirs. Store them in ``answers``.
        """
        for name, value in base.arguments.items():
            if not isinstance(value, SeenTensor):
                continue
            taken = {len(value.shape)}
            for rank in TRIED_RANKS:
                # With a size that the kernel has accepted before, so that only the rank is new.
                other = SeenTensor(value.dtype, (value.shape[0] if value.shape else 6,) * rank, value.device)
                if rank not in taken and (call := self.try_call({**base.arguments, name: other})) is not None:
                    taken.add(rank)
                    answers.calls.append(call)
            answers.ranks[name] = taken

    def probe_sizes(self, base: DispatchedCall, answers: ProbeResult) -> None:
        """Call the meta kernel with each int and each size changed alone, then with sizes changed together that were
        refused alone.

        Store the results in ``answers``. They are the accepted calls, the sizes that must be equal (``ties``), and the
        sizes that cannot change (``fixed``).
        """
        stuck: list[Slot] = []
        for index, others in enumerate(_with_other_ints(base)):
            answers.calls += [c for c in [self.try_call(others)] if c is not None and index < MOST_TRIES // 4]
        for slot in _slots_of_call(base):
            changed = [self.try_call(_with_grown_sizes(base, (slot,), step)) for step in GROWTH_STEPS]
            answers.calls += [c for c in changed if c is not None]
            if changed[0] is None:
                # Refused alone: the size is fixed, or tied to another one.
                stuck.append(slot)
        for group in self._groups(base, stuck):
            if any(tied & group for tied in answers.ties) and len(group) == 2 and self._known(group, answers):
                continue
            changed = [self.try_call(_with_grown_sizes(base, tuple(group), step)) for step in GROWTH_STEPS]
            if changed[0] is not None:
                answers.ties.append(group)
                answers.calls += [c for c in changed if c is not None]
        tied = {slot for group in answers.ties for slot in group}
        # Once the tries are used up, some ties may not have been found.
        answers.fixed = {slot for slot in stuck if slot not in tied} if self.left > 0 else set()

    def _known(self, group: frozenset[Slot], answers: ProbeResult) -> bool:
        """Return whether ``answers`` already list the sizes of all slots of ``group`` as equal. A slot is an argument
        name and an axis.
        """
        return any(group <= tied for tied in answers.ties)

    def _groups(self, base: DispatchedCall, stuck: Sequence[Slot]) -> Iterator[frozenset[Slot]]:
        """Yield the sets of slots (pairs of an argument name and an axis) whose sizes are to be changed together.
        ``stuck`` are the slots whose size was refused when changed alone.

        Pairs of slots with equal sizes come first. For each size, they are followed by the sets of slots on one axis
        and the set of all slots.
        """
        by_size: dict[int, list[Slot]] = {}
        for slot in stuck:
            by_size.setdefault(_size_at_slot(base, slot), []).append(slot)
        for slots in by_size.values():
            yield from (frozenset(pair) for pair in combinations(slots, 2))
        for slots in by_size.values():
            by_axis: dict[int, list[Slot]] = {}
            for slot in slots:
                by_axis.setdefault(slot[1], []).append(slot)
            yield from (frozenset(s) for s in by_axis.values() if len(s) > 2)
            if len(slots) > 2:
                yield frozenset(slots)


def _slots_of_call(call: DispatchedCall) -> list[Slot]:
    """Return all slots, pairs of an argument name and an axis, of a recorded call."""
    return [(n, axis) for n, v in call.arguments.items() if isinstance(v, SeenTensor) for axis in range(len(v.shape))]


def _size_at_slot(call: DispatchedCall, slot: Slot) -> int:
    """Return the size at a slot, an argument name and an axis, of a recorded call."""
    seen: SeenTensor = call.arguments[slot[0]]
    return seen.shape[slot[1]]


def _with_grown_sizes(call: DispatchedCall, slots: Sequence[Slot], step: int) -> dict[str, Any]:
    """Return the arguments of a call, as a dict by name, with the sizes at ``slots`` increased by ``step``."""
    arguments = dict(call.arguments)
    for name, axis in slots:
        seen: SeenTensor = arguments[name]
        shape = tuple(n + step if i == axis else n for i, n in enumerate(seen.shape))
        arguments[name] = SeenTensor(seen.dtype, shape, seen.device)
    return arguments


def _with_other_ints(call: DispatchedCall) -> Iterator[dict[str, Any]]:
    """Yield copies of the arguments of a call with another value for one int, or for one element of a list of ints."""
    for name, value in call.arguments.items():
        if type(value) is int:
            yield from ({**call.arguments, name: value + step} for step in (1, 3))
        elif isinstance(value, (tuple, list)) and value and all(type(v) is int for v in value):
            yield from (
                {**call.arguments, name: tuple(v + (i == k) for i, v in enumerate(value))} for k in range(len(value))
            )


def _make_argument(kind: str, rank: int, size: int, dtype: str) -> Any:
    """Return a :class:`SeenTensor` of the dtype ``dtype`` for a tensor argument, with ``rank`` dims of the size
    ``size``. ``kind`` is the argument's type in the schema. If it is a list type, return a tuple of two. If it is an
    optional type, return None.
    """
    if kind.endswith("?"):
        return None
    seen = SeenTensor(dtype, (size,) * rank, "cpu")
    return (seen, seen) if "[" in kind else seen


def _make_scalar(field: SchemaField) -> Any:
    """Return a value for an argument that is not a tensor. It is the default, None, or a usual value of the type.
    Return ``...`` if there is none to try.
    """
    if field.default is not None:
        return field.default_value
    if field.optional:
        return None
    element, bracket, length = field.kind.partition("[")
    if element not in TRIED_SCALARS:
        return ...
    count = length.rstrip("]")
    return [TRIED_SCALARS[element]] * (int(count) if count else 2) if bracket else TRIED_SCALARS[element]
