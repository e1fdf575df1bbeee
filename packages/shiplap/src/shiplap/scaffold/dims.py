"""Name the sizes of arguments: axes that are one dim, axes of a fixed size, and axes of any size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shiplap.scaffold.calls import DispatchedCall, SeenTensor, seen_tensors
from shiplap.scaffold.probe import ProbeResult, Slot
from shiplap.scaffold.schema import SchemaField, SchemaForm

# The usual letters for sizes first. x is left out, the usual name of a tensor.
DIM_LETTERS = ("n", "m", "k", "p", "q", "r", "s", "t", "u", "v", "w", "y", "z")
CALLS_BEFORE_FIXED = 3  # different calls, before a size that never changed is taken for fixed
LARGEST_FIXED_SIZE = 8  # coordinates and taps; a larger size that never changed is more likely that of one model


@dataclass
class NamedDims:
    """The names of the dims of an op's tensor arguments.

    ``shapes`` maps each argument that is one tensor to the names or numbers of its dims, or to None if its rank is
    unknown. ``slots`` maps each name to a pair of an argument and an axis that has this dim. ``scalars`` holds the
    names of the int arguments, and ``name[i]`` for elements of lists of ints such as ``stride[0]``.
    """

    shapes: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)  # a slot that has the dim
    scalars: tuple[str, ...] = ()  # ints, and elements of lists of ints: ``stride[0]``

    def environment(self, call: DispatchedCall) -> dict[str, Any] | None:
        """Return the sizes of the named dims and the int arguments of a recorded call, by name. Return None if the call
        lacks one of them.
        """
        env = {name: call.arguments.get(name) for name in (s.partition("[")[0] for s in self.scalars)}
        for name, (argument, axis) in self.slots.items():
            seen = call.arguments.get(argument)
            if not isinstance(seen, SeenTensor) or axis >= len(seen.shape):
                return None
            env[name] = seen.shape[axis]
        return None if any(v is None for v in env.values()) else env


def name_dims(form: SchemaForm, recorded: Sequence[DispatchedCall], probed: ProbeResult) -> NamedDims:
    """Return names for the sizes of the tensor arguments of the schema ``form``. Two axes get one name if their sizes
    were equal in recorded calls, or if the meta kernel refused different sizes for them. Axes whose size never changed
    may get a number instead.
    """
    calls = [*recorded, *probed.calls]
    # Only an argument of one rank has axes that can be named.
    ranks = {
        a.name: _ranks_of_argument(a.name, recorded, probed) for a in form.arguments if a.kind.rstrip("?") == "Tensor"
    }
    slots = [(n, axis) for n, r in ranks.items() if len(r) == 1 for axis in range(next(iter(r)))]
    classes = _DimClasses(slots)
    for i, one in enumerate(slots):
        for other in slots[i + 1 :]:
            if _is_same_dim(one, other, recorded, probed):
                classes.join(one, other)
    dims = NamedDims(scalars=tuple(name for a in form.arguments for name in _int_names(a, calls)))
    # Fixed sizes are found before names are given, so that letters go to real dims only.
    fixed = {c: n for c in classes.each() if (n := _fixed_size(c, recorded, probed, len(slots))) is not None}
    names = _name_groups(form, [c for c in classes.each() if c not in fixed], dims.scalars, calls)
    texts = {slot: str(size) for c, size in fixed.items() for slot in c}
    for group, name in names.items():
        texts |= dict.fromkeys(group, name)
        # A dim is read off an argument that is always there.
        present = [s for s in slots if s in group and not is_optional_argument(form, s[0])]
        if present:
            dims.slots[name] = present[0]
    for name, r in ranks.items():
        dims.shapes[name] = tuple(texts[name, axis] for axis in range(next(iter(r)))) if len(r) == 1 else None
    return dims


def _int_names(argument: SchemaField, calls: Sequence[DispatchedCall]) -> Iterator[str]:
    """Yield the name of an int argument. For a list of ints that has one length in all calls, yield ``name[i]`` for
    each element.
    """
    if argument.kind in ("int", "SymInt"):
        yield argument.name
    if re.fullmatch(r"(int|SymInt)\[\d*\]", argument.kind):
        lengths = {len(v) for c in calls if isinstance(v := c.arguments.get(argument.name), (tuple, list))}
        yield from (f"{argument.name}[{i}]" for i in range(lengths.pop() if len(lengths) == 1 else 0))


def is_optional_argument(form: SchemaForm, name: str) -> bool:
    """Return whether the argument ``name`` of the schema may be None."""
    return next(a for a in form.arguments if a.name == name).optional


def _ranks_of_argument(name: str, recorded: Sequence[DispatchedCall], probed: ProbeResult) -> set[int]:
    """Return the numbers of dims that an argument had in the recorded calls. If it was in none, return those that the
    meta kernel accepted.
    """
    shapes = [v.shape for c in recorded if isinstance(v := c.arguments.get(name), SeenTensor)]
    return {len(s) for s in shapes} or set(probed.ranks.get(name, ()))


class _DimClasses:
    """A partition of slots into sets. A slot is a pair of an argument name and an axis. All slots in one set are one
    dim.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        """Put each slot (an argument name and an axis) into a separate set."""
        self._of = {slot: frozenset((slot,)) for slot in slots}

    def join(self, one: Slot, other: Slot) -> None:
        """Unite the sets that contain the slots ``one`` and ``other``, since their axes are one dim. A slot is a pair
        of an argument name and an axis.
        """
        joined = self._of[one] | self._of[other]
        self._of |= dict.fromkeys(joined, joined)

    def each(self) -> list[frozenset[Slot]]:
        """Return the sets of slots, each once. A slot is an argument name and an axis, and the slots of a set are one
        dim.
        """
        return list(dict.fromkeys(self._of.values()))


