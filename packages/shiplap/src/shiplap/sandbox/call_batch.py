"""Several calls in one request: the process makes them ready on some values, and runs them on others.

One exchange of messages takes much longer than a small kernel. A batch shares it out over as many calls as are
needed, each with values and memory of its own, and every result is compared.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from shiplap.sandbox.candidate import NO_ANSWER, Expected, Given, Witness, Wrong
from shiplap.sandbox.protocol import Arena, plain
from shiplap.sandbox.supervisor import Took

Args = Sequence[Any]
_numbers = count(1)


class Unsupported(Exception):
    """Raised when what is judged does not support these arguments. It is not wrong."""


@dataclass(frozen=True)
class Spell:
    """One run of a batch: what it took by the referee's clock, and the seconds that the process claims for it."""

    took: Took
    claimed: float


class Batch:
    """A context with calls that a process holds ready, in memory that it shares with the referee.

    ``which`` tells the process what to call. ``blank``: without the values, for calls that do not look at them. Raises
    Wrong, and Unsupported where it says that it does not take these.
    """

    def __init__(
        self, witness: Witness, which: Mapping[str, Any], sets: Sequence[Args], *, blank: bool = False
    ) -> None:
        self.witness, self.sets = witness, sets
        self._number = next(_numbers)
        self._layout = secrets.randbits(62)
        arena = Arena(self._layout)
        packed = [arena.pack(list(args)) for args in sets]
        self._handle = arena.make() if blank else arena.write()
        self._given = [Given.of(self._handle, each) for each in packed]
        try:
            message = {"do": "prepare", "batch": self._number, "kept": sorted(witness.batches), "which": dict(which)}
            _believe(witness.request({**message, "sets": packed}, self._handle)[0])
            witness.batches.add(self._number)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back. The process lets go of it when it is given the next one."""
        self.witness.batches.discard(self._number)
        os.close(self._handle)

    def fill(self, sets: Sequence[Args]) -> None:
        """Put other values into the arguments, which the process is not told about."""
        arena = Arena(self._layout)
        for args in sets:
            arena.pack(list(args))
        arena.write(self._handle)
        self.sets = sets

    def go(self, expected: Sequence[Expected] | None = None) -> Spell:
        """Run each call once, and compare all results with ``expected``. Raises Wrong."""
        self.witness.forget()
        reply, took = self.witness.request({"do": "go", "batch": self._number})
        _believe(reply)
        try:
            claimed, calls = _seconds(reply), reply["calls"]
            if len(calls) != len(self.sets):
                raise ValueError("not one answer a call")
            if expected is not None:
                self._examine(calls, expected)
        except NO_ANSWER as e:
            raise Wrong("answer", f"an answer that is not valid: {type(e).__name__}") from None
        return Spell(took, claimed)

    def _examine(self, calls: Any, expected: Sequence[Expected]) -> None:
        if not expected:
            return
        pieces = self.witness.pieces(self._given[0])  # one file holds the arguments of all
        for number, rows in enumerate(zip(calls, self.sets, expected, self._given, strict=True)):
            try:
                self.witness.examine(*rows, pieces)
            except Wrong as e:
                raise Wrong(e.check, e.evidence, number) from None

    def sample(self, repeats: int) -> Spell:
        """Run the first call ``repeats`` times on the same values. Nothing is compared. Raises Wrong."""
        reply, took = self.witness.request({"do": "sample", "batch": self._number, "repeats": repeats})
        _believe(reply)
        try:
            return Spell(took, _seconds(reply))
        except NO_ANSWER as e:
            raise Wrong("answer", f"an answer that is not valid: {type(e).__name__}") from None


def _believe(reply: Mapping[str, Any]) -> None:
    """Raises Unsupported or Wrong for a reply that is a refusal or an error."""
    if "declined" in reply:
        raise Unsupported(plain(str(reply["declined"])[:400]))
    if "error" in reply:
        raise Wrong("raised", str(reply["error"])[:400])


def _seconds(reply: Mapping[str, Any]) -> float:
    spent = float(reply["spent"])
    if not 0 <= spent < 1e15:
        raise ValueError("a time that is none")
    return spent * 1e-9
