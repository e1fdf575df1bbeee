"""The ledger: required cells, what fills them, and what makes one not apply."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.sampling.admitted_axes import absent_axes
from shiplap.sampling.ledger import AUDIT, AXES, JUDGE, OBLIGATIONS, TUNE, Ledger, optional_reason, varied_axes
from shiplap.sampling.samples import Samples


@sl.op("ledger::scaled")
def scaled(x: Float[Tensor, "*b c"], w: Float[Tensor, "c"] | None = None, a: float = 1.0) -> Float[Tensor, "*b c"]:
    return x * a if w is None else x * w * a


@sl.op("ledger::fixed")
def fixed(x: Float[Tensor, "4"]) -> Float[Tensor, "4"]:
    return x + 1


def test_each_cell_is_required_or_says_why_it_is_not():
    for table in (AUDIT, JUDGE, TUNE):
        assert {axis for axis, _ in table} <= set(AXES)
        assert {obligation for _, obligation in table} <= set(OBLIGATIONS)
    for axis in AXES:
        for obligation in OBLIGATIONS:
            assert bool(optional_reason(axis, obligation)) != ((axis, obligation) in AUDIT), (axis, obligation)


def test_an_untouched_required_cell_is_named_and_a_covered_one_is_counted():
    ledger = Ledger()
    ledger.look("edges", ("size", "layout"), ("value",), 3)
    ledger.decline("edges", ("rank",), ("value",), "the reference refuses it")
    ledger.absent = {"offset": "no argument is a tensor"}
    cells = {str(c): c for c in ledger.cells(AUDIT, {"edges": ("ok", "seen")}) if c.required}
    assert set(cells) == {"size x value", "rank x value", "layout x value", "offset x value"}
    assert (cells["size x value"].state, cells["size x value"].samples) == ("covered", 3)
    assert (cells["rank x value"].state, cells["rank x value"].reason) == ("does not apply", "the reference refuses it")
    assert cells["offset x value"].reason == "no argument is a tensor"
    untouched = {str(c): c for c in Ledger().cells(AUDIT, {"edges": ("ok", "seen")}) if c.required}
    assert {c.state for c in untouched.values()} == {"untouched"}
    assert untouched["rank x value"].reason == "no sample varied the rank"


def test_a_check_that_does_not_apply_or_was_not_finished_covers_nothing():
    ledger = Ledger()
    ledger.look("fresh", ("size",), ("alias",))
    states = {}
    for verdict in ("skip", "incomplete"):
        cells = {str(c): c for c in ledger.cells(AUDIT, {"fresh": (verdict, "why")})}
        states[verdict] = cells["scalar x alias"].state, cells["size x alias"].state
    assert states == {"skip": ("does not apply",) * 2, "incomplete": ("untouched", "covered")}


def test_records_survive_a_pipe():
    first, second = Ledger(), Ledger()
    first.look("edges", ("size",), ("value",), 2)
    first.decline("edges", ("rank",), ("value",), "refused")
    second.load(first.records())
    assert second.records() == first.records()


def test_axes_are_read_from_what_the_op_receives():
    samples = Samples(scaled, 1)
    base = samples.build(samples.base)

    def axes(**changes):
        case = samples.make(samples.base.but(**changes))
        assert case is not None
        return set(varied_axes(case, base))

    assert axes() == set()
    assert axes(sizes={"c": 7}) == {"size"}
    assert axes(sizes={"b": (2, 3)}) == {"size", "rank"}
    assert axes(layouts={"x": "offset"}) == {"offset", "alignment"}
    assert axes(layouts={"x": "transposed"}) == {"layout"}
    assert axes(dtypes={"Float": "bfloat16"}) == {"dtype"}
    assert axes(values="nan") == {"value"}
    assert axes(scalars={"a": 2.0}) == {"scalar"}
    assert axes(absent=("w",)) == {"absence"}


def test_a_builder_that_ignores_the_sizes_varies_none():
    @sl.op("ledger::stubborn")
    def stubborn(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    @stubborn.samples
    def _(rng, sizes, dtype, device):
        return (torch.randn(4, generator=rng),)

    samples = Samples(stubborn, 1)
    base = samples.build(samples.base)
    case = samples.make(samples.base.but(sizes={"n": 9}, dtypes={"Float": "float64"}))
    assert case is not None
    assert varied_axes(case, base) == ()


def test_axes_that_a_declaration_does_not_have():
    assert set(absent_axes(Samples(scaled, 1))) == {"seed"}
    assert set(absent_axes(Samples(fixed, 1))) == {"size", "rank", "scalar", "absence", "seed"}