def _sizes_of_slot(slot: Slot, calls: Sequence[DispatchedCall]) -> list[int | None]:
    """Return the size at ``slot`` (an argument name and an axis) in each call. It is None for a call that has no such
    axis.
    """
    seen = (c.arguments.get(slot[0]) for c in calls)
    return [v.shape[slot[1]] if isinstance(v, SeenTensor) and slot[1] < len(v.shape) else None for v in seen]


def _is_same_dim(one: Slot, other: Slot, recorded: Sequence[DispatchedCall], probed: ProbeResult) -> bool:
    """Return whether the axes at two slots (pairs of an argument name and an axis) are one dim. A meta kernel that
    refuses different sizes for them proves it.

    It is also assumed if the sizes agreed in recorded calls of at least two sizes. Within one tensor, the meta kernel
    must not have accepted different sizes, since images may happen to be square.
    """
    # A size of 0 agrees with too much to be evidence.
    pairs = [
        (a, b) for a, b in zip(_sizes_of_slot(one, recorded), _sizes_of_slot(other, recorded), strict=True) if a and b
    ]
    if any(a != b for a, b in pairs):
        return False
    if any({one, other} <= tied for tied in probed.ties):
        return True
    if probed.calls and (one in probed.fixed or other in probed.fixed):
        return False
    separate = any(
        a != b for a, b in zip(_sizes_of_slot(one, probed.calls), _sizes_of_slot(other, probed.calls), strict=True)
    )
    # One pair of equal sizes may be chance.
    different = len(set(pairs))
    return different >= 2 and not separate if one[0] == other[0] else different >= 2


def _fixed_size(
    group: frozenset[Slot], recorded: Sequence[DispatchedCall], probed: ProbeResult, others: int
) -> int | None:
    """Return the size of a dim if the op fixes it, such as 4 for boxes. Return None if it varies or may vary.

    ``group`` is the dim as its (argument name, axis) pairs. ``others`` is the number of such pairs in all arguments.
    """
    values = {v for slot in group for v in _sizes_of_slot(slot, recorded or probed.calls) if v is not None}
    if len(values) != 1:
        return None
    # The meta kernel refused every other size, or the columns have different meanings.
    if group <= probed.fixed or any(_has_mixed_columns(slot, recorded) for slot in group):
        return values.pop()
    if max(values) > LARGEST_FIXED_SIZE or _changes_result_shape(group, probed):
        return None
    shapes = {repr([v.shape for v in c.arguments.values() if isinstance(v, SeenTensor)]) for c in recorded}
    return values.pop() if len(shapes) >= CALLS_BEFORE_FIXED and others > len(group) else None


