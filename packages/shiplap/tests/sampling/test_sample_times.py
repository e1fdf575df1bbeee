"""Estimates of the time of samples: what is done once costs no proof, and what is slow is left out and said."""

from __future__ import annotations

import time
from itertools import chain, count
from types import SimpleNamespace

import pytest
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
from shiplap.audit import audit
from shiplap.sampling import samples
from shiplap.sampling.boundary_sizes import GRAIN_ELEMENTS, MILLION_ELEMENTS
from shiplap.sampling.case import tensors_among
from shiplap.sampling.ledger import is_large
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.sample_times import AFFORDED_S, SLOW_SIZE_S, SampleTimes, larger_dims
from shiplap.sampling.samples import Samples


@pytest.fixture
def double(ns):
    @sl.op(f"{ns}::double")
    def double(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x * 2

    return double


@pytest.fixture
def wide(ns):
    @sl.op(f"{ns}::wide")
    def wide(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:
        return x * 2

    return wide


def _leaves_out(condition):
    """Return a replacement of ``SampleTimes.exceed`` that leaves out the samples for which the condition holds."""

    def exceed(times, dims, elements):
        if condition(dims, elements):
            times.left_out[dims] = min(elements, times.left_out.get(dims, elements))
        return condition(dims, elements)

    return exceed


def test_what_is_done_once_in_a_process_is_no_pace():
    times = SampleTimes()
    times.add(("n",), 8193, 3.0)  # an import among it
    times.add(("n",), 8193, 0.01)
    assert not times.exceed(("n",), MILLION_ELEMENTS)
    assert times.describe_left_out() == ""


def test_the_largest_samples_decide():
    times = SampleTimes()
    for size in (5000, 10_000):  # pairs of elements: the time grows with the square
        times.add(("n",), size, (size / 10_000) ** 2)
    assert not times.exceed(("n",), 50_000)
    assert times.exceed(("n",), 200_000)
    times.add(("n",), 50_000, 25.0)
    times.add(("n",), 50_001, 25.0)
    assert times.exceed(("n",), 70_000)


def test_dims_are_estimated_apart_and_the_dearest_stands_for_those_not_timed():
    times = SampleTimes()
    for _ in range(2):
        times.add(("n",), 8193, 1e-3)
        times.add(("c",), 8193, 4.0)
    assert not times.exceed(("n",), MILLION_ELEMENTS)
    assert times.exceed(("c",), GRAIN_ELEMENTS)
    assert times.exceed(("n", "c"), GRAIN_ELEMENTS)
    text = times.describe_left_out()
    assert text == f"left out, as they would take more than {AFFORDED_S:.0f} s: larger c from 70,001 elements on, " + (
        "n and c from 70,001 elements on"
    )


def test_building_counts_beside_examining():
    times = SampleTimes()
    for built in (True, True, False, False):
        times.add(("n",), 10_000, 0.6 * AFFORDED_S / 10, built=built)
    assert not times.exceed(("n",), 80_000)
    assert times.exceed(("n",), 90_000)


def test_a_dim_is_slow_from_the_second_slow_size_in_a_row_on():
    times = SampleTimes()
    times.add_size("n", 63, 2 * SLOW_SIZE_S)  # a compilation among it
    times.add_size("n", 64, 0.1)
    times.add_size("n", 65, 2 * SLOW_SIZE_S)
    assert not times.is_slow("n", 127)
    times.add_size("n", 127, 2 * SLOW_SIZE_S)
    assert times.is_slow("n", 128)
    assert not times.is_slow("c", 128)


def test_dims_that_are_larger_than_in_the_base_sample():
    base = SampleRecipe().but(sizes={"n": 5, "c": 3, "b": (2,)})
    assert larger_dims(base.but(sizes={"n": 4, "c": 4}), base) == ("c",)
    assert larger_dims(base.but(sizes={"b": (2, 3)}), base) == ("b",)


def test_one_slow_sample_leaves_out_no_larger_ones(double, monkeypatch):
    """As in a check whose first long sample imports something."""
    clock = chain([0.0], count(3.0, 1e-4))
    monkeypatch.setattr(samples, "time", SimpleNamespace(process_time=lambda: next(clock), monotonic=time.monotonic))
    source = Samples(double, 1)
    sizes = [case.numel for case in (*source.crowded(), *source.tiles())]
    assert max(sizes) > MILLION_ELEMENTS


def test_a_finding_says_which_samples_were_left_out(double, monkeypatch):
    monkeypatch.setattr("shiplap.sampling.sample_times.AFFORDED_S", 0.0)
    (finding,) = audit(double, checks=["sizes"], seed=1, isolate=False)
    assert "left out, as they would take more than 0 s: larger n from" in finding.evidence


def test_a_required_size_that_was_left_out_for_its_time_makes_a_check_incomplete(double, monkeypatch):
    """The times of earlier checks decide, so that no sample beyond a tile is tried."""
    monkeypatch.setattr(SampleTimes, "exceed", _leaves_out(lambda dims, elements: elements > 64))
    report = audit(double, checks=["sizes"], seed=1, isolate=False)
    assert report.verdict == "incomplete"
    assert "no sample has more than 64 of n or more than 65,536 elements in a tensor" in report.headline
    states = {str(c): c.state for c in report.ledger if c.axis == "large size"}
    assert states["large size x value"] == states["large size x determinism"] == "untouched"


def test_a_check_whose_samples_were_all_left_out_is_incomplete(double, monkeypatch):
    monkeypatch.setattr(SampleTimes, "exceed", _leaves_out(lambda dims, elements: True))
    report = audit(double, checks=["sizes"], seed=1, isolate=False)
    assert report.verdict == "incomplete"
    assert "sizes: left out, as they would take more than" in report.headline


def test_a_dim_that_the_declaration_keeps_within_a_tile_may_be_slow(monkeypatch):
    @sl.op("sample_times::few", requires="k <= 48")
    def few(x: Float32[Tensor, "n k"]) -> Float32[Tensor, "n k"]:
        return x * 2

    monkeypatch.setattr(SampleTimes, "exceed", _leaves_out(lambda dims, elements: dims == ("k",) and elements > 60))
    report = audit(few, checks=["sizes"], seed=1, isolate=False)
    assert report.proven, report.headline
    assert "left out" in report.findings[0].evidence


def test_one_large_sample_of_a_cheap_dim_suffices(wide, monkeypatch):
    """As for a reference with a loop over the rows."""
    monkeypatch.setattr(SampleTimes, "exceed", _leaves_out(lambda dims, elements: "n" in dims and elements > 20_000))
    monkeypatch.setattr(samples, "sizes_near_constants", lambda mined: [63, 65])
    report = audit(wide, checks=["sizes"], seed=1, isolate=False)
    assert report.proven, report.headline
    assert "left out" in report.findings[0].evidence


def test_the_large_sample_of_the_cheapest_dim_comes_before_the_small_steps(wide):
    source = Samples(wide, 1)
    source.times.add(("n",), 20_000, 0.2 * AFFORDED_S)
    source.times.add(("c",), 20_000, 0.1 * AFFORDED_S)
    first = [case for case, _ in zip(source.tiles(), range(4), strict=False)]
    (large,) = [case for case in first if is_large(tensors_among(case.args))]
    assert dict(large.recipe.sizes)["c"] > 4096
    assert [case.label for case in source.tiles()].count(large.label) == 1


def test_an_op_that_admits_no_large_tensor_needs_none():
    @sl.op("sample_times::short", requires="n <= 100")
    def short(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x * 2

    report = audit(short, checks=["sizes"], seed=1, isolate=False)
    assert report.proven, report.headline
    (cell,) = [c for c in report.ledger if str(c) == "large size x value"]
    assert (cell.state, cell.reason) == (
        "does not apply",
        "the declaration admits no such tensor",
    )


def test_a_dim_that_stops_to_grow_is_named():
    times = SampleTimes()
    for size in (63, 64):
        times.add_size("n", size, 2 * SLOW_SIZE_S)
    assert times.is_slow("n", 65)
    assert times.describe_left_out() == "dims that grow no further in small steps, of which two took 2 s each: n at 64"
    times.forget_left_out()
    assert times.describe_left_out() == ""
    assert times.is_slow("n", 65)
