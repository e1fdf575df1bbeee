"""The Triton kernels, interpreted on the CPU beside the references, bit by bit."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.forked import interpreted

pytest.importorskip("triton")


def test_interpreted_kernels_give_the_bits_of_the_references():
    root, script = Path(__file__).parents[3], Path(__file__).with_name("triton_interpreted.py")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = script, random.randrange(2**31)
    done = interpreted(*command, env=environment, timeout=300)
    assert done.stdout.endswith("agree\n"), f"{command}\n{done.stdout}{done.stderr}"
