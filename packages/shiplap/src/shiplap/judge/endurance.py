"""Checks of a candidate over many calls: right results, leaks, and changed parameters."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shiplap.judge.options import StepDeadline
from shiplap.judge.problem import Args, JudgeProblem
from shiplap.judge.variants import SECRET_RANDOM, InputForm
from shiplap.sandbox.candidate import CandidateError, TargetProcess
from shiplap.sandbox.proc_filesystem import ProcessResources, read_process_resources

ENOUGH, EARLY = 100, 30  # calls in all, and calls after which lazy allocations are over
EACH, BYTES = 0.5, 32 << 20  # a leak: files or threads for each further call, or bytes in all


@dataclass
class Endurance:
    """A series of calls of one form, and the resources that the process held early in the series.

    Attributes:
        made: the number of calls so far.
        own: the seconds of these calls.
    """

    problem: JudgeProblem
    witness: TargetProcess
    pace: StepDeadline
    made: int = 0
    own: float = 0.0
    _early: ProcessResources = field(default_factory=ProcessResources)

    def run(self, form: InputForm, args: Args, ends: float) -> None:
        """Call the candidate ``ENOUGH`` times on new values, or until ``ends``. Raises Wrong."""
        while self.made < ENOUGH and time.monotonic() < ends:
            with self.pace.step(self.witness.prisoner):
                self.own += self.witness.call(args, self.problem.expect_effects(form, args)).wall
                self.made += 1
                # Allocators, caches and thread pools are filled by now, so later growth is a leak.
                if self.made == EARLY:
                    self._early = self._held_resources()
                args = self.problem.draw(form)
        if self.made == ENOUGH and (leak := describe_leak(self._early, self._held_resources(), ENOUGH - EARLY)):
            raise CandidateError("leaks", leak)

    def _held_resources(self) -> ProcessResources:
        """Return the resources of the process, without the arguments and results that it keeps on request."""
        now, (files, size) = read_process_resources(self.witness.prisoner.pid), self.witness.kept
        return ProcessResources(now.files - files, now.threads, now.memory - size)


def describe_leak(before: ProcessResources, after: ProcessResources, calls: int) -> str:
    """Return a description of the resource that grows with each call, or an empty text."""
    for what, first, last in (("files", before.files, after.files), ("threads", before.threads, after.threads)):
        if last - first >= EACH * calls:
            return f"{last - first} more {what} after {calls} more calls"
    if after.memory - before.memory > BYTES:
        return f"{(after.memory - before.memory) / 2**20:.0f} MiB more after {calls} more calls of the smallest shapes"
    return ""


def change_parameters(
    state: dict[str, Tensor], load: Callable[[dict[str, Tensor]], bool], *, zeros: bool = True
) -> bool:
    """Change the parameters in ``state``, and load them with ``load``. Return False if that is not
    possible.

    Each number is multiplied by a random factor of its own, so that positive numbers stay positive. With ``zeros``, a
    parameter of zeros only, as a bias often is at first, gets positive numbers.
    """
    other = {k: _scaled_parameter(v, zeros=zeros) for k, v in state.items()}
    if not other or not load(other):
        return False
    state.update(other)
    return True


def _scaled_parameter(value: Tensor, *, zeros: bool) -> Tensor:
    """Return random values of the same signs and about the same sizes as those of a parameter."""
    if not value.is_floating_point():
        return value.clone()
    rng = torch.Generator().manual_seed(SECRET_RANDOM.getrandbits(62))
    if zeros and not value.any():
        return (0.1 + 0.4 * torch.rand(value.shape, generator=rng)).to(value.device, value.dtype)
    factor = 0.5 + torch.rand(value.shape, generator=rng, dtype=torch.float64)
    return (value.double() * factor.to(value.device)).to(value.dtype)
