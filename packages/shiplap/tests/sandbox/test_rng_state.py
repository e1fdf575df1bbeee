"""A call may draw random numbers, and may not set the place from which they come."""

import random

import numpy as np
import pytest
import torch

from shiplap.sandbox.rng_state import RngWatch


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


STATE = torch.get_rng_state()
