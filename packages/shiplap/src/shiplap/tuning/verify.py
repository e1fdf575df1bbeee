"""Verify a candidate against the reference before it is timed.

The candidate runs in poisoned memory, on two draws, on a small one, and at the edges of the bucket of the choice.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from shiplap.dispatch.launch import poisoned_workspace
from shiplap.errors import error_line
from shiplap.sampling.case import SampleCase, tensors_among
from shiplap.sampling.compare import compare_within_tolerance, derive_reduction
from shiplap.sampling.run import op_effects, reference_effects, reference_effects64
from shiplap.sandbox.strided_memory import elements_overlap
from shiplap.tuning.candidate import Candidate, CandidateRefused
from shiplap.tuning.inputs import Inputs


@dataclass(frozen=True)
class VerifyOutcome:
    """The result of a verification.

    ``problem`` describes the first wrong result or exception, and is empty if the candidate is correct. If ``refused``
    is true, the candidate does not support the arguments of the call, and ``problem`` is its reason. ``fatal`` is true
    if the process can no longer use its device.
    """

    problem: str = ""
    refused: bool = False
    fatal: bool = False

    @property
    def ok(self) -> bool:
        """Whether the candidate is correct, that is, the verification found no wrong result, no exception and no
        refusal.
        """
        return not self.problem


def verification_cases(inputs: Inputs, candidate: Candidate) -> list[SampleCase]:
    """Return the samples on which a candidate is verified.

    Two draws at the sizes of the call come first. A small sample, samples with unaligned addresses or unusual values,
    and samples at the smallest and largest sizes of the bucket (class of sizes) follow. A candidate that supports only
    the sizes of the call gets the two draws alone.
    """
    if candidate.fixed:
        return [*inputs.real]
    return [*inputs.real, *([inputs.small] if inputs.small else []), *inputs.odd, *inputs.edges]


class Verifier:
    """A comparison of candidates with the reference. The results of the reference are computed once and used for all
    candidates.
    """

    def __init__(self, inputs: Inputs) -> None:
        """Make a verifier for candidates on the arguments ``inputs``."""
        self.op, self.inputs = inputs.op, inputs
        self._references: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}

    def check(self, candidate: Candidate) -> VerifyOutcome:
        """Run ``candidate`` on every verification case and return the outcome.

        The outcome has the first wrong result or exception, or the candidate's refusal. It is empty if there is none.
        The candidate may refuse any case but the first two, which alone are like the call in sizes, layouts and values.
        """
        for number, case in enumerate(verification_cases(self.inputs, candidate)):
            other = number > 1  # of other sizes, addresses or values than the call, so that it may be refused
            try:
                problem = self._compare(candidate, number, case)
            except CandidateRefused as e:
                if other:
                    continue
                return VerifyOutcome(str(e), refused=True)
            except Exception as e:
                return VerifyOutcome(f"{error_line(e)} on {case.label}", fatal=is_device_lost(e))
            if problem:
                return VerifyOutcome(f"{problem} on {case.label}")
        return VerifyOutcome()

    def _compare(self, candidate: Candidate, number: int, case: SampleCase) -> str:
        """Run a candidate on the verification case ``number`` and return a message with its difference from the
        reference, or an empty string.

        Allocated memory is filled with a byte first, so that reads of uninitialised memory give wrong results. The
        second case (number 1) is written into the tensors of the first if possible, so that cached results are wrong.
        """
        from shiplap.tuning.poison_memory import (
            Poison,  # defining a function mode takes torch 80 ms: not when shiplap is imported
        )

        # A candidate that remembers results by address is wrong with the second draw in the tensors of the first.
        first = self.inputs.real[0] if number == 1 and fits_in_place(self.inputs.real[0], case) else None
        args = first.fresh() if first else case.fresh()
        # Memory that nobody wrote holds another byte in each case, which shows in results that depend on it.
        byte = (0xFF, 0x55, 0xAA)[number % 3]
        with torch.no_grad(), poisoned_workspace(byte):
            run = candidate.prepare(args)
            with nullcontext() if candidate.opaque else Poison(byte):
                if first:
                    run()
                    for t, new in zip(tensors_among(args), tensors_among(case.args), strict=True):
                        t.copy_(new)
                    run = candidate.prepare(args) if candidate.copies else run
                outs = tuple(run())
        wait_for_device(self.inputs.device)
        own, wide = self._reference(number, case)
        sums = derive_reduction(self.op.spec, case.env)
        return compare_within_tolerance(op_effects(self.op, args, outs), own, wide, sums, wide_sums=True).problem

    def _reference(self, number: int, case: SampleCase) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return two tuples with the effects of the reference on the case ``number``, computed in the case's dtypes and
        in float64. The effects are its results and the arguments that it writes to. They are computed once for each
        case.
        """
        if number not in self._references:
            with torch.no_grad():
                self._references[number] = (
                    reference_effects(self.op, case.args),
                    reference_effects64(self.op, case.args),
                )
        return self._references[number]


def fits_in_place(first: SampleCase, second: SampleCase) -> bool:
    """Return whether the values of the sample ``second`` can be copied into the tensors of ``first``. Shapes and dtypes
    of the tensors and all other arguments must be equal, and no tensor may overlap itself in memory.
    """
    before, after = tensors_among(first.args), tensors_among(second.args)
    other = [[v for v in case.args if not isinstance(v, (Tensor, list))] for case in (first, second)]
    alike = [(t.shape, t.dtype) for t in before] == [
        (t.shape, t.dtype) for t in after
    ] and first.graph_key == second.graph_key
    return alike and other[0] == other[1] and not any(elements_overlap(t.shape, t.stride()) for t in before)


def wait_for_device(device: str) -> None:
    """Wait until a CUDA device has done all its work, so that an error of a kernel is raised by this call. Do nothing
    for other devices.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def is_device_lost(e: BaseException) -> bool:
    """Return whether the text of the exception says that the process can no longer use its CUDA device, as after an
    illegal memory access.
    """
    text = f"{type(e).__name__}: {e}"
    return "CUDA error" in text or "AcceleratorError" in text or "unspecified launch failure" in text
