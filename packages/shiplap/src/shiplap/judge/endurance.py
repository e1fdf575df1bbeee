"""What a candidate does in the long run: after many calls, with what it holds on to, and when its parameters change."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shiplap.judge.options import Pace
from shiplap.judge.problem import Args, Problem
from shiplap.judge.variants import CHANCE, Form
from shiplap.sandbox.candidate import Witness, Wrong
from shiplap.sandbox.proc_filesystem import Holds, holds

ENOUGH, EARLY = 100, 30  # calls of the smallest form; those after which it should have all that it needs
EACH, BYTES = 0.5, 32 << 20  # files or threads for each further call, and bytes in all, that are a leak


@dataclass
class Endurance:
    """Calls of one form, and what the process held after some of them.

    Attributes:
        made: calls.
        own: seconds of these.
    """

    problem: Problem
    witness: Witness
    pace: Pace
    made: int = 0
    own: float = 0.0
    _early: Holds = field(default_factory=Holds)

    def run(self, form: Form, args: Args, ends: float) -> None:
        """``ENOUGH`` calls on new values, as long as there is time. Raises Wrong."""
        while self.made < ENOUGH and time.monotonic() < ends:
            with self.pace.step(self.witness.prisoner):
                self.own += self.witness.call(args, self.problem.expect(form, args)).wall
                self.made += 1
                if self.made == EARLY:
                    self._early = self._held()
                args = self.problem.draw(form)
        if self.made == ENOUGH and (leak := leaked(self._early, self._held(), ENOUGH - EARLY)):
            raise Wrong("leaks", leak)

    def _held(self) -> Holds:
        """What the process holds, without the arguments and results that it was asked to keep."""
        now, (files, size) = holds(self.witness.prisoner.pid), self.witness.kept
        return Holds(now.files - files, now.threads, now.memory - size)


def leaked(before: Holds, after: Holds, calls: int) -> str:
    """What a process takes for each call and never gives back; empty if nothing is seen."""
    for what, first, last in (("files", before.files, after.files), ("threads", before.threads, after.threads)):
        if last - first >= EACH * calls:
            return f"{last - first} more {what} after {calls} more calls"
    if after.memory - before.memory > BYTES:
        return f"{(after.memory - before.memory) / 2**20:.0f} MiB more after {calls} more calls of the smallest shapes"
    return ""


def renewed(state: dict[str, Tensor], load: Callable[[dict[str, Tensor]], bool], *, zeros: bool = True) -> bool:
    """Give the parameters other values, in ``state`` and wherever ``load`` puts them, if that is possible.

    Each number is multiplied by one of its own, so that what has to be positive stays so. ``zeros``: whether a
    parameter that is nothing but zeros, as a bias often is at first, gets positive numbers.
    """
    other = {k: _other(v, zeros=zeros) for k, v in state.items()}
    if not other or not load(other):
        return False
    state.update(other)
    return True


def _other(value: Tensor, *, zeros: bool) -> Tensor:
    if not value.is_floating_point():
        return value.clone()
    rng = torch.Generator().manual_seed(CHANCE.getrandbits(62))
    if zeros and not value.any():
        return (0.1 + 0.4 * torch.rand(value.shape, generator=rng)).to(value.device, value.dtype)
    factor = 0.5 + torch.rand(value.shape, generator=rng, dtype=torch.float64)
    return (value.double() * factor.to(value.device)).to(value.dtype)
