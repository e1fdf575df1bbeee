"""A candidate against the reference, before anything is timed: in poisoned memory, on two draws, on a small one, and at
the edges of the bucket that it may be chosen for.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from shiplap.dispatch.launch import poisoned_workspace
from shiplap.sampling.case import Case
from shiplap.sampling.compare import close, reduction
from shiplap.sampling.run import effects, last_line, reference, reference64
from shiplap.tuning.candidate import Candidate, Refused
from shiplap.tuning.inputs import Inputs


@dataclass(frozen=True)
class Outcome:
    """``problem`` is empty when the candidate is right; ``refused`` when it takes other arguments only."""

    problem: str = ""
    refused: bool = False
    fatal: bool = False

    @property
    def ok(self) -> bool:
        return not self.problem


def cases_of(inputs: Inputs, candidate: Candidate) -> list[Case]:
    """Two draws at the sizes of the call, then a small odd one and the edges of the bucket, unless the candidate serves
    none but those sizes."""
    if candidate.fixed:
        return [*inputs.real]
    return [*inputs.real, *([inputs.small] if inputs.small else []), *inputs.edges]


class Verifier:
    """Holds the results of the reference, so that each is computed once for all candidates."""

    def __init__(self, inputs: Inputs) -> None:
        self.op, self.inputs = inputs.op, inputs
        self._references: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}

    def check(self, candidate: Candidate) -> Outcome:
        """Run ``candidate`` on every case. The first thing that is wrong with it."""
        for number, case in enumerate(cases_of(self.inputs, candidate)):
            other = number > 1  # of other sizes, which it may refuse
            try:
                problem = self._compare(candidate, number, case)
            except Refused as e:
                if other:
                    continue
                return Outcome(str(e), refused=True)
            except Exception as e:
                return Outcome(f"{last_line(e)} on {case.label}", fatal=is_fatal(e))
            if problem:
                return Outcome(f"{problem} on {case.label}")
        return Outcome()

    def _compare(self, candidate: Candidate, number: int, case: Case) -> str:
        from shiplap.tuning.poison_memory import (
            Poison,  # defining a function mode takes torch 80 ms: not when shiplap is imported
        )

        args = case.fresh()
        byte = (0xFF, 0x55, 0xAA)[number % 3]
        with torch.no_grad(), poisoned_workspace(byte):
            run = candidate.prepare(args)
            with nullcontext() if candidate.opaque else Poison(byte):
                outs = tuple(run())
        synchronize(self.inputs.device)
        own, wide = self._reference(number, case)
        sums = reduction(self.op.spec, case.env)
        return close(effects(self.op, args, outs), own, wide, sums, wide_sums=True).problem

    def _reference(self, number: int, case: Case) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        if number not in self._references:
            with torch.no_grad():
                self._references[number] = reference(self.op, case.args), reference64(self.op, case.args)
        return self._references[number]


def synchronize(device: str) -> None:
    """Wait for the device, so that an error of a kernel is raised here and not in the next one."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def is_fatal(e: BaseException) -> bool:
    """Whether the process can no longer use its device: illegal memory accesses and the like."""
    text = f"{type(e).__name__}: {e}"
    return "CUDA error" in text or "AcceleratorError" in text or "unspecified launch failure" in text
