"""Verify a candidate against the reference, on samples with the sizes of the call that is being compiled."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from shiplap.inductor import proof_cache
from shiplap.inductor.bound_call import Call
from shiplap.inductor.fusion_choice import Verdict
from shiplap.inductor.template_candidate import TemplateCandidate
from shiplap.sampling.case import Case
from shiplap.sampling.compare import close, reduction
from shiplap.sampling.run import last_line, needs_builder, reference, reference64
from shiplap.sampling.samples import Samples

SEED = 20
WIDE = 2e10  # operations of a reference in float64 that a compilation may cost; above that its own precision has to do


def sample(call: Call, seed: int = SEED) -> Case:
    """Return arguments with the sizes, scalars and dtypes of ``call``, drawn from the declaration."""
    return Samples(call.op, seed, str(call.device)).build(call.recipe)


def prove(candidate: TemplateCandidate, seeds: tuple[int, ...] = (SEED, SEED + 1)) -> Verdict:
    """Return the verdict on a candidate: ``ok`` if it agrees with the reference on two samples.

    The inputs are not degenerate, and the outputs are poisoned before. An equal candidate for an equal call has the
    same verdict.
    """
    verdict = proof_cache.known(candidate)
    if verdict is None:
        verdict = _proven(candidate, seeds)
        proof_cache.remember(candidate, verdict)
    return verdict


def _proven(candidate: TemplateCandidate, seeds: tuple[int, ...]) -> Verdict:
    call = candidate.call
    if needs_builder(call.op):
        return Verdict(candidate.label, "refused", "integers that mean something, and no @op.samples to draw them")
    with torch.no_grad(), warnings.catch_warnings():
        # The user did not write the calls of a proof, so their warnings would only confuse.
        warnings.simplefilter("ignore")
        for seed in seeds:
            case = sample(call, seed)
            try:
                outs = candidate.prepare(case.fresh())()
                _synchronize(call)
            except Exception as e:
                return Verdict(candidate.label, "broken", last_line(e))
            if problem := _compare(call, case, outs):
                return Verdict(candidate.label, "wrong", f"{problem}, seed {seed}, {case.label}")
    return Verdict(candidate.label, "ok")


def _compare(call: Call, case: Case, outs: tuple[Tensor, ...]) -> str:
    sums = reduction(call.op.spec, case.env)
    own = reference(call.op, case.args)
    wide = reference64(call.op, case.args) if sums.terms * own[0].numel() <= WIDE else _exact(own)
    return close(outs, own, wide, sums).problem


def _exact(own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in own)


def _synchronize(call: Call) -> None:
    if call.device.type != "cpu":
        torch.accelerator.synchronize()
