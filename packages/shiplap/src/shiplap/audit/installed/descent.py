"""A walk from refusal to refusal: each step changes the argument that the last message is about."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from shiplap.audit.installed.conditions import calls_that_meet
from shiplap.audit.installed.places import Place, Property, first_tensor, places_of, whole_values_of
from shiplap.audit.installed.recipes import ArgumentRecipe, CallRecipe, TensorRecipe
from shiplap.audit.installed.refusals import EMPTY, dtypes_in, numbers_in, quotes, ranks_in, refusal_form, without_time

_MOST_STEPS = 40
_MOST_OTHERS = 8  # values of one property that are tried in one step
_FEW_OTHERS = 4  # of one on which the message does not seem to depend
_OUT_OF_RANGE = re.compile(r"out of (range|bounds)", re.IGNORECASE)
_LONG = 1024  # elements of a vector that a kernel follows beyond its end
_MANY = 16  # members of a list that it follows in this way
CRASHED = "the call ends the process"  # in place of a message

# Makes a call that was made from another one. Returns the refusal, "" for a call that was taken, CRASHED for one that
# has ended a process before, or None if the refusal says nothing about other arguments.
Attempt = Callable[[CallRecipe, CallRecipe], str | None]
Step = tuple[CallRecipe, str]  # a call, and its refusal


@dataclass
class Descent:
    """A walk that begins with a refused call. ``attempt`` makes a call, and ``is_open()`` returns whether there is time
    for more. ``moved`` is called with the call and the refusal to which each step leads. ``depths`` has the number of
    each form of a refusal, in the order in which they were met first: a check that was met late is likely to be one
    that an op makes late.

    Most checks of an op say what they have got, and not of which argument. So one property of one argument after the
    other is set to a mark, a value that nothing else has. If the next message has the mark in place of the old value,
    it quotes this property, which then takes the values that the message names. Other properties on which the message
    depends take common values until the message is new.
    """

    attempt: Attempt
    is_open: Callable[[], bool]
    random: random.Random
    moved: Callable[[CallRecipe, str], None] = lambda call, refusal: None
    depths: dict[str, int] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _forms: set[str] = field(default_factory=set)
    _last: str = ""  # the argument of the last quoted property

    def walk(self, call: CallRecipe, refusal: str) -> Step:
        """Return the call to which the walk from ``call`` leads, which was refused by the message ``refusal``, and its
        refusal, which is empty if it was taken.
        """
        for _ in range(_MOST_STEPS):
            self._seen.add(without_time(refusal))
            self._forms.add(refusal_form(without_time(refusal)))
            self._depth(refusal)
            made = self._step(call, refusal) if refusal and self.is_open() else None
            if made is None:
                break
            call, refusal = made
            self.moved(call, refusal)
        return call, refusal

    def _step(self, call: CallRecipe, refusal: str) -> Step | None:
        """Return a call that differs from ``call`` in one property that its ``refusal`` is about, and the refusal of
        that call, or None if no change leads to a new one.
        """
        if refusal == CRASHED:
            return self._survivor(call)
        for meeting in calls_that_meet(refusal, call):
            text = self._made(meeting, call)
            if text is not None and (not text or without_time(text) not in self._seen):
                return meeting, text
        loose, passed, made = self._marked(call, refusal)
        if made is not None or not self.is_open():
            return made
        for group, most in self._groups(call, refusal):
            made = self._changed(group, most, call, refusal, follows=True)
            if made is not None or not self.is_open():
                return made
        # What follows a mark may be an earlier check, which it fails, or a later one.
        if passed is not None:
            return passed
        values = whole_values_of(call)
        rest = [p for p in self._ordered(call, refusal) if p not in (*loose, *values)]
        self.random.shuffle(loose)
        for group, most in ((loose, _MOST_OTHERS), (values, _MOST_OTHERS), (rest, _FEW_OTHERS)):
            made = self._changed(group, most, call, refusal)
            if made is not None or not self.is_open():
                return made
        return None

    def _survivor(self, call: CallRecipe) -> Step | None:
        """Return a copy of ``call`` that does not end the process, and its refusal, or None. An op that has passed its
        checks may follow indices and offsets, which 0 and 1 are likely to fit.
        """
        for made in _milder_calls(call):
            text = self._made(made, call)
            if text is not None and text != CRASHED:
                return made, text
        return None

    def _groups(self, call: CallRecipe, refusal: str) -> Iterator[tuple[list[Place], int]]:
        """Yield groups of properties of ``call`` about which the words of ``refusal`` are, and the number of values of
        each that are tried.
        """
        ordered = self._ordered(call, refusal)
        yield [p for p in ordered if p.kind is Property.RANK], len(ranks_in(refusal))
        yield [p for p in ordered if p.kind is Property.DTYPE], len(dtypes_in(refusal))
        yield [p for p in ordered if _is_named(p, refusal)], _MOST_OTHERS
        if _OUT_OF_RANGE.search(refusal):
            yield whole_values_of(call), _MOST_OTHERS

    def _marked(self, call: CallRecipe, refusal: str) -> tuple[list[Place], Step | None, Step | None]:
        """Set each property of ``call`` to a mark. Return those on which the message ``refusal`` depends, the first
        marked call that another check refuses, or None, and the step that follows from the first property that the
        message quotes, or None.
        """
        loose, passed = list[Place](), None
        for place in self._ordered(call, refusal):
            mark = place.mark(call, refusal)
            if mark is None:
                continue
            marked = place.with_value(call, mark)
            text = self._made(marked, call)
            if text == "":
                return loose, passed, (marked, text)
            if quotes(without_time(refusal), without_time(text or ""), place.value(call), mark):
                made = self._replaced(place, call, refusal, _MOST_OTHERS, quoted=True)
                if made is not None:
                    self._last = place.name
                    return loose, passed, made
            if text and without_time(text) != without_time(refusal):
                loose.append(place)
                passed = passed or ((marked, text) if self._is_new(text, mark, refusal) else None)
            if not self.is_open():
                break
        return loose, passed, None

    def _changed(
        self, places: list[Place], most: int, call: CallRecipe, refusal: str, *, follows: bool = False
    ) -> Step | None:
        """Return a copy of ``call`` with another value of one of ``places``, and its refusal, or None. ``most`` values
        of each are tried. If ``follows`` is true, a call that ends the process is one, as if the op had gone on.
        """
        made = None
        for place in places:
            other = self._replaced(place, call, refusal, most, follows=follows)
            # A message that has only other numbers, or that of an earlier check, leads less far.
            if not self.is_open() or (other and self._is_new(other[1], place.value(other[0]), refusal)):
                return other or made
            made = other if other and (made is None or other[1] == CRASHED) else made
        return made

    def _made(self, call: CallRecipe, source: CallRecipe) -> str | None:
        """Make ``call``, and return what ``attempt`` returns."""
        refusal = self.attempt(call, source)
        if refusal and refusal != CRASHED:
            self._depth(refusal)
        return refusal

    def _depth(self, refusal: str) -> int:
        """Return how many forms of refusals were met before that of ``refusal``."""
        return self.depths.setdefault(refusal_form(without_time(refusal)), len(self.depths))

    def _is_new(self, refusal: str, value: str | int, before: str) -> bool:
        """Return whether a change of a property to ``value`` has led further, where ``refusal`` follows on the message
        ``before``: it is empty, or no call of this walk was refused by the check from which it comes, which was not met
        before that of ``before``. An earlier check of the op that the change fails quotes the ``value``. A call that
        ends the process may have done so in any place.
        """
        if not refusal or refusal == CRASHED or before == EMPTY:
            return not refusal
        quoted = value in (*numbers_in(refusal), *dtypes_in(refusal))
        known = quoted or refusal_form(without_time(refusal)) in self._forms
        return not known and self._depth(refusal) > self._depth(before)

    def _ordered(self, call: CallRecipe, refusal: str) -> list[Place]:
        """Return the properties of ``call``. Those of arguments that ``refusal`` names come first, and then those of
        the kinds that it is about. Of each kind, those of the last quoted argument and of the next ones come first, as
        most ops check one argument after the other.
        """
        names = [*call.arguments]
        last = names.index(self._last) if self._last in names else 0
        about = {
            Property.DTYPE: bool(dtypes_in(refusal)),
            Property.RANK: bool(ranks_in(refusal)) or "dim" in refusal,
            Property.SIZE: bool(numbers_in(refusal)),
        }
        turn = {name: (at - last) % len(names) for at, name in enumerate(names)}
        return sorted(
            places_of(call), key=lambda p: (not _is_named(p, refusal), not about.get(p.kind, False), turn[p.name])
        )

    def _replaced(
        self, place: Place, call: CallRecipe, refusal: str, most: int, *, quoted: bool = False, follows: bool = False
    ) -> Step | None:
        """Return a copy of ``call`` with one of ``most`` other values of ``place``, and its refusal: that of the first
        value for which another check of the op refuses the call. If ``refusal`` has ``quoted`` the property, this may
        be the same check of the next argument, and None is returned if there is no such value. If not, it is then the
        first value whose message this walk has not seen, or one that ends the process if ``follows`` is true.
        """
        old, first, own = place.value(call), None, without_time(refusal)
        for value in place.others(call, refusal)[:most]:
            made = place.with_value(call, value)
            text = self._made(made, call)
            if text is not None:
                last = without_time(text)
                is_other = last not in (own, "") and not quotes(own, last, old, value)
                if not text or (is_other if quoted else self._is_new(text, value, refusal)):
                    return made, text
                usable = not quoted and own != EMPTY and last not in self._seen and (follows or text != CRASHED)
                first = first or (made, text) if usable else first
            if not self.is_open():
                break
        return first


def _milder_calls(call: CallRecipe) -> Iterator[CallRecipe]:
    """Yield copies of ``call`` that are less likely to end the process. Vectors of floats have as many elements as a
    kernel is likely to follow, or lists of numbers and of None have as many members. Whole numbers are 0 or 1, or
    offsets rise by 1, and one vector of them is longer by 1.
    """
    places, whole = [*places_of(call)], whole_values_of(call)
    lists = [p for p in places if p.kind is Property.COUNT and not any(n == p.name for n, _ in call.tensors())]
    listed = [_with_values(call, dict.fromkeys(lists, _MANY))] if lists else []
    vectors = [p for p in places if p.kind is Property.SIZE and len(first_tensor(call, p).shape) == 1]
    longer = call
    for place in (p for p in vectors if "float" in first_tensor(call, p).dtype and first_tensor(call, p).shape[0] > 1):
        longer = place.with_value(longer, _LONG)  # one element may be a number
    ones = {p: 1 for p in places if p.kind is Property.NUMBER}
    zeros = dict.fromkeys(whole, 0)
    for values in ({}, zeros, {**zeros, **ones}, {**dict.fromkeys(whole, 1), **ones}):
        yield from (_with_values(made, values) for made in (longer, call, *listed))
    offsets = {p.name: first_tensor(call, p).shape[0] for p in vectors if first_tensor(call, p).last is not None}
    steady = _with_values(longer, zeros)
    for more in (None, *offsets):
        made = steady
        for name, size in offsets.items():
            made = made.with_argument(name, _rising(made.arguments[name], size + (name == more)))
        yield made


def _with_values(call: CallRecipe, values: Mapping[Place, int]) -> CallRecipe:
    """Return a copy of ``call`` in which each property of ``values`` has its value."""
    for place, value in values.items():
        call = place.with_value(call, value)
    return call


def _rising(value: ArgumentRecipe, size: int) -> ArgumentRecipe:
    """Return offsets like ``value``, which is a recipe or a list of them, with the values from 0 to ``size - 1``."""
    if isinstance(value, tuple):
        return tuple(_rising(v, size) for v in value)
    return replace(value, shape=(size,), values=tuple(range(size))) if isinstance(value, TensorRecipe) else value


def _is_named(place: Place, refusal: str) -> bool:
    """Return whether the message ``refusal`` names the argument of ``place``, perhaps as words."""
    name = re.escape(place.name).replace("_", "[_ ]")
    return bool(re.search(rf"\b{name}\b", refusal, re.IGNORECASE))
