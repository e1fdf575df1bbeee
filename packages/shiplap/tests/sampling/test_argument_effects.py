"""A kernel that ignores an argument is not proven by numbers for which that argument changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

import shiplap as sl
from shiplap.audit import audit
from shiplap.audit.report import Report


def audited(op: sl.Op[..., Any]) -> Report:
    return audit(op, checks=("numerics",), seed=1, isolate=False)


def bins(ns: str, kernel: Callable[..., Tensor]) -> sl.Op[..., Any]:
    """Return an op with a scalar that matters for equal numbers alone, of which the builder draws none."""

    @sl.op(f"{ns}::bins")
    def bins(x: Float32[Tensor, "n"], edges: Float32[Tensor, "k"], right: bool = False) -> Int64[Tensor, "n"]:
        return torch.bucketize(x, edges, right=right)

    @bins.samples
    def _(rng, sizes, dtype, device):
        edges = torch.randn(sizes["k"], generator=rng).sort().values
        return torch.randn(sizes["n"], generator=rng), edges, sizes["right"]

    bins.kernel("cpu", kernel)
    return bins


def test_a_scalar_that_decides_on_equal_numbers_is_told_by_numbers_that_tensors_share(ns: str) -> None:
    report = audited(bins(f"{ns}a", lambda x, edges, right: torch.bucketize(x, edges)))
    assert report.verdict == "failed", report.headline
    assert "right=True" in report.findings[0].input
    right = bins(f"{ns}b", lambda x, edges, right: torch.searchsorted(edges, x, side="right" if right else "left"))
    assert audited(right).proven


def lengths(ns: str, draw: Callable[..., Tensor]) -> sl.Op[..., Any]:
    """Return an op whose kernel ignores a tensor, with a builder that makes this tensor by ``draw``."""

    @sl.op(f"{ns}::sums", requires="m >= 1")
    def sums(x: Float32[Tensor, "n m"], lengths: Int64[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return torch.where(torch.arange(x.shape[1]) < lengths[:, None], x, 0).sum(1)

    @sums.samples
    def _(rng, sizes, dtype, device):
        return torch.randn(sizes["n"], sizes["m"], generator=rng), draw(rng, sizes)

    sums.kernel("cpu", lambda x, lengths: x.sum(1))
    return sums


def test_a_tensor_that_a_builder_always_makes_alike_is_named(ns: str) -> None:
    report = audited(lengths(f"{ns}a", lambda rng, sizes: torch.full((sizes["n"],), sizes["m"])))
    assert report.verdict == "incomplete", report.headline
    assert "no sample shows that lengths changes the results: let the builder of samples draw it" in report.headline
    drawn = lengths(f"{ns}b", lambda rng, sizes: torch.randint(0, sizes["m"] + 1, (sizes["n"],), generator=rng))
    assert audited(drawn).verdict == "failed"


def test_a_scalar_that_a_builder_always_gives_alike_is_named(ns: str) -> None:
    @sl.op(f"{ns}::scaled")
    def scaled(x: Float32[Tensor, "n"], a: float = 1.0, b: float = 2.0) -> Float32[Tensor, "n"]:
        return x * a * b

    scaled.samples(lambda rng, sizes, dtype, device: (torch.randn(sizes["n"], generator=rng), sizes["a"], 3.0))
    report = audited(scaled)
    assert report.verdict == "incomplete", report.headline
    assert "no sample shows that b changes the results" in report.headline


def test_a_scalar_that_the_reference_reads_in_vain_is_named_and_proven(ns: str) -> None:
    """It may be a limit that the reference checks."""

    @sl.op(f"{ns}::plus")
    def plus(x: Float32[Tensor, "n"], most: int = 1 << 20) -> Float32[Tensor, "n"]:
        if len(x) > most + 100:
            raise ValueError("too many")
        return x + 1

    report = audited(plus)
    assert report.proven, report.headline
    assert "no sample shows that most changes the results" in report.findings[0].evidence


# Another scalar, or more elements, for which the scalar ``fine`` matters.
SWITCHED: dict[str, Callable[[Tensor, int, int, bool, bool], Tensor]] = {
    "other scalars": lambda x, pad, step, off, fine: x * step + (pad > 0 and fine and not off),
    "more elements": lambda x, pad, step, off, fine: x * step + pad + off + torch.arange(len(x)) // (99 - 35 * fine),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_a_scalar_is_tried_with_others_and_with_more_elements(ns: str, name: str) -> None:
    rule = SWITCHED[name]

    @sl.op(f"{ns}::switched", requires=("pad >= 0", "step >= 1", "2 * pad <= step"))
    def switched(
        x: Float32[Tensor, "n"], pad: int = 0, step: int = 1, off: bool = False, fine: bool = True
    ) -> Float32[Tensor, "n"]:
        return rule(x, pad, step, off, fine)

    switched.kernel("cpu", lambda x, pad, step, off, fine: rule(x, pad, step, off, True))
    report = audited(switched)
    assert report.verdict == "failed", report.headline


def test_what_cannot_have_an_effect_makes_no_verdict_incomplete(ns: str) -> None:
    """A hint that the reference does not read, a tensor of which it reads the sizes, a scalar of one admitted value, a
    scalar of the gradient, and a part that the op writes to.
    """

    @sl.op(f"{ns}::many", requires="groups == 1", mutates=("kept",))
    def many(
        x: Float32[Tensor, "n c"],
        like: Float32[Tensor, "n c"],
        mask: Bool[Tensor, "n"],
        kept: Float32[Tensor, "n c"],
        groups: int = 1,
        hint: int = 3,
    ) -> Float32[Tensor, "n c"]:
        kept.copy_(x * mask[:, None])
        return torch.zeros_like(like) + kept * groups

    def checked(x: Float32[Tensor, "n"], limit: Int64[Tensor, ""]) -> Float32[Tensor, "n"]:
        if int(limit) < 5:
            raise ValueError("too small a limit")
        return x + 1

    limited = sl.op(f"{ns}::limited")(checked)
    limited.samples(lambda rng, sizes, dtype, device: (torch.randn(sizes["n"], generator=rng), torch.tensor(9)))
    assert audited(limited).proven

    report = audited(many)
    assert report.proven, report.headline

    @sl.op(f"{ns}::kept")
    def kept(x: Float32[Tensor, "n"], beta: float = 1.0) -> Float32[Tensor, "n"]:
        return x + (x * beta - (x * beta).detach())

    kept.backward(lambda grad, saved, needs: {"x": grad * (1 + saved.beta)})
    assert audited(kept).proven


@pytest.mark.parametrize("random", ["seed", "global"])
def test_seeds_are_left_to_the_check_of_random_numbers(ns: str, random: str) -> None:
    @sl.op(f"{ns}::noisy", random=random)
    def noisy(x: Float32[Tensor, "n"], p: float = 0.0, seed: int = 0) -> Float32[Tensor, "n"]:
        return x + p * torch.rand(x.shape, generator=torch.Generator().manual_seed(seed % 2**63))

    assert audited(noisy).proven
