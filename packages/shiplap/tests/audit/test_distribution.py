"""Random results are compared by distribution, and unordered ones as sets."""

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap.sampling.distribution import RUNS, distribution_difference
from shiplap_testing.support import fails

M = Float[Tensor, "n d"]
CHECKS = ("numerics", "determinism", "distribution")


def runs(draw, first=0):
    return [draw(torch.Generator().manual_seed(first + k)) for k in range(RUNS)]


def normal(g):
    return torch.randn(12, 10, generator=g)


WRONG = {
    "mean": lambda g: normal(g) + 0.3,
    "variance": lambda g: normal(g) * 1.3,
    "another distribution of the same moments": lambda g: torch.randint(0, 2, (12, 10), generator=g) * 2.0 - 1,
    "one row for all": lambda g: normal(g)[:1].expand(12, 10),
    "one column for all": lambda g: normal(g)[:, :1].expand(12, 10),
    "the same whatever the seed": lambda g: normal(torch.Generator().manual_seed(3)),
    "one position": lambda g: torch.cat([normal(g).flatten()[:-1], torch.full((1,), 3.0)]).view(12, 10),
    "an absolute value": lambda g: normal(g).abs(),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_distribution_is_seen(name):
    assert distribution_difference(runs(WRONG[name], 100), runs(normal)), name


RIGHT = {
    "normal": normal,
    "bits": lambda g: (torch.rand(50, generator=g) < 0.3).float(),
    "integers": lambda g: torch.randperm(20, generator=g),
    "one number for all": lambda g: torch.rand(1, generator=g).expand(30).clone(),
    "heavy tails": lambda g: torch.rand(40, generator=g).reciprocal(),
    "complex": lambda g: torch.randn(9, generator=g, dtype=torch.complex64),
    "no element": lambda g: torch.rand(0, generator=g),
    "a constant": lambda g: torch.full((3,), 2.5),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_same_distribution_passes(name):
    for first in (100, 200, 300):
        assert not distribution_difference(runs(RIGHT[name], first), runs(RIGHT[name])), name


def test_rounding_is_no_difference():
    assert not distribution_difference(
        [t * (1 + 1e-6) for t in runs(lambda g: torch.ones(5))], runs(lambda g: torch.ones(5))
    )


def dropout(x: M, p: float = 0.25) -> M:
    return x * (torch.rand_like(x) >= p) / (1 - p)


def kernel_of(op, draw):
    @op.kernel("cpu")
    def _(x, p):
        return draw(x, p)

    return {f.check: f for f in sl.audit(op, checks=CHECKS, seed=0)}


KERNELS = {
    "": lambda x, p: x * torch.empty_like(x).bernoulli_(1 - p) / (1 - p),
    "distribution function|mean|share": lambda x, p: x * (torch.rand_like(x) >= 0.8 * p) / (1 - 0.8 * p),
    "the correlation of elements": lambda x, p: x * (torch.rand_like(x[:, :1]) >= p) / (1 - p),
    "it seeds torch's own generator": lambda x, p: (torch.manual_seed(1), x * (torch.rand_like(x) >= p) / (1 - p))[1],
}


@pytest.mark.parametrize(
    "problem", [pytest.param(k, marks=pytest.mark.long if "|" in k or "corr" in k or not k else ()) for k in KERNELS]
)
def test_dropout_from_torchs_own_generator(ns, problem):
    op = sl.op(f"{ns}::dropout", random="global", requires=("0 <= p", "p < 1"))(dropout)
    assert torch.Tag.nondeterministic_seeded in op.overload.tags
    findings = kernel_of(op, KERNELS[problem])
    if not problem:
        wrong = {name: str(f.evidence) for name, f in findings.items() if f.verdict != "ok"}
        assert not wrong, str(wrong)  # as text, which pytest does not cut off
    else:
        assert findings["distribution"].verdict == "fail"
        assert any(part in findings["distribution"].evidence for part in problem.split("|")), findings["distribution"]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_code_draws_twice_what_eager_code_draws(ns, backend):
    op = sl.op(f"{ns}::dropout", random="global")(dropout)

    def function(x):
        return op(x) + 2 * op(x)

    x = torch.ones(40, 3)
    torch.manual_seed(3)
    wanted = function(x)
    torch.manual_seed(3)
    assert torch.equal(torch.compile(function, backend=backend, fullgraph=True)(x), wanted)
    assert len(wanted.unique()) == 4  # two masks, not one


@pytest.mark.long
def test_a_generator_and_a_seed(ns):
    @sl.op(f"{ns}::noise", random="generator")
    def noise(x: M, *, generator: torch.Generator | None = None) -> M:
        return x + torch.randn(x.shape, generator=generator, dtype=x.dtype)

    @noise.kernel("cpu")
    def _(x, *, generator=None):
        return x + torch.empty_like(x).normal_(generator=generator)

    assert {f.verdict for f in sl.audit(noise, checks=CHECKS, seed=0)} == {"ok"}

    @sl.op(f"{ns}::keep", random="seed")
    def keep(x: M, seed: Int64[Tensor, ""]) -> M:
        generator = torch.Generator().manual_seed(int(seed))
        return x * torch.rand(x.shape, generator=generator, dtype=x.dtype)

    @keep.kernel("cpu")
    def _(x, seed):
        torch.manual_seed(int(seed))  # which others notice
        return x * torch.rand(x.shape, dtype=x.dtype)

    findings = {f.check: f for f in sl.audit(keep, checks=CHECKS, seed=0)}
    assert "though it is given a seed" in findings["distribution"].evidence


@pytest.fixture
def distinct(ns):
    @sl.op(f"{ns}::distinct", bounds={"m": "n"}, outputs=("values", "counts"), unordered=("values", "counts"))
    def distinct(x: Int64[Tensor, "n"]) -> tuple[Int64[Tensor, "m"], Int64[Tensor, "m"]]:
        return torch.unique(x, return_counts=True)

    @distinct.samples
    def _(rng, sizes, dtype, device):
        return (torch.randint(0, 5, (sizes["n"],), generator=rng),)

    return distinct


def test_unordered_results_are_sets(distinct):
    @distinct.kernel("cpu")
    def _(x):
        values, counts = torch.unique(x, return_counts=True)
        order = torch.randperm(len(values))  # as a hash table that threads fill
        return values[order], counts[order]

    findings = sl.audit(distinct, checks=("numerics", "determinism", "fake"), seed=0)
    assert {f.verdict for f in findings} == {"ok"}, findings

    @distinct.kernel("cpu")
    def _(x):
        values, counts = torch.unique(x, return_counts=True)
        return values.flip(0), counts  # which belong to other values

    (finding,) = sl.audit(distinct, checks=("numerics",), seed=0)
    assert finding.verdict == "fail"


def test_rounding_does_not_reorder_rows(ns):
    @sl.op(f"{ns}::points", unordered="out")
    def points(x: M) -> M:
        return x * 3

    @points.kernel("cpu")
    def _(x):
        return torch.nextafter(x * 3, torch.full_like(x, torch.inf)).flip(0)

    (finding,) = sl.audit(points, checks=("numerics",), seed=0)
    assert finding.verdict == "ok", finding


def test_refusals(ns):
    with fails("SL120", got="'x'", expected="one of 'global'"):
        sl.op(f"{ns}::f", random="x")(dropout)
    with fails("SL121", got="'x'", expected="one of out"):
        sl.op(f"{ns}::f", unordered="x")(dropout)

    def pair(x: M) -> tuple[Float[Tensor, "n"], Float[Tensor, "d"]]:
        return x.sum(1), x.sum(0)

    with fails("SL121", got="d and n rows"):
        sl.op(f"{ns}::f", unordered=("out0", "out1"))(pair)
