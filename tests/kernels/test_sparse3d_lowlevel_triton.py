"""Triton kernels of hash maps, curves, sampling and post-processing, interpreted on the CPU beside the references."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.forked import interpreted

pytest.importorskip("triton")


def test_interpreted_kernels_agree_with_the_references_and_tell_what_was_wrong():
    root, script = Path(__file__).parents[2], Path(__file__).with_name("lowlevel_interpreted.py")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = script, random.randrange(2**31)
    done = interpreted(*command, env=environment, timeout=300)
    assert done.stdout.endswith("agree\n"), f"{command}\n{done.stdout}{done.stderr}"
