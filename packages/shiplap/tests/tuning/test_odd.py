"""A choice is used for every call of its bucket, so a kernel has to be right for starts, strides and values of it."""

import ctypes
import os
import time
import warnings

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
from shiplap.sampling.case import SampleCase
from shiplap.sampling.samples import Samples
from shiplap.sandbox import forked_launcher
from shiplap.tuning import SelectionOptions, WorkerProcess
from shiplap.tuning.bench import LocalBench
from shiplap.tuning.candidate import ReferenceCandidate, kernel_candidates
from shiplap.tuning.inputs import draw_inputs
from shiplap.tuning.key import key_for
from shiplap.tuning.measure import RacePlan
from shiplap.tuning.sandboxed.fresh_inputs import with_other_gaps
from shiplap.tuning.selector import SelectionTask
from shiplap_testing.effort import sampled
from tests.tuning import odd_ops


def task(op, kernel: str, layout: str = "") -> SelectionTask:
    """Return the task to choose between the reference and one kernel, for calls in a layout."""
    recipe = Samples(op, 0).base.but(sizes={"n": 16, "c": 32}, layouts={"x": layout} if layout else {})
    drawn = draw_inputs(op, recipe, "cpu")
    listed = [ReferenceCandidate(op), *(c for c in kernel_candidates(op, "cpu", drawn.call.env) if c.kernel == kernel)]
    return SelectionTask(op, drawn, key_for(op, drawn), listed, SelectionOptions(seconds=600))


WRONG = [(odd_ops.soft, "sentinel"), (odd_ops.soft, "aligned down"), (odd_ops.unit, "least variance")]
SOUND = [(odd_ops.soft, "honest"), (odd_ops.unit, "honest")]


@pytest.mark.parametrize(("op", "kernel"), [*WRONG, *SOUND])
def test_starts_and_values_of_the_bucket_are_verified(op, kernel):
    asked = task(op, kernel)
    problem = LocalBench(asked.inputs, asked.candidates).verify(1).problem
    assert bool(problem) == (kernel != "honest"), problem


@pytest.mark.parametrize("kernel", sampled(["one pitch", "honest"], 1))
def test_strides_of_the_same_layout_are_tried_before_a_winner_counts(kernel):
    with WorkerProcess() as isolation, torch.no_grad():
        bench = isolation.bench()(task(odd_ops.soft, kernel, "padded"))
        problem = bench.verify(1).problem
        if not problem:
            timings, _ = bench.race([0, 1], RacePlan(rounds=2, least=1, seconds=0.2))
            problem = bench.confirm({1: timings[1].median}, 60.0)[1].problem
    assert bool(problem) == (kernel != "honest"), problem


def test_other_gaps_keep_values_and_the_order_of_dims():
    samples = Samples(odd_ops.soft, 1)
    for layout in ("padded", "column_major", "strided"):
        case = samples.make(samples.base.but(sizes={"n": 5, "c": 7}, layouts={"x": layout}))
        assert isinstance(case, SampleCase)
        (before,) = case.args
        key = odd_ops.soft.rule.key(odd_ops.soft.bind((before,)))
        for (after,) in [with_other_gaps(case).args for _ in range(30)]:
            assert torch.equal(before, after)
            assert odd_ops.soft.rule.key(odd_ops.soft.bind((after,))) == key
            assert before.stride() != after.stride()


@pytest.mark.long
def test_an_op_that_a_function_declares_is_verified_in_locked_forks(ns, monkeypatch):
    monkeypatch.setattr(forked_launcher, "START_S", 600.0)  # on a busy machine
    here = os.getpid()

    @sl.op(f"{ns}::local")
    def local(x: Float32[Tensor, "n k"], w: Float32[Tensor, "k m"]) -> Float32[Tensor, "n m"]:
        time.sleep(0.004)
        return torch.softmax((x @ w).sin().exp(), -1)

    seen = {}  # by far the fastest, so that it is tried on new values

    @local.kernel("cpu", name="remembers")
    def _(x, w, *, out):
        key = x.data_ptr(), w.data_ptr(), x.shape, w.shape
        if key not in seen:
            seen[key] = torch.softmax((x @ w).sin().exp(), -1)
        out.copy_(seen[key])

    @local.kernel("cpu", name="crashes")
    def _(x, w, *, out):
        assert os.getpid() != here
        ctypes.string_at(8)

    @local.kernel("cpu", name="fused")
    def _(x, w, *, out):
        time.sleep(0.002)
        torch.softmax(torch.mm(x, w).sin_().exp_(), -1, out=out)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        # Ten times what a busy machine once spent; the search ends when its work is done.
        (choice,) = sl.tune(local, [{"n": 64, "k": 32, "m": 64}], budget="10m")
    texts = [str(w.message) for w in heard]
    assert not choice.unverified, choice
    assert choice.kernel in ("fused", "reference")
    assert not seen, "no kernel ran in this process"
    assert not any("tuned in this process" in text for text in texts), texts
    assert any("crashes: ended by SIGSEGV" in text for text in texts), (texts, choice)
    assert any("remembers" in text for text in texts), (texts, choice)
