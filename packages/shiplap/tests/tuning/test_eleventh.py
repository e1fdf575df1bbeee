"""A kernel does not win if it decides by what calls after the tuning have otherwise."""

from __future__ import annotations

import pytest
import torch

from shiplap.sandbox.unsteady_source import unsteady_decisions_of_function
from shiplap.tuning import SelectionOptions, WorkerProcess
from shiplap.tuning.candidate import ReferenceCandidate, kernel_candidates
from shiplap.tuning.engine import make_requests
from shiplap.tuning.inputs import draw_inputs
from shiplap.tuning.key import key_for
from shiplap.tuning.selector import SelectionTask
from tests.tuning.eleventh_ops import doubled


def bound_kernels(device: str = "cpu") -> SelectionTask:
    """Return the task to choose among the kernels of the op."""
    (_, recipe, device), *_ = make_requests(doubled, [{"n": 64}], device)
    drawn = draw_inputs(doubled, recipe, device)
    listed = [ReferenceCandidate(doubled), *kernel_candidates(doubled, device, drawn.call.env)]
    return SelectionTask(doubled, drawn, key_for(doubled, drawn), listed, SelectionOptions(seconds=600))


@pytest.mark.parametrize("kernel", [k.name for k in doubled.kernels["cpu"]])
def test_a_decision_of_a_kernel_is_found_in_its_source(kernel: str) -> None:
    (candidate,) = (c for c in bound_kernels().candidates if getattr(c, "kernel", "") == kernel)
    assert bool(unsteady_decisions_of_function(candidate.bound.function)) == (not kernel.startswith("honest"))


def test_such_a_kernel_is_not_verified() -> None:
    task = bound_kernels()
    with WorkerProcess() as isolation, torch.no_grad():
        bench = isolation.bench()(task)
        problems = {getattr(c, "kernel", ""): bench.verify(i).problem for i, c in enumerate(task.candidates) if i}
    sound = {name for name, problem in problems.items() if not problem}
    assert sound - {"reference"} == {"honest", "honest with a bounded cache"}
    assert all("later calls" in problem for problem in problems.values() if problem)
