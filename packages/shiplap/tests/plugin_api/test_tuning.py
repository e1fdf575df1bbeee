"""Configs that a source lists: raced like those of a declaration, in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shiplap.tuning import CandidateRefused, frozen_table, recipe_of
from shiplap.tuning.candidate import candidate_label
from shiplap.tuning.inputs import draw_inputs
from tests.plugin_api import listed


@pytest.fixture(autouse=True)
def store_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(frozen_table, "_made", {})
    frozen_table.thaw()
    yield
    frozen_table.thaw()


def test_candidates_are_the_reference_and_what_the_source_lists() -> None:
    drawn = draw_inputs(listed.twice, recipe_of(listed.twice, (torch.ones(3),)), "cpu")
    labels = [candidate_label(c) for c in listed.ALGORITHMS.candidates(listed.twice, drawn)]
    assert labels == ["reference", *(f"library(ALGORITHM={a})" for a in range(3))]


def test_a_config_that_is_refused_is_not_in_the_race() -> None:
    drawn = draw_inputs(listed.twice, recipe_of(listed.twice, (torch.ones(7),)), "cpu")
    *_, last = listed.ALGORITHMS.candidates(listed.twice, drawn)
    with pytest.raises(CandidateRefused, match="an odd size"):
        last.prepare((torch.ones(7),))
    (out,) = last.prepare((torch.ones(8),))()
    assert torch.equal(out, torch.full((8,), 2.0))


@pytest.mark.long
def test_each_size_has_a_choice() -> None:
    few, some = listed.ALGORITHMS.tune(listed.twice, [{"n": 2}, {"n": 3}], device="cpu", seconds=60.0)
    assert (few.label, some.label) == ("library(ALGORITHM=1)", "library(ALGORITHM=2)")


@pytest.mark.long
def test_the_fastest_right_one_is_chosen_and_in_force() -> None:
    (many,) = listed.ALGORITHMS.tune(listed.twice, [{"n": 999}], device="cpu", seconds=60.0)
    assert many.origin == "measured"
    assert many.label == "library(ALGORITHM=4)"  # the third is faster than two of the others, and wrong
    assert [f.evidence.partition(":")[0] for f in many.findings if f.verdict == "fail"] == ["library(ALGORITHM=3)"]
    repeated = listed.ALGORITHMS.tune(listed.twice, [{"n": 999}], device="cpu")
    assert repeated == [many.but(origin="stored")]
