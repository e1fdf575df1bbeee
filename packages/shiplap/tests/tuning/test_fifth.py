"""Kernels that are right for one number only, and kernels that change what everybody uses, do not win."""

import pytest
import torch

from shiplap.tuning import SelectionOptions, WorkerProcess
from shiplap.tuning.candidate import ReferenceCandidate, kernel_candidates
from shiplap.tuning.engine import make_requests
from shiplap.tuning.inputs import draw_inputs
from shiplap.tuning.key import key_for
from shiplap.tuning.measure import RacePlan
from shiplap.tuning.sandboxed.fresh_inputs import ConfirmationInputs
from shiplap.tuning.selector import SelectionTask
from shiplap_testing.effort import sampled
from tests.tuning import fifth_ops

SIZES = {"n": 64, "k": 256, "m": 64}
KERNELS = [k.name for k in fifth_ops.scaled.kernels["cpu"]]


def task(kernel: str) -> SelectionTask:
    op = fifth_ops.scaled
    (_, recipe, device), *_ = make_requests(op, [SIZES], "cpu")
    drawn = draw_inputs(op, recipe, device)
    listed = [ReferenceCandidate(op), *(c for c in kernel_candidates(op, device, drawn.call.env) if c.kernel == kernel)]
    return SelectionTask(op, drawn, key_for(op, drawn), listed, SelectionOptions(seconds=600))


@pytest.mark.parametrize("kernel", sampled(KERNELS, 1))
def test_who_is_right_for_one_call_only_is_not_believed(kernel):
    with WorkerProcess() as isolation, torch.no_grad():
        bench = isolation.bench()(task(kernel))
        refused = bench.verify(1).problem
        if not refused:
            timings, failed = bench.race([0, 1], RacePlan())
            assert not failed
            refused = bench.confirm({1: timings[1].median}, 60.0)[1].problem
    assert bool(refused) == (kernel != "honest"), refused


def test_numbers_for_which_a_choice_holds_get_other_values():
    (_, recipe, device), *_ = make_requests(fifth_ops.chosen, [{"n": 8, "k": 8}], "cpu")
    drawn = ConfirmationInputs(fifth_ops.chosen, draw_inputs(fifth_ops.chosen, recipe, device))
    plain = dict(drawn.inputs.recipe.scalars)
    changed = [{k: v for k, v in r.scalars if plain.get(k) != v} for r in drawn._small()]
    assert {name for each in changed for name in each} == {"alpha"}, "the others have choices of their own"
