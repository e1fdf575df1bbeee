"""Verify a candidate against the reference, on samples of the sizes at which the compiled graph may run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from shiplap.declare.code_digest import code_digest
from shiplap.errors import error_line
from shiplap.inductor.bound_call import LoweredCall
from shiplap.inductor.fusion_choice import CandidateVerdict
from shiplap.inductor.size_range import Sizes
from shiplap.inductor.template_candidate import TemplateCandidate
from shiplap.sampling.case import SampleCase, arguments_by_name
from shiplap.sampling.code_constants import find_template_constants, threshold_value_kind
from shiplap.sampling.compare import compare_within_tolerance, derive_reduction
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.run import needs_builder, reference_effects, reference_effects64
from shiplap.sampling.samples import Samples
from shiplap.sampling.work_estimate import on_one_thread
from shiplap.settings import settings
from shiplap.torch_private.inductor_lowering import evaluate_size, size_expression
from shiplap.tuning.key import Key
from shiplap.tuning.proof_cache import keep_proof, proof_key, read_proof

SEED = 20
SEEDS = (SEED, SEED + 1)  # of the samples that have the sizes of the call
WIDE = 2e10  # operations of a reference in float64 that a compilation may cost; above that its own precision has to do
ALONE = 1 << 25  # operations up to which one thread is faster than several that wait for each other
DRAWN, MOST = 1 << 18, 8  # elements, and samples, with values at which code branches
NO_MEMORY = "no memory"  # the start of the detail of a verdict that is due to the memory of the device
LEAST = 2  # sizes beside that of the call, fewer of which are no proof of a range
KEPT = 4096  # verdicts of this process
_verdicts: dict[tuple[str, Key], CandidateVerdict] = {}  # also of proofs that failed, which no other process reads


def draw_sample(call: LoweredCall, seed: int = SEED) -> SampleCase:
    """Return a test input with the sizes, scalars, dtypes and memory layouts of ``call``. Its values are drawn from the
    op's declaration with ``seed``.
    """
    return Samples(call.op, seed, str(call.device)).build(call.recipe)


def prove_template(candidate: TemplateCandidate) -> CandidateVerdict:
    """Return the result of comparing the outputs of ``candidate``, a template with one config, with those of the op's
    reference. Equal candidates for equal calls are tested once.

    The status is ``ok`` if they agree, ``wrong`` if not, ``broken`` if there was an error, and ``refused`` if the
    candidate cannot be tested. The outputs are filled with unlikely values before each run. The first test inputs
    have the sizes of the call. The next have sizes over the range at which the graph may run, and
    the last have those of the call again.
    """
    verdict = known_verdict(candidate)
    if verdict is None:
        verdict = _run_proof(candidate)
        if not verdict.detail.startswith(NO_MEMORY):  # there may be more of it at the next call
            remember_verdict(candidate, verdict)
    return verdict


def known_verdict(candidate: TemplateCandidate) -> CandidateVerdict | None:
    """Return the result of the test of an equal candidate for an equal call, from this process or from an earlier one
    on disk. Return None if there is none, or if the candidate cannot be rendered.
    """
    key = _proof_key(candidate)
    if key is None:
        return None
    verdict = _verdicts.get((settings().cache_dir, key))
    # Only good verdicts are kept on disk.
    if verdict is None and read_proof(key) is not None:
        sizes = candidate.call.sizes.text
        verdict = _verdicts[settings().cache_dir, key] = CandidateVerdict(
            candidate.label, "ok", f"for {sizes}" if sizes else ""
        )
    return verdict


def remember_verdict(candidate: TemplateCandidate, verdict: CandidateVerdict) -> None:
    """Store ``verdict``, the result of testing ``candidate``, for all equal candidates of equal calls in this process.
    If its status is ``ok``, store it on disk, too.
    """
    key = _proof_key(candidate)
    if key is None:
        return
    # The oldest go first: dicts keep the order of insertion.
    while len(_verdicts) >= KEPT:
        _verdicts.pop(next(iter(_verdicts)), None)
    _verdicts[settings().cache_dir, key] = verdict
    if verdict.status == "ok":
        keep_proof(key, {"verdict": "ok"})


def _proof_key(candidate: TemplateCandidate) -> Key | None:
    """Return the key under which the result of testing ``candidate`` is stored. It covers the source code of the
    kernel, the sizes, scalars, dtypes and memory layouts of the call, and the op's sampler. Return None if the kernel
    cannot be rendered.
    """
    try:
        rendered = candidate.digest
    except Exception:  # the proof says why
        return None
    call = candidate.call
    sampler = call.op.sampler
    return proof_key(
        call.op.spec.name,
        call.identity,
        str(call.device),
        candidate=candidate.label,
        kernel=rendered,
        recipe=str(call.recipe),
        sizes=call.sizes.text,
        samples="" if sampler is None else code_digest(sampler),
    )


def _run_proof(candidate: TemplateCandidate) -> CandidateVerdict:
    """Run ``candidate`` on test inputs and compare its outputs with those of the op's reference, up to the first
    failure. Return the result.
    """
    call = candidate.call
    # Random integers would be invalid indices, and a wrong verdict would follow.
    if needs_builder(call.op):
        return CandidateVerdict(
            candidate.label, "refused", "integers that mean something, and no @op.samples to draw them"
        )
    with torch.no_grad(), warnings.catch_warnings():
        # The user did not write the calls of a proof, so their warnings would only confuse.
        warnings.simplefilter("ignore")
        cases = _Cases(candidate)
        try:
            for case, sizes in cases:
                if (failed := _failure_on(candidate, case, sizes)) is not None:
                    return failed
        except torch.OutOfMemoryError:
            return CandidateVerdict(candidate.label, "refused", f"{NO_MEMORY} to draw inputs")
    # The sizes of the call alone do not prove a range.
    if call.sizes.symbols and not cases.covers_range():
        return CandidateVerdict(candidate.label, "refused", f"hardly any sizes in {call.sizes.text} can be drawn")
    return CandidateVerdict(candidate.label, "ok", f"for {call.sizes.text}" if call.sizes.text else "")


def _failure_on(candidate: TemplateCandidate, case: SampleCase, sizes: Sizes | None) -> CandidateVerdict | None:
    """Return the result that ends a proof if ``candidate`` fails on the sample ``case`` or cannot be compared there,
    and None if its outputs are right. ``sizes`` belongs to the sample, as in ``_Cases``.
    """
    try:
        if sizes is None:
            run = candidate.prepare(case.fresh())
            # Such a kernel may be right in a proof and wrong in a later call.
            if state := candidate.state():
                return CandidateVerdict(candidate.label, "wrong", f"it keeps values from call to call: {state}")
        else:
            run = candidate.prepare_at(case.fresh(), sizes)
        outs = run()
        _wait_for_call_device(candidate.call)
    except torch.OutOfMemoryError:
        return CandidateVerdict(candidate.label, "refused", f"{NO_MEMORY} to run it, {case.label}")
    except Exception as e:
        at = "" if sizes is None else f", seed {case.seed}, {case.label}"
        return CandidateVerdict(candidate.label, "broken", error_line(e) + at)
    try:
        problem = _compare_outputs(candidate.call, case, outs)
    except torch.OutOfMemoryError:  # the rest of the memory may be a model's, which the graph is compiled for
        return CandidateVerdict(candidate.label, "refused", f"{NO_MEMORY} to compare results, {case.label}")
    wrong = f"{problem}, seed {case.seed}, {case.label}"
    return CandidateVerdict(candidate.label, "wrong", wrong) if problem else None


def _make_sample(samples: Samples, recipe: SampleRecipe) -> SampleCase | None:
    """Return the sample that ``recipe`` describes, or None if the declaration or the op's builder refuses it. Raise
    ``torch.OutOfMemoryError`` if the device has too little memory for it.
    """
    try:
        return samples.build(recipe)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return None


def _drawn_sizes(call: LoweredCall, case: SampleCase, sizes: Sizes) -> Sizes | None:
    """Return the values of the size symbols of ``call`` in ``case``, a sample for ``sizes``. They are other ones if the
    op's builder computes one size from another, such as a number of blocks from a number of rows, and the graph has a
    symbol for each. Return None if the graph does not run at such sizes.
    """
    args = arguments_by_name(call.op, case.args)
    dims = [
        (size_expression(size), n)
        for name, tensor in call.tensors.items()
        for size, n in zip(tensor.shape, args[name].shape, strict=True)
    ]
    drawn = call.sizes.complete({**sizes, **{size: n for size, n in dims if size in sizes}})
    return drawn if drawn is not None and all(evaluate_size(size, drawn) == n for size, n in dims) else None


class _Cases:
    """The test inputs of a candidate, as pairs of a sample and sizes.

    The sizes are None for a sample of the call's own sizes, which runs in memory that all candidates share. ``points``
    are the sizes of the range for which samples were drawn so far, and ``drawn`` those that the samples have. Each
    occurs once.
    """

    def __init__(self, candidate: TemplateCandidate) -> None:
        """Set the candidate and its call."""
        self.candidate, self.call = candidate, candidate.call
        self.points, self.drawn = list[Sizes](), list[Sizes]()

    def __iter__(self) -> Iterator[tuple[SampleCase, Sizes | None]]:
        """Yield pairs of a sample and sizes. The sizes are None for the first samples, which run in memory that all
        candidates share. Otherwise they map size symbols to values, and the sample runs in memory of its own. An empty
        dict stands for the sizes of the call.
        """
        call = self.call
        for seed in SEEDS:
            yield draw_sample(call, seed), None
        mined = find_template_constants(self.candidate.template, self.candidate.config.as_dict())
        if (values := threshold_value_kind(mined, call.hints.values())) and mined.floats:
            yield from ((case, {}) for case in self._at_values(values))
        samples = Samples(call.op, SEEDS[0], str(call.device))
        tiles = [v for _, v in self.candidate.config.items if type(v) is int and v > 1]
        for sizes in call.sizes.points(mined, tiles):
            if (case := _make_sample(samples, call.recipe_at(sizes))) is None:
                continue
            self.points.append(sizes)
            drawn = _drawn_sizes(call, case, sizes)
            # A sampler that limits sizes returns equal samples for several points.
            if drawn is not None and drawn not in self.drawn:
                self.drawn.append(drawn)
                yield case, drawn
        # Once more the first sizes: a kernel may have kept something of the others.
        yield draw_sample(call, SEEDS[0]), {}

    def covers_range(self) -> bool:
        """Return whether samples of enough sizes were drawn, and each size that varies in the range varies in them."""
        varies = all(
            len({drawn[s.symbol] for drawn in self.drawn}) > 1
            for s in self.call.sizes.symbols
            if len({point[s.symbol] for point in self.points}) > 1
        )
        return varies and len(self.drawn) >= LEAST

    def _at_values(self, values: str) -> Iterator[SampleCase]:
        """Yield at most eight samples of the call with values of the kind ``values``, fewer if they are large. These
        values lie around constants in the kernel's source, where it may branch. With several samples, each constant can
        occur at every position.
        """
        recipe = self.call.recipe.but(values=values)
        count, seed = 1, SEEDS[-1]
        while count <= MOST:
            case = Samples(self.call.op, seed + count, str(self.call.device)).make(recipe)
            if case is None or (count > 1 and count * case.numel > DRAWN):
                return
            yield case
            count += 1


def _compare_outputs(call: LoweredCall, case: SampleCase, outs: tuple[Tensor, ...]) -> str:
    """Return how ``outs`` differ from the results of the op's reference on ``case`` beyond the tolerance, as a
    sentence. Return an empty string if they agree.
    """
    sums = derive_reduction(call.op.spec, case.env)
    work = sums.terms * outs[0].numel()
    with on_one_thread() if work <= ALONE else nullcontext():
        own = reference_effects(call.op, case.args)
        # float64 takes many times as long, on a GPU above all.
        wide = reference_effects64(call.op, case.args) if work <= WIDE else _as_float64(own)
        return compare_within_tolerance(outs, own, wide, sums).problem


def _as_float64(own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return ``own`` with its floating-point tensors converted to float64. All other tensors are unchanged."""
    return tuple(t.double() if t.is_floating_point() else t for t in own)


def _wait_for_call_device(call: LoweredCall) -> None:
    """Wait until the accelerator has finished its work if the device of ``call`` is not the CPU."""
    if call.device.type != "cpu":
        torch.accelerator.synchronize()
