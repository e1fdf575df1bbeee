"""The Triton kernels, interpreted on the CPU beside the references, bit by bit; and compiled for Hopper."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from shiplap_testing.effort import EFFORTS
from shiplap_testing.forked import WITH_FAMILIES, interpreted, python

pytest.importorskip("triton")


@pytest.mark.parametrize("effort", EFFORTS)
def test_interpreted_kernels_give_the_bits_of_the_references(effort):
    script = Path(__file__).with_name("triton_interpreted.py")
    command = script, random.randrange(2**31), effort
    done = interpreted(*command, timeout=300)
    assert done.stdout.endswith("agree\n"), f"{command}\n{done.stdout}{done.stderr}"


def test_quantising_compiles_for_hopper_and_does_not_spill():
    """A thread that holds too much of a row leaves no room for other rows, which are what hides the memory's delay."""
    done = python("-m", "tests.slidesparse.hopper_quantise", imported=WITH_FAMILIES)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 5
    assert all(resources["stack"] == 0 for *_, resources in rows), rows
    assert not any(
        resources["fused"] for *_, resources in rows
    )  # one rounding in place of two: other integers, now and then
    assert all(resources["NaN"] for *_, resources in rows)  # the interpreter's maximum keeps NaN whatever it is told
    for *case, resources in rows:
        if case[2] <= 8192:  # four rows of 16 KB under way
            assert resources["registers"] * 128 * 4 <= 65536, (case, resources)