def _has_mixed_columns(slot: Slot, recorded: Sequence[DispatchedCall]) -> bool:
    """Return whether ``slot`` (an argument name and an axis) is the column axis of a matrix whose columns differ in
    meaning. That is assumed if one column has only whole numbers and another has not.
    """
    seen = [v for c in recorded if isinstance(v := c.arguments.get(slot[0]), SeenTensor)]
    kinds = {all(c.whole for c in column) for column in zip(*(s.columns for s in seen), strict=False)}
    return slot[1] == 1 and len(kinds) == 2


def _changes_result_shape(group: frozenset[Slot], probed: ProbeResult) -> bool:
    """Return whether the shape of a result changed together with the size of a dim in calls of the meta kernel. The op
    then does not fix that size. ``group`` is the dim as its (argument name, axis) pairs.
    """
    if not probed.calls:
        return False
    base, slots = probed.calls[0], list(group)
    usual, first = [_sizes_of_slot(s, [base]) for s in slots], _result_shapes(base)
    return any(
        _sizes_of_slot(s, [c]) != u and _result_shapes(c) != first
        for c in probed.calls
        for s, u in zip(slots, usual, strict=True)
    )


def _result_shapes(call: DispatchedCall) -> list[tuple[int, ...]]:
    """Return the shapes of all result tensors of a recorded call."""
    return [seen.shape for r in call.results for seen in seen_tensors(r)]


def _name_groups(
    form: SchemaForm, groups: Sequence[frozenset[Slot]], scalars: Sequence[str], calls: Sequence[DispatchedCall]
) -> dict[frozenset[Slot], str]:
    """Return a dict from each dim in ``groups`` to a name. A dim is given as its set of (argument name, axis) pairs.

    The name is that of one of ``scalars``, the int arguments, if that argument equals the dim's size in all calls.
    Otherwise it is a letter that no argument has as its name.
    """
    taken = {a.name for a in form.arguments}
    letters = _free_letters(taken)
    names: dict[frozenset[Slot], str] = {}
    for group in groups:
        scalar = next(
            (s for s in scalars if s not in names.values() and "[" not in s and _is_size_in_all_calls(group, s, calls)),
            None,
        )
        # The name of an int argument states that the argument is the size.
        names[group] = scalar or next(letters)
    return names


def _is_size_in_all_calls(group: frozenset[Slot], scalar: str, calls: Sequence[DispatchedCall]) -> bool:
    """Return whether the int argument ``scalar`` equals the size of a dim in all calls. At least two different sizes
    must have occurred. ``group`` is the dim as its (argument name, axis) pairs.
    """
    pairs = {
        (v, c.arguments.get(scalar))
        for slot in group
        for c in calls
        for v in _sizes_of_slot(slot, [c])
        if v is not None
    }
    # One size may equal the number by chance.
    return len(pairs) >= 2 and all(size == number for size, number in pairs)


def _free_letters(taken: set[str]) -> Iterator[str]:
    """Yield names for dims that are not among ``taken``, the names of arguments. Letters come first."""
    yield from (c for c in DIM_LETTERS if c not in taken)
    yield from (f"d{i}" for i in range(1000) if f"d{i}" not in taken)


def is_plain_name(text: str) -> bool:
    """Return whether ``text``, a dim in a declaration, is a name. Otherwise it is a number or an expression."""
    return bool(re.fullmatch(r"[A-Za-z]\w*", text))


def value_range(calls: Sequence[DispatchedCall], name: str) -> tuple[float | None, float | None]:
    """Return the least and the largest value of the argument ``name`` in all calls. For a tensor they are those of its
    elements. Return ``(None, None)`` if there are no values.
    """
    values: list[Any] = [v for c in calls if (v := c.arguments.get(name)) is not None]
    low = [v.low if isinstance(v, SeenTensor) else v for v in values]
    high = [v.high if isinstance(v, SeenTensor) else v for v in values]
    known = [v for v in (*low, *high) if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return (min(known), max(known)) if known else (None, None)


def calls_with_dims(dims: NamedDims, calls: Sequence[DispatchedCall]) -> list[tuple[DispatchedCall, Mapping[str, Any]]]:
    """Return ``(call, sizes)`` for each of the recorded ``calls``. ``sizes`` maps names of dims and int arguments to
    their values in the call. Calls that lack one of them are left out.
    """
    return [(c, env) for c in calls if (env := dims.environment(c)) is not None]
