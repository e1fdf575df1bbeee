"""The expected effects of a call, its outcome, and checks of the reply of a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shiplap.sampling.compare import Difference
from shiplap.sandbox.protocol import elements_overlap, printable_text


class CandidateError(Exception):
    """Raised for a fault of a candidate: the check that found it, the evidence, and the number of
    the call in a batch.
    """

    def __init__(self, check: str, evidence: str, call: int = -1) -> None:
        super().__init__(printable_text(evidence))
        self.check, self.evidence, self.call = check, printable_text(evidence), call


class DeviceUnavailable(Exception):
    """Raised if a locked process cannot use the device, which is no fault of the candidate."""


@dataclass(frozen=True)
class ExpectedEffects:
    """The effects of the reference on one draw of arguments: its results, then the arguments that it changes.

    Attributes:
        own: the effects in the reference's own precision.
        against: returns the difference between other effects and these.
        changed: the indices of the tensor arguments that the reference changes.
        aliased: whether a result may share memory with an argument.
        nested: the structure of the results in their containers. Empty if that is not compared.
        overlapping: whether elements of a result may share memory with each other.
    """

    own: Sequence[Tensor]
    against: Callable[[Sequence[Tensor]], Difference]
    changed: tuple[int, ...] = ()
    aliased: bool = False
    nested: str = ""
    overlapping: bool = True


@dataclass(frozen=True)
class CallOutcome:
    """The times and the error of one call.

    Attributes:
        wall, quiet: seconds by the clock of the process that judges (see ``Took``).
        spent: seconds by the clock of the sandboxed process.
        late: on a GPU, the seconds for which other streams worked after the call's own stream was done.
        error: the largest error in units of the tolerance.
    """

    wall: float
    quiet: float
    spent: float
    late: float
    error: float = 0.0


def error_text(told: Any) -> str:
    """Return the text of a reported error. A value that is no text is not printed, since it may be nested too deep."""
    return told if isinstance(told, str) else "an error that is no text"


def shorten_name(name: Any) -> str:
    """Return at most 80 characters of a reported name."""
    return name[:80] if isinstance(name, str) else "what is no name"


def check_process_state(reply: Mapping[str, Any]) -> None:
    """Raise Wrong for other work of the process around a call: on streams, in threads, or on its state."""
    if reply.get("raced"):
        raise CandidateError("streams", "a result was not complete when the call's own stream was done")
    if left := reply.get("left"):
        raise CandidateError("state", f"it leaves changed between its calls: {left}"[:300])
    if reply.get("threads"):
        raise CandidateError("threads", "threads that it started run between its calls")


def check_result_layout(reply: Mapping[str, Any], expected: ExpectedEffects) -> None:
    """Raise Wrong for results in other containers, and for results whose elements share memory."""
    told = reply.get("nested", expected.nested)  # replies of calls on a GPU lack this key
    if expected.nested and told != expected.nested:
        raise CandidateError("results", f"results that lie as {str(told)[:80]}, expected {expected.nested[:80]}")
    for number, place in enumerate(reply["outs"] if not expected.overlapping else ()):
        if "tensor" in place and elements_overlap(place["tensor"]["shape"], place["tensor"]["stride"]):
            raise CandidateError("results", f"elements of result {number} lie in the same place")
