"""What a call has to do, what it took, and what is wrong with it, by what its process tells of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shiplap.sampling.compare import Difference
from shiplap.sandbox.protocol import overlaps, plain


class Wrong(Exception):
    """Raised for what a candidate did wrong, with the check that found it, and in which call of a batch."""

    def __init__(self, check: str, evidence: str, call: int = -1) -> None:
        super().__init__(plain(evidence))
        self.check, self.evidence, self.call = check, plain(evidence), call


class OutOfReach(Exception):
    """Raised where a locked process cannot use the device: nobody's code is at fault."""


@dataclass(frozen=True)
class Expected:
    """The effects of the reference on one draw of arguments: its results, then the arguments that it writes.

    Attributes:
        own: the effects in the reference's own precision.
        against: what is wrong with other effects, compared with these.
        changed: which tensor arguments the reference writes.
        aliased: whether a result may share memory with an argument.
        nested: how the results lie in each other (``wire.nested``); empty where that is not compared.
        overlapping: whether elements of a result may lie in the same place.
    """

    own: Sequence[Tensor]
    against: Callable[[Sequence[Tensor]], Difference]
    changed: tuple[int, ...] = ()
    aliased: bool = False
    nested: str = ""
    overlapping: bool = True


@dataclass(frozen=True)
class Call:
    """One call: seconds by the referee's clock (see ``Took``), by the clock of the process, and ``late`` on a GPU."""

    wall: float
    quiet: float
    spent: float
    late: float
    error: float = 0.0


def text_of(told: Any) -> str:
    """An error as it was told; what is no text may be nested too deep to be shown."""
    return told if isinstance(told, str) else "an error that is no text"


def short(name: Any) -> str:
    return name[:80] if isinstance(name, str) else "what is no name"


def of_a_process(reply: Mapping[str, Any]) -> None:
    """Raises Wrong for what else a process was seen to do around a call whose clock, or list, is its own."""
    if reply.get("raced"):
        raise Wrong("streams", "a result was not complete when the call's own stream was done")
    if left := reply.get("left"):
        raise Wrong("state", f"it leaves changed between its calls: {left}"[:300])
    if reply.get("threads"):
        raise Wrong("threads", "threads that it started run between its calls")


def as_it_should_lie(reply: Mapping[str, Any], expected: Expected) -> None:
    """Raises Wrong for results in other containers, and for results of which no element can be changed alone."""
    told = reply.get("nested", expected.nested)  # a device's answer has none
    if expected.nested and told != expected.nested:
        raise Wrong("results", f"results that lie as {str(told)[:80]}, expected {expected.nested[:80]}")
    for number, place in enumerate(reply["outs"] if not expected.overlapping else ()):
        if "tensor" in place and overlaps(place["tensor"]["shape"], place["tensor"]["stride"]):
            raise Wrong("results", f"elements of result {number} lie in the same place")
