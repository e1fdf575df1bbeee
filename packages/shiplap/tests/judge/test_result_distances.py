"""The errors of a reference that are known from other draws, and the comparisons with float64 that they save."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shiplap.judge import problem as problem_room
from shiplap.judge.problem import FunctionProblem
from shiplap.judge.result_distances import KNOWN, LARGE_ENOUGH, OwnErrors
from shiplap.judge.variants import InputForm
from shiplap.sampling.compare import Reduction, agrees_without_float64, compare_within_tolerance
from shiplap_testing.effort import sampled

MANY = torch.linspace(1, 2, LARGE_ENOUGH)


def test_an_error_is_likely_after_some_draws_of_many_elements() -> None:
    errors, few = OwnErrors(), MANY[:8]
    for number in range(KNOWN):
        assert errors.likely("a", [MANY]) == [0.0]
        errors.note("a", [MANY, few], [MANY.double() + 1e-3 * (number + 1), few.double() + 1e-3])
    assert errors.likely("a", [MANY, few]) == [pytest.approx(0.5e-3), 0.0]
    assert errors.likely("b", [MANY]) == [0.0]
    errors.clear()
    assert errors.likely("a", [MANY, few]) == [0.0, 0.0]


def test_an_error_is_a_share_of_the_result_of_which_it_is() -> None:
    """Draws of one form may be of other scales: a large one must not excuse what a small one gets wrong."""
    errors = OwnErrors()
    for _ in range(KNOWN):
        errors.note("a", [MANY * 1e6], [MANY.double() * 1e6 + 1e3])
    assert errors.likely("a", [MANY * 1e6]) == [pytest.approx(0.5e3, rel=1e-3)]
    assert errors.likely("a", [MANY]) == [pytest.approx(0.5e-3, rel=1e-3)]
    assert errors.likely("a", [MANY * 0]) == [0.0]


def test_what_is_no_number_adds_nothing_to_an_error() -> None:
    errors = OwnErrors()
    own = MANY.clone()
    own[:2] = torch.tensor([float("nan"), float("inf")])
    for _ in range(KNOWN):
        errors.note("a", [own, own > 1], [MANY.double() + 1e-3, own > 1])
    assert errors.likely("a", [own, own > 1]) == [pytest.approx(0.5e-3, rel=1e-3), 0.0]


@pytest.mark.parametrize("seed", range(5))
def test_an_error_that_is_known_widens_nothing_beyond_the_tolerance(seed: int) -> None:
    """What agrees by it is accepted by the comparison with float64 as well."""
    rng, sums = torch.Generator().manual_seed(seed), Reduction(1)
    wide = torch.randn(4096, generator=rng, dtype=torch.float64)
    own = (wide + 1e-5 * torch.randn(4096, generator=rng, dtype=torch.float64)).float()
    largest = float((own - wide).abs().max())
    agreed = 0
    for step in range(60):
        got = own + (step / 20) * largest * torch.randn(4096, generator=rng).sign()
        known = agrees_without_float64([got], [own], sums, wide_sums=True, near="none", errors=[largest])
        agreed += known
        if known:
            assert not compare_within_tolerance([got], [own], [wide], sums, wide_sums=True, near="none").problem
            assert not agrees_without_float64([got], [own], sums, wide_sums=True, near="none") or step == 0
    assert 30 < agreed < 40


@pytest.mark.parametrize("share", sampled([0.0, 1.0], long=["1.0"]))
def test_a_reference_is_computed_in_float64_for_some_draws_only(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the draws that are compared all the same, only the first ones are."""
    monkeypatch.setattr(problem_room, "SPOT_SHARE", share)

    def reference(x: Tensor) -> Tensor:
        return (x - x.amax(1, True)).exp() / (x - x.amax(1, True)).exp().sum(1, True)

    made = lambda: (torch.randn(64, 4096),)  # noqa: E731
    problem, wide = FunctionProblem("softmax", reference, made, 0.0), []
    run = FunctionProblem._wide_results
    monkeypatch.setattr(FunctionProblem, "_wide_results", lambda self, *args: wide.append(1) or run(self, *args))
    form = InputForm("64x4096 drawn", shapes=((64, 4096),))
    for _ in range(8):
        (x,) = problem.draw(form)
        expected = problem.expect_effects(form, (x,))
        own = expected.own[0]
        near = torch.where(own < 1e-5, own * (1 + 2e-6), own)  # as a faster exponential
        assert not expected.against([near]).problem
    assert len(wide) == (8 if share else KNOWN)
    for factor in (1.0001, float("nan")):
        assert expected.against([expected.own[0] * factor]).problem
    problem.renew({})
    assert problem.own_errors.likely(form.label, expected.own) == [0.0]
