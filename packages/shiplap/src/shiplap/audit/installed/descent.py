"""A walk from refusal to refusal: each step changes the argument that the last message is about."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from shiplap.audit.installed.conditions import calls_that_meet
from shiplap.audit.installed.places import Place, Property, places_of
from shiplap.audit.installed.recipes import CallRecipe
from shiplap.audit.installed.refusals import dtypes_in, numbers_in, quotes, ranks_in, without_time

_MOST_STEPS = 40
_MOST_OTHERS = 8  # values of one property that are tried in one step

# Makes a call that was made from another one. Returns the refusal, "" for a call that was taken, or None for a call
# that is not made.
Attempt = Callable[[CallRecipe, CallRecipe], str | None]


@dataclass
class Descent:
    """A walk that begins with a refused call. ``attempt`` makes a call, and ``is_open()`` returns whether there is time
    for more.

    Most checks of an op say what they have got, and not of which argument. So one property of one argument after the
    other is set to a mark, a value that nothing else has. If the next message has the mark in place of the old value,
    it quotes this property, which then takes the values that the message names. Other properties on which the message
    depends take common values until the message is new.
    """

    attempt: Attempt
    is_open: Callable[[], bool]
    random: random.Random
    _seen: set[str] = field(default_factory=set)

    def walk(self, call: CallRecipe, refusal: str) -> tuple[CallRecipe, str]:
        """Return the call to which the walk from ``call`` leads, which was refused by the message ``refusal``, and its
        refusal, which is empty if it was taken.
        """
        for _ in range(_MOST_STEPS):
            self._seen.add(without_time(refusal))
            made = self._step(call, refusal) if refusal and self.is_open() else None
            if made is None:
                break
            call, refusal = made
        return call, refusal

    def _step(self, call: CallRecipe, refusal: str) -> tuple[CallRecipe, str] | None:
        """Return a call that differs from ``call`` in one property that its ``refusal`` is about, and the refusal of
        that call, or None if no change leads to a new one.
        """
        for meeting in calls_that_meet(refusal, call):
            text = self.attempt(meeting, call)
            if text is not None and (not text or without_time(text) not in self._seen):
                return meeting, text
        loose = []
        for place in self._ordered(call, refusal):
            mark = place.mark(call, refusal)
            if mark is None:
                continue
            text = self.attempt(place.with_value(call, mark), call)
            if text and quotes(without_time(refusal), without_time(text), place.value(call), mark):
                return self._replaced(place, call, refusal, quoted=True)
            if text and without_time(text) != without_time(refusal):
                loose.append(place)
            if not self.is_open():
                return None
        named = [p for p in places_of(call) if _is_named(p, refusal) and p not in loose]
        values = [p for p in places_of(call) if p.kind is Property.VALUES and p not in named]
        for group in (named, loose, values):
            self.random.shuffle(group)
            for place in group:
                made = self._replaced(place, call, refusal)
                if made is not None or not self.is_open():
                    return made
        return None

    def _ordered(self, call: CallRecipe, refusal: str) -> list[Place]:
        """Return the properties of ``call``. Those of arguments that ``refusal`` names come first, and then those of
        the kinds that it is about.
        """
        about = {
            Property.DTYPE: bool(dtypes_in(refusal)),
            Property.RANK: bool(ranks_in(refusal)) or "dim" in refusal,
            Property.SIZE: bool(numbers_in(refusal)),
        }
        return sorted(places_of(call), key=lambda p: (not _is_named(p, refusal), not about.get(p.kind, False)))

    def _replaced(
        self, place: Place, call: CallRecipe, refusal: str, *, quoted: bool = False
    ) -> tuple[CallRecipe, str] | None:
        """Return a copy of ``call`` with another value of ``place``, and its refusal. If ``refusal`` has ``quoted`` the
        property, it is the first value that another message follows, or the first one that was tried, since the next
        argument may be refused by an equal message. If not, the message is one that this walk has not seen, and None is
        returned if there is none.
        """
        old, first, own = place.value(call), None, without_time(refusal)
        for value in place.others(call, refusal)[:_MOST_OTHERS]:
            made = place.with_value(call, value)
            text = self.attempt(made, call)
            if text is not None:
                last = without_time(text)
                is_other = last not in (own, "") and not quotes(own, last, old, value)
                if not text or (is_other if quoted else last not in self._seen):
                    return made, text
                first = first or (made, text)
            if not self.is_open():
                break
        return first if quoted else None


def _is_named(place: Place, refusal: str) -> bool:
    """Return whether the message ``refusal`` names the argument of ``place``."""
    return bool(re.search(rf"\b{re.escape(place.name)}\b", refusal))
