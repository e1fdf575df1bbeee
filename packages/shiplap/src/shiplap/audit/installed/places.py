"""Properties of a call's arguments that a refusal may be about: dtypes, numbers of dims, sizes and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from shiplap.audit.installed.recipes import ArgumentRecipe, CallRecipe, TensorRecipe
from shiplap.audit.installed.refusals import dtypes_in, numbers_in, ranks_in, totals_in
from shiplap.dtypes import floating, integers, preferred

_DTYPES = tuple(dict.fromkeys((*floating()[:1], *integers(), *preferred())))  # in the order in which they are tried
_MOST_SIZE = 128  # of a dim that is set to a number in a message
_MOST_TOTAL = 4096  # of a vector that has as many elements as several tensors together
_MOST_MEMBERS = 16
_MOST_OF_MORE_DIMS = 1 << 16  # elements of a tensor to which dims of its last size are added


class Property(IntEnum):
    """A property of a tensor, of a list or of a number."""

    DTYPE = 0
    RANK = 1
    SIZE = 2
    COUNT = 3  # of members of a list
    NUMBER = 4
    VALUES = 5  # which are all equal, or -1 if they are not
    NUMEL = 6  # of a vector


# Values that hardly any message has, so that one that has them quotes the property.
_MARKS: dict[Property, tuple[str | int, ...]] = {
    Property.DTYPE: ("int16", "float16"),
    Property.RANK: (5, 6),
    Property.SIZE: (13, 11),
    Property.COUNT: (7, 9),
    Property.NUMBER: (13, 11),
}


@dataclass(frozen=True)
class Place:
    """The property ``kind`` of the argument ``name``, or of each member of it if it is a list. ``axis`` is that of a
    size.
    """

    name: str
    kind: Property
    axis: int = 0

    def value(self, call: CallRecipe) -> str | int:
        """Return the present value of the property in ``call``. That of a list is its first member's."""
        value = call.arguments[self.name]
        if self.kind is Property.COUNT:
            return len(value)
        one = value[0] if isinstance(value, tuple) else value
        read: dict[Property, Callable[[ArgumentRecipe], str | int]] = {
            Property.NUMBER: int,
            Property.DTYPE: lambda t: str(t.dtype),
            Property.RANK: lambda t: len(t.shape),
            Property.SIZE: lambda t: int(t.shape[self.axis]),
            Property.VALUES: lambda t: int(t.low) if t.low == t.high and t.last is None and not t.values else -1,
            Property.NUMEL: lambda t: math.prod(t.shape),
        }
        return read[self.kind](one)

    def with_value(self, call: CallRecipe, value: str | int) -> CallRecipe:
        """Return a copy of ``call`` in which the property has the ``value``."""
        old = call.arguments[self.name]
        if self.kind is Property.COUNT:
            return call.with_argument(self.name, _with_count(old, int(value)))
        changes: dict[Property, Callable[[ArgumentRecipe], ArgumentRecipe]] = {
            Property.NUMBER: lambda n: value,
            Property.DTYPE: lambda t: replace(t, dtype=value, source=""),
            Property.RANK: lambda t: _with_rank(t, int(value)),
            Property.SIZE: lambda t: _with_size(t, self.axis, int(value)),
            Property.VALUES: lambda t: t.filled_with(int(value)),
            Property.NUMEL: lambda t: t.reshaped((int(value),)),
        }
        change = changes[self.kind]
        if not isinstance(old, tuple):
            return call.with_argument(self.name, change(old))
        # A list may also have members of other types, such as None.
        return call.with_argument(self.name, tuple(change(m) if type(m) is type(old[0]) else m for m in old))

    def mark(self, call: CallRecipe, refusal: str) -> str | int | None:
        """Return a value of the property that neither ``call`` nor the message ``refusal`` has, or None."""
        present = {self.value(call), *numbers_in(refusal), *dtypes_in(refusal)}
        return next((m for m in _MARKS.get(self.kind, ()) if m not in present), None)

    def others(self, call: CallRecipe, refusal: str) -> list[str | int]:
        """Return other values of the property, those that the message ``refusal`` suggests first."""
        numbers, own = numbers_in(refusal), self.value(call)
        near = [n + d for d in (0, 1, -1) for n in numbers]
        totals = [n for n in totals_in(refusal) if 0 < n <= _MOST_TOTAL]
        sizes = [n for _, t in call.tensors() for n in t.shape]
        values: dict[Property, list[str | int]] = {
            Property.DTYPE: [*dtypes_in(refusal), *_DTYPES],
            Property.RANK: [*ranks_in(refusal), *(n for n in numbers if n < 5), 1, 2, 3, 0, 4],
            Property.SIZE: [
                *totals,
                *(n for n in (*near, *sizes, *_small_numbers(call), 1, 2, 4) if 0 < n <= _MOST_SIZE),
            ],
            Property.COUNT: [n for n in (*near, *_counts(call), 1, 2, 3) if 0 < n <= _MOST_MEMBERS],
            Property.NUMBER: [n for n in (*near, *sizes, 1, 2, 0, 4) if n <= _MOST_SIZE],
            Property.VALUES: [0, 1, 2, *(n for n in near if 0 <= n <= _MOST_SIZE)],
        }
        return [v for v in dict.fromkeys(values[self.kind]) if v != own]


