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
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.sample_times import AFFORDED_S, SLOW_SIZE_S, SampleTimes, larger_dims
from shiplap.sampling.samples import Samples


@pytest.fixture
def double(ns):
    @sl.op(f"{ns}::double")
    def double(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x * 2

    return double


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
