"""The options of a judgement, and the division of its time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shiplap.errors import error
from shiplap.sandbox.request_errors import Timeout
from shiplap.sandbox.supervisor import Bounds, SandboxedProcess

ONE_CALL_SHARE = 2 / 3  # share of the whole time that one call, which may compile, can take
ENDING_S, ENDING = 0.5, 0.04  # seconds, and share of the time, for ending all processes
PLANNED_SHARE = 0.9  # share of the time for planned work, since the last step may take longer than those before


@dataclass(frozen=True)
class JudgeOptions:
    """The options of :func:`judge`.

    Attributes:
        seconds: the time of the whole judgement, 60 s by default. The verdict comes within it, whatever the candidate
            does. Comparisons that are not made in this time make the verdict incomplete. The time in which a launcher
            imports for the first time what the candidate uses of torch, such as its compiler, does not count, nor that
            in which programs of the candidate, such as compilers, run while it is imported, up to two minutes.
        rounds: the largest number of timed batches of calls for each shape, 12 by default. Batches of 16 calls or more
            are timed 5 times. If time is short, there are at least 5 batches, or 3 for calls of more than 10 ms. Calls
            that are queued on a GPU are timed less often if their batches agree. Each call has new values.
        sizes: the sizes at which a declared op is timed, such as ``{"n": 4096}``. By default the two largest samples of
            the audit are timed.
        tolerance: a relative error that is accepted in addition to rounding, 0 by default.
        vary_shapes: whether the candidate must also be right for other shapes that the reference accepts.
        vary_layouts: whether it must also be right for memory that is not contiguous and for unaligned starts.
        compiled: whether ``torch.compile`` of the reference is timed, too.
        gradients: whether gradients are compared. If it is None, the default, they are compared if the candidate has
            some, and are required of an op that declares a gradient.
        timed: whether times are measured.
        device: the device of the arguments, ``"cpu"`` by default.
        bounds: the limits of the candidate's process. By default one call, which may compile, may take two thirds of
            ``seconds``, or 120 s if that is less. The process may use 8 GiB of memory more than at its start, and 32
            processes.
    """

    seconds: float = 60.0
    rounds: int = 12
    sizes: Sequence[dict[str, Any]] = ()
    tolerance: float = 0.0
    vary_shapes: bool = True
    vary_layouts: bool = True
    compiled: bool = False
    gradients: bool | None = None
    timed: bool = True
    device: str = "cpu"
    bounds: Bounds = field(default_factory=Bounds)

    def __post_init__(self) -> None:
        """Raise ``SL613`` for a number without a meaning. Write ``cpu`` for each index of it, which are one device."""
        if not (0 < self.seconds < math.inf and self.rounds >= 1 and 0 <= self.tolerance < math.inf):
            got = f"seconds={self.seconds}, rounds={self.rounds}, tolerance={self.tolerance}"
            raise error("SL613", where="judge", got=got, expected="finite numbers that are positive, or no tolerance")
        if self.device.startswith("cpu:"):
            object.__setattr__(self, "device", "cpu")


class StepDeadline:
    """The deadline of a stage that consists of steps.

    A step is not begun if it would probably end too late. The estimate of its time is the longest time that this
    process took for an earlier step. The time in which a sandboxed process works is not part of it, since the sandbox
    ends that process in time.
    """

    def __init__(self, last: float) -> None:
        """Set the deadline ``last`` (by ``time.monotonic``). The estimate of the first step is 0 s."""
        self.last, self.longest = last, 0.0

    @contextmanager
    def step(self, asked: SandboxedProcess | None = None) -> Iterator[None]:
        """Return a context manager for one step, which measures how long this process takes for it. The time in which
        the sandboxed process ``asked`` works does not count.

        If the step would end after the deadline, raise ``Timeout`` at once. It is expected to take as long as the
        longest step so far.
        """
        began, before = time.monotonic(), asked.answering if asked else 0.0
        if began + self.longest > self.last:
            raise Timeout("the time of the judgement is over")
        yield
        answering = asked.answering - before if asked else 0.0
        self.longest = max(self.longest, time.monotonic() - began - answering)


@dataclass(frozen=True)
class JudgeBudget:
    """The time for one judgement. ``began`` is its start by ``time.monotonic``, and ``seconds`` its length."""

    began: float
    seconds: float

    @property
    def ends(self) -> float:
        """The time (by ``time.monotonic``) after which no new work is planned."""
        return min(self.began + PLANNED_SHARE * self.seconds, self.last)

    @property
    def last(self) -> float:
        """The time (by ``time.monotonic``) at which the last process of the judgement must end."""
        return self.began + self.seconds - min(ENDING_S + ENDING * self.seconds, 0.5 * self.seconds)

    @property
    def one_call(self) -> float:
        """The seconds after which one call of the candidate counts as hanging and is stopped."""
        return ONE_CALL_SHARE * self.seconds

    def time_of_share(self, share: float) -> float:
        """Return the time (by ``time.monotonic``) at which ``share`` of the time from now to ``ends`` is over.
        ``share`` is a number from 0 to 1.
        """
        now = time.monotonic()
        return now + share * max(0.0, self.ends - now)
