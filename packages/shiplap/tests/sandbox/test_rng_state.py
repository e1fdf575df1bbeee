"""A call may draw random numbers, and may not set the place from which they come."""

import random
import traceback

import numpy as np
import pytest
import torch

from shiplap.sandbox.rng_state import RngWatch, seed_torch


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("random.seed", lambda: random.seed(3)),
        ("numpy.random.seed", lambda: np.random.seed(3)),
        ("torch.set_rng_state", lambda: torch.set_rng_state(STATE)),
    ],
)
def test_a_source_that_stands_where_it_stood_was_set(name, sets):
    dice = RngWatch()
    dice.advance_generators()
    sets()
    assert dice.stuck_generators() == []
    dice.advance_generators()
    sets()
    assert dice.stuck_generators() == [name]
    dice.advance_generators()
    random.random()
    np.random.random()
    torch.rand(3)
    assert dice.stuck_generators() == []


@pytest.mark.skipif(torch.accelerator.is_available(), reason="its generators are seeded as well")
def test_a_seed_gives_the_numbers_of_torch_and_looks_at_no_stack(monkeypatch):
    torch.manual_seed(-7)
    expected = torch.rand(5)
    monkeypatch.setattr(traceback, "format_stack", None)
    seed_torch(-7)
    assert torch.equal(torch.rand(5), expected)


STATE = torch.get_rng_state()
