"""Samples in which two things are unusual at once."""

from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap.referee import crossed
from shiplap.referee.samples import Samples


def op(ns):
    @sl.op(f"{ns}::scaled", requires=("s >= 1", "d >= 1"))
    def scaled(x: Float[Tensor, "n c"], i: Int64[Tensor, "c"], s: int = 1, d: int = 1) -> Float[Tensor, "n c"]:
        return x * s + d

    return scaled


def test_scalars_two_at_a_time(ns):
    scalars = [dict(c.recipe.scalars) for c in crossed.pairs_of_scalars(Samples(op(ns), 0))]
    assert scalars
    assert all(v["s"] > 1 and v["d"] > 1 for v in scalars)


def test_every_dtype_in_layouts(ns):
    kinds = {(str(c.args[0].dtype), c.recipe.layouts) for c in crossed.layouts_of_dtypes(Samples(op(ns), 0))}
    assert len(kinds) == 3 * len(crossed.PER_DTYPE)


def test_sizes_of_one_in_layouts(ns):
    strides = {c.args[0].stride() for c in crossed.layouts_of_ones(Samples(op(ns), 0)) if c.args[0].shape[1] == 1}
    assert (2, 2) in strides


def test_powers_of_two_and_their_neighbours(ns):
    @sl.op(f"{ns}::negated")
    def negated(i: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        return -i

    values = next(crossed.powers(Samples(negated, 0))).args[0].abs()
    near = [((values + step) & (values + step - 1)) == 0 for step in (-1, 0, 1)]
    assert (near[0] | near[1] | near[2]).all()
    assert values.max() > 1 << 60


def test_large_samples_end_in_time(ns, monkeypatch):
    sizes = [c.numel for c in crossed.large(Samples(op(ns), 0))]
    assert max(sizes) > 70_000
    cases = list(Samples(op(ns), 0).wide())
    clock = iter([0.0, 3.0])
    monkeypatch.setattr(crossed.time, "process_time", lambda: next(clock))
    assert len(list(crossed.afforded(cases))) == 1
