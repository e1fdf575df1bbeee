"""Samples in which two things are unusual at once."""

from typing import Literal

from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap.sampling import pairwise
from shiplap.sampling.samples import Samples


def op(ns):
    @sl.op(f"{ns}::scaled", requires=("s >= 1", "d >= 1"))
    def scaled(x: Float[Tensor, "n c"], i: Int64[Tensor, "c"], s: int = 1, d: int = 1) -> Float[Tensor, "n c"]:
        return x * s + d

    return scaled


def test_scalars_two_at_a_time(ns):
    scalars = [dict(c.recipe.scalars) for c in pairwise.pairs_of_scalars(Samples(op(ns), 0))]
    assert scalars
    assert all(v["s"] > 1 and v["d"] > 1 for v in scalars)


def test_every_listed_value_of_a_scalar_meets_those_of_another(ns):
    @sl.op(f"{ns}::coded")
    def coded(
        x: Float[Tensor, "n"], kind: Literal["a", "b"] = "a", size: Literal[64, 256, 4096] = 64, scale: float = 1.0
    ) -> Float[Tensor, "n"]:
        return x * size * scale

    scalars = [dict(c.recipe.scalars) for c in pairwise.pairs_of_scalars(Samples(coded, 0))]
    assert {"kind": "b", "size": 4096, "scale": 1.0} in scalars
    assert {"kind": "a", "size": 4096, "scale": 0.5} in scalars
    assert len({str(s) for s in scalars}) == len(scalars)


def test_every_dtype_in_layouts(ns):
    kinds = {(str(c.args[0].dtype), c.recipe.layouts) for c in pairwise.layouts_of_dtypes(Samples(op(ns), 0))}
    assert len(kinds) == 3 * len(pairwise.DTYPE_LAYOUTS)


def test_sizes_of_one_in_layouts(ns):
    strides = {c.args[0].stride() for c in pairwise.layouts_of_ones(Samples(op(ns), 0)) if c.args[0].shape[1] == 1}
    assert (2, 2) in strides


def test_powers_of_two_and_their_neighbours(ns):
    @sl.op(f"{ns}::negated")
    def negated(i: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        return -i

    values = next(pairwise.powers_of_two(Samples(negated, 0))).args[0].abs()
    near = [((values + step) & (values + step - 1)) == 0 for step in (-1, 0, 1)]
    assert (near[0] | near[1] | near[2]).all()
    assert values.max() > 1 << 60


def test_large_samples_end_in_time(ns, monkeypatch):
    sizes = [c.numel for c in pairwise.large_samples(Samples(op(ns), 0))]
    assert max(sizes) > 70_000
    cases = list(Samples(op(ns), 0).wide())
    clock = iter([0.0, 3.0])
    monkeypatch.setattr(pairwise.time, "process_time", lambda: next(clock))
    assert len(list(pairwise.within_time(cases))) == 1


def test_scalars_that_only_some_values_admit(ns):
    @sl.op(f"{ns}::pooled", requires=("k >= 2",))
    def pooled(x: Float[Tensor, "n c"], k: int = 2, ceil: bool = False) -> Float[Tensor, "n c"]:
        return x * k + ceil

    pairs = [dict(c.recipe.scalars) for c in pairwise.pairs_of_scalars(Samples(pooled, 0))]
    assert pairs == [{"k": 3, "ceil": True}]
    sized = [(dict(c.recipe.scalars), dict(c.recipe.sizes)["c"]) for c in pairwise.scalars_of_sizes(Samples(pooled, 0))]
    assert {c for scalars, c in sized if scalars == {"k": 3, "ceil": True}} == {4, 5, 6, 7}
    assert {"k": 3, "ceil": False} in [scalars for scalars, _ in sized]


def test_scalars_and_equal_numbers(ns):
    tied = [dict(c.recipe.scalars) for c in pairwise.scalars_of_ties(Samples(op(ns), 0)) if c.recipe.values == "ties"]
    assert {"s": 2, "d": 1} in tied
    assert {"s": 1, "d": 2} in tied


def test_multiples_of_what_rows_are_padded_to(ns):
    sizes = [dict(c.recipe.sizes) for c in pairwise.padded_multiples(Samples(op(ns), 0))]
    assert sizes == [{"n": 64, "c": 3}, {"n": 5, "c": 64}]


def test_members_of_tuples_that_differ_where_there_is_room(ns):
    @sl.op(f"{ns}::convolved", requires=("n >= (k - 1) * d[0] + 1",), fake="reference")
    def convolved(
        x: Float[Tensor, "n c"], w: Float[Tensor, "k"], s: tuple[int, int] = (1, 1), d: tuple[int, int] = (1, 1)
    ) -> Float[Tensor, "m c"]:
        return x[(len(w) - 1) * d[0] :: s[0]] * 1

    tried = [dict(c.recipe.scalars) for c in pairwise.scalars_of_sizes(Samples(convolved, 0))]
    assert {"s": (1, 2), "d": (2, 1)} in tried
