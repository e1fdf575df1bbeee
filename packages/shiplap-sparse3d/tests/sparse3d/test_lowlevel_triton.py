"""Triton kernels of hash maps, curves, sampling and post-processing, interpreted on the CPU beside the references."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shiplap_testing.effort import EFFORTS
from shiplap_testing.forked import interpreted

pytest.importorskip("triton")


@pytest.mark.long
@pytest.mark.parametrize("effort", EFFORTS)
def test_interpreted_kernels_agree_with_the_references_and_tell_what_was_wrong(effort):
    script = Path(__file__).with_name("lowlevel_interpreted.py")
    command = script, random.randrange(2**31), effort
    done = interpreted(*command, timeout=300)
    assert done.stdout.endswith("agree\n"), f"{command}\n{done.stdout}{done.stderr}"
