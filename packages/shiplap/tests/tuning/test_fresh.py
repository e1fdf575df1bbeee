"""Kernels that are right and fast, and change what all code of the process shares, or hide what they branch at."""

import pytest
import torch

from shiplap.sampling.code_constants import find_code_constants
from shiplap.tuning import SelectionOptions, WorkerProcess
from shiplap.tuning.candidate import ReferenceCandidate, kernel_candidates
from shiplap.tuning.engine import make_requests
from shiplap.tuning.inputs import draw_inputs
from shiplap.tuning.key import key_for
from shiplap.tuning.measure import RacePlan
from shiplap.tuning.sandboxed.fresh_inputs import SMALL, ConfirmationInputs
from shiplap.tuning.selector import SelectionTask
from shiplap_testing.effort import sampled
from tests.tuning import fresh_ops

SIZES = {"n": 64, "k": 256, "m": 64}
KERNELS = [k.name for k in fresh_ops.shared.kernels["cpu"]]


def task(kernel: str) -> SelectionTask:
    op = fresh_ops.shared
    (_, recipe, device), *_ = make_requests(op, [SIZES], "cpu")
    drawn = draw_inputs(op, recipe, device)
    listed = [ReferenceCandidate(op), *(c for c in kernel_candidates(op, device, drawn.call.env) if c.kernel == kernel)]
    return SelectionTask(op, drawn, key_for(op, drawn), listed, SelectionOptions(seconds=600))


@pytest.mark.parametrize("kernel", sampled(KERNELS, 1))
def test_who_changes_what_is_shared_is_not_believed(kernel):
    with WorkerProcess() as isolation, torch.no_grad():
        bench = isolation.bench()(task(kernel))
        refused = bench.verify(1).problem
        if not refused:
            timings, failed = bench.race([0, 1], RacePlan())
            assert not failed
            refused = bench.confirm({1: timings[1].median}, 60.0)[1].problem
    assert bool(refused) == (kernel != "honest"), refused


def test_numbers_of_a_function_in_another_module_are_found():
    assert 77 in find_code_constants(fresh_ops.shared).ints
    assert 7 not in find_code_constants(fresh_ops.shared).ints, "no kernel uses that one"


def test_numbers_of_the_code_come_before_other_small_sizes():
    drawn = ConfirmationInputs(fresh_ops.shared, task("honest").inputs)
    tried = {v for recipe in drawn._small() for _, v in recipe.sizes}
    named = [v for v in drawn._samples.code_constants.ints if 2 < v < SMALL]
    assert 77 in named
    assert set(named) <= tried