def places_of(call: CallRecipe) -> Iterator[Place]:
    """Yield the properties of all arguments of ``call`` that can be changed."""
    for name, value in call.arguments.items():
        many = isinstance(value, tuple)
        if many:
            yield Place(name, Property.COUNT)
        one = (value[0] if value else None) if many else value
        if isinstance(one, TensorRecipe):
            yield Place(name, Property.DTYPE)
            yield Place(name, Property.RANK)
            yield from (Place(name, Property.SIZE, axis) for axis in range(len(one.shape)))
            yield Place(name, Property.VALUES)
        elif type(one) in (int, float):
            yield Place(name, Property.NUMBER)


def whole_values_of(call: CallRecipe) -> list[Place]:
    """Return the values of each tensor of whole numbers of ``call``, which may be indices."""
    places = [p for p in places_of(call) if p.kind is Property.VALUES]
    return [p for p in places if first_tensor(call, p).dtype.startswith(("int", "uint"))]


def first_tensor(call: CallRecipe, place: Place) -> TensorRecipe:
    """Return the tensor, or the first one of the list, that has the property ``place``."""
    value = call.arguments[place.name]
    one: TensorRecipe = value[0] if isinstance(value, tuple) else value
    return one


def _with_rank(t: TensorRecipe, rank: int) -> TensorRecipe:
    """Return a recipe like ``t`` with another number of dims. New ones have the size of the last, or 2 if that is too
    large for so many of them.
    """
    more = (*t.shape, *(t.shape[-1:] or (2,)) * 6)[:rank]
    return t.reshaped(more if math.prod(more) <= _MOST_OF_MORE_DIMS else (*t.shape, *(2,) * 6)[:rank])


def _with_size(t: TensorRecipe, axis: int, size: int) -> TensorRecipe:
    """Return a recipe like ``t`` with another size of one dim. Recipes in lists may have fewer dims."""
    return t.reshaped((*t.shape[:axis], size, *t.shape[axis + 1 :])) if axis < len(t.shape) else t


def _with_count(members: tuple[ArgumentRecipe, ...], count: int) -> tuple[ArgumentRecipe, ...]:
    """Return the first ``count`` of ``members``, the last of which is repeated where there are fewer."""
    return (*members, *members[-1:] * count)[:count]


def _small_numbers(call: CallRecipe) -> list[int]:
    """Return the numbers among the arguments of ``call`` that may be sizes."""
    values = [v for value in call.arguments.values() for v in (value if isinstance(value, tuple) else (value,))]
    return [v for v in values if type(v) is int and 0 < v <= _MOST_SIZE]


def _counts(call: CallRecipe) -> list[int]:
    """Return the numbers of members of the lists among the arguments of ``call``."""
    return [len(v) for v in call.arguments.values() if isinstance(v, tuple)]
