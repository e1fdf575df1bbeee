"""Changes of the numbers of a builder keep what holds between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import shiplap as sl
from shiplap.audit import audit
from shiplap.sampling.changed_values import change_values
from shiplap.sampling.values import SHARED_NUMBERS, SOME_ZEROS


def symmetric(t: Tensor) -> bool:
    return torch.equal(t, t.mT)


def unit(measure: Callable[..., Tensor]) -> Callable[[Tensor], bool]:
    return lambda t: bool(torch.allclose(measure(t, dim=-1), torch.ones(())))


# Name → the numbers of a builder, and what holds between them.
RELATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], bool]]] = {
    "ascending": (lambda t: t.sort(-1).values, lambda t: bool((t.diff(dim=-1) >= 0).all())),
    "descending columns": (lambda t: t.sort(0, descending=True).values, lambda t: bool((t.diff(dim=0) <= 0).all())),
    "symmetric": (lambda t: t + t.mT, symmetric),
    "shares": (lambda t: torch.softmax(t, -1), unit(torch.sum)),
    "directions": (lambda t: torch.nn.functional.normalize(t, dim=-1), unit(torch.linalg.vector_norm)),
    "positive": (lambda t: t.abs() + 0.1, lambda t: bool((t >= 0).all())),
}


# Those of which other numbers keep no part.
WHOLE = {
    "one-hot": (lambda t: torch.eye(len(t))[t.argmax(-1)], lambda t: bool((t.sum(-1) == 1).all())),
    "triangular": (torch.tril, lambda t: torch.equal(t, torch.tril(t))),
    "strictly ascending": (lambda t: t.flatten().sort().values, lambda t: bool((t.diff() > 0).all())),
}


@pytest.mark.parametrize("kind", [SOME_ZEROS, SHARED_NUMBERS])
@pytest.mark.parametrize("name", RELATIONS)
def test_changed_numbers_keep_what_holds_between_them(name: str, kind: str) -> None:
    make, holds = RELATIONS[name]
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        own, other = make(torch.randn(5, 5, generator=rng)), torch.randn(7, generator=rng)
        changed, _ = change_values((own, other), kind, rng)
        assert holds(own)
        assert holds(changed)
        assert kind == SHARED_NUMBERS or not torch.equal(own, changed)


@pytest.mark.parametrize("name", WHOLE)
def test_shared_numbers_keep_what_makes_a_tensor(name: str) -> None:
    make, holds = WHOLE[name]
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        own, other = make(torch.randn(5, 5, generator=rng)), torch.randn(7, generator=rng)
        changed, _ = change_values((own, other), SHARED_NUMBERS, rng)
        assert holds(own)
        assert holds(changed)


def test_numbers_are_shared_between_tensors_in_the_range_of_each() -> None:
    rng = torch.Generator().manual_seed(3)
    values, edges = torch.randn(40, generator=rng), torch.rand(9, generator=rng).sort().values
    changed, sorted_edges, same = change_values((values, edges, torch.arange(3)), SHARED_NUMBERS, rng)
    assert torch.isin(changed, sorted_edges).sum() > 3
    assert torch.equal(edges, sorted_edges)
    assert float(values.min()) <= float(changed.min()) <= float(changed.max()) <= float(values.max())
    assert torch.equal(same, torch.arange(3))


def test_a_kernel_that_relies_on_the_order_of_a_builder_is_proven(ns: str) -> None:
    """Zeros in the place of some numbers left edges unsorted, and a right kernel failed ``special``."""

    @sl.op(f"{ns}::places")
    def places(x: Float32[Tensor, "n"], edges: Float32[Tensor, "k"]) -> Int64[Tensor, "n"]:
        return torch.searchsorted(edges, x)

    @places.samples
    def _(rng, sizes, dtype, device):
        edges = torch.randn(sizes["k"], generator=rng).sort().values
        return torch.randn(sizes["n"], generator=rng), edges

    places.kernel("cpu", lambda x, edges: (edges < x[:, None]).sum(1))
    report = audit(places, checks=("numerics", "special"), seed=1, isolate=False)
    assert report.proven, report.headline


def test_the_advice_says_that_the_numbers_of_a_builder_were_changed(ns: str) -> None:
    @sl.op(f"{ns}::inverses")
    def inverses(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return torch.where(x == 0, 1.0, 1 / x)

    inverses.samples(lambda rng, sizes, dtype, device: (torch.rand(sizes["n"], generator=rng) + 1,))
    inverses.kernel("cpu", lambda x: 1 / x)
    (finding,) = audit(inverses, checks=("special",), seed=1, isolate=False).findings
    assert finding.verdict == "fail"
    assert 'let the builder read sizes.get("values")' in finding.fix
