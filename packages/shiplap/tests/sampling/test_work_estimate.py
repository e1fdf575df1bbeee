"""How much a sample costs, and what is left on one thread."""

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import shiplap as sl
from shiplap.audit.checks.sizes import sizes_cases
from shiplap.sampling.boundary_sizes import CROWDED_SIZE, LONG_SUM
from shiplap.sampling.samples import Samples
from shiplap.sampling.work_estimate import estimate_operations, exceeds_work_limit, on_one_thread


def test_comparisons_run_on_one_thread():
    torch.set_num_threads(2)
    with on_one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_a_matrix_of_all_pairs_of_a_crowded_row_is_too_large(ns):
    @sl.op(f"{ns}::nearest")
    def nearest(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return (x[:, None] - x).abs().sum(1)

    @sl.op(f"{ns}::listed")
    def listed(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return torch.tensor(x.tolist())

    for op, expected in ((nearest, True), (listed, False)):  # a list of values does not exist on the meta device
        crowded = [*Samples(op, 0).crowded()]
        assert {dict(c.recipe.sizes)["n"] for c in crowded} == {CROWDED_SIZE}
        assert {exceeds_work_limit(op, c) for c in crowded} == {expected}
        first = next(c for c in sizes_cases(Samples(op, 0)) if dict(c.recipe.sizes)["n"] != LONG_SUM)
        assert (dict(first.recipe.sizes)["n"] == CROWDED_SIZE) is not expected


def test_dims_of_an_absent_table_are_not_summed_over(ns):
    @sl.op(f"{ns}::gathered")
    def gathered(
        x: Float32[Tensor, "n c"], index: Int64[Tensor, "m"], back: Int64[Tensor, "n"] | None = None
    ) -> Float32[Tensor, "m c"]:
        return x[index]

    env = {"n": 1000, "m": 50, "c": 4}
    assert estimate_operations(gathered.spec, env) == 50 * 4 * 1000
    assert estimate_operations(gathered.spec, env, absent=("back",)) == 50 * 4
