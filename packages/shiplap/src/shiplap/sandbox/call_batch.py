"""Several calls in one request, prepared on some values and run on others.

An exchange of messages takes much longer than a small kernel. A batch divides that time among as many calls as needed.
Each call has values and memory of its own, and each result is compared.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from shiplap.sandbox.candidate import (
    INVALID_REPLY_ERRORS,
    CandidateError,
    ExpectedEffects,
    MappedArguments,
    TargetProcess,
)
from shiplap.sandbox.protocol import ArgumentArena, printable_text
from shiplap.sandbox.supervisor import RequestTime

Args = Sequence[Any]
_batch_numbers = count(1)


class UnsupportedArguments(Exception):
    """Raised when the callable does not support these arguments, which is no fault of the candidate."""


@dataclass(frozen=True)
class BatchRun:
    """The times of one run of a batch: the measured one, and the seconds by the clock of the process."""

    took: RequestTime
    claimed: float


class CallBatch:
    """A context with calls that a process has prepared, on arguments in memory that both sides share.

    ``which`` names the callable. With ``blank``, the arguments hold zeros, for callables that do not read them while
    they are prepared. Raises Wrong, and Unsupported if the callable declines the arguments.
    """

    def __init__(
        self, witness: TargetProcess, which: Mapping[str, Any], sets: Sequence[Args], *, blank: bool = False
    ) -> None:
        self.witness, self.sets = witness, sets
        self._number = next(_batch_numbers)
        # ``fill`` repeats this layout, so that new values lie where the old ones did.
        self._layout = secrets.randbits(62)
        arena = ArgumentArena(self._layout)
        packed = [arena.pack(list(args)) for args in sets]
        self._handle = arena.make() if blank else arena.write()
        self._given = [MappedArguments.of(self._handle, each) for each in packed]
        try:
            message = {"do": "prepare", "batch": self._number, "kept": sorted(witness.batches), "which": dict(which)}
            _raise_for_reply(witness.request({**message, "sets": packed}, self._handle)[0])
            witness.batches.add(self._number)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CallBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file of the arguments. The process releases its memory with the next batch."""
        self.witness.batches.discard(self._number)
        os.close(self._handle)

    def fill(self, sets: Sequence[Args]) -> None:
        """Write other values into the shared arguments, without a message to the process."""
        arena = ArgumentArena(self._layout)
        for args in sets:
            arena.pack(list(args))
        arena.write(self._handle)
        self.sets = sets

    def run_calls(self, expected: Sequence[ExpectedEffects] | None = None) -> BatchRun:
        """Run each call once, and compare all results with ``expected``. Raises Wrong."""
        self.witness.forget_results()
        reply, took = self.witness.request({"do": "go", "batch": self._number})
        _raise_for_reply(reply)
        try:
            claimed, calls = _claimed_seconds(reply), reply["calls"]
            if len(calls) != len(self.sets):
                raise ValueError("not one answer a call")
            if expected is not None:
                self._compare_calls(calls, expected)
        except INVALID_REPLY_ERRORS as e:
            raise CandidateError("answer", f"an answer that is not valid: {type(e).__name__}") from None
        return BatchRun(took, claimed)

    def _compare_calls(self, calls: Any, expected: Sequence[ExpectedEffects]) -> None:
        """Compare the results of all calls. Raises Wrong with the number of the call."""
        if not expected:
            return
        pieces = self.witness.pieces(self._given[0])  # one file holds the arguments of all calls
        for number, rows in enumerate(zip(calls, self.sets, expected, self._given, strict=True)):
            try:
                self.witness.examine(*rows, pieces)
            except CandidateError as e:
                raise CandidateError(e.check, e.evidence, number) from None

    def sample(self, repeats: int) -> BatchRun:
        """Run the first call ``repeats`` times on the same values, without a comparison. Raises Wrong."""
        reply, took = self.witness.request({"do": "sample", "batch": self._number, "repeats": repeats})
        _raise_for_reply(reply)
        try:
            return BatchRun(took, _claimed_seconds(reply))
        except INVALID_REPLY_ERRORS as e:
            raise CandidateError("answer", f"an answer that is not valid: {type(e).__name__}") from None


def _raise_for_reply(reply: Mapping[str, Any]) -> None:
    """Raise Unsupported or Wrong for a reply that is a refusal or an error."""
    if "declined" in reply:
        raise UnsupportedArguments(printable_text(str(reply["declined"])[:400]))
    if "error" in reply:
        raise CandidateError("raised", str(reply["error"])[:400])


def _claimed_seconds(reply: Mapping[str, Any]) -> float:
    """Return the seconds that a reply claims. Raises ValueError for a value that is no time."""
    spent = float(reply["spent"])
    if not 0 <= spent < 1e15:
        raise ValueError("a time that is none")
    return spent * 1e-9
